"""Step Gymnasium envs one after the other, by the rules of autoreset.

Only this module decides when an env of plain Python is reset. `SyncVectorEnv` has one group of all
its envs; a worker process has one group of its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from vecenv.core.errors import ObservationError
from vecenv.core.infos import add_info, copy_value
from vecenv.core.rows import NEEDS_CONVERSION, StepRows
from vecenv.core.spaces import short
from vecenv.timing.stamps import EnvStamps, stamped

__all__ = ["EnvGroup", "blame"]


class EnvGroup:
    """Gymnasium envs that one thread steps in turn.

    NEXT_STEP: the step after the end of an episode ignores its action and resets; its reward is 0
    and its flags are False. SAME_STEP: the step that ends an episode also resets; it returns the
    new episode's observation, `infos["final_obs"]` has the last one of the old episode, and
    `infos["final_info"]` its info, unless the new episode's info has these keys itself. DISABLED:
    the caller resets; stepping an ended env is refused.

    Args:
        envs: The envs.
        autoreset_mode: When envs are reset.
        rows: Rows for the results; row i is env i's.
        enter: Enters an env's info into the infos that `reset` and `step` return, as `add_info`
            does. Arguments: infos so far, the info, index of the env, number of envs. Called once
            per env and call, in the envs' order.

    Attributes:
        envs: The envs; may be replaced item by item.
        ended: Indices of the envs whose episode has ended and which have not been reset since.
    """

    def __init__(
        self,
        envs: list[Env],
        autoreset_mode: AutoresetMode,
        rows: StepRows,
        enter: Callable[[Any, Any, int, int], None] = add_info,
    ) -> None:
        self.envs, self._rows, self.enter = envs, rows, enter
        self._steppers: Sequence[Any] = envs  # the envs, or stand-ins that stamp their steps
        self.autoreset_mode = autoreset_mode
        self.ended: set[int] = set()
        self._indices = range(len(envs))

    def reset(
        self,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None,
        reset_mask: np.ndarray | None,
    ) -> dict[Any, Any]:
        """Reset all envs or those of `reset_mask`, write their rows, return the batched infos.

        Every env gets a deep copy of `options` of its own. An env's exception is raised with its
        index as `env_index`; later envs are not reset.
        """
        infos: dict[Any, Any] = {}
        for index in self._indices if reset_mask is None else np.flatnonzero(reset_mask).tolist():
            self.reset_env(index, seeds[index], options, infos)
        return infos

    def reset_env(
        self, index: int, seed: int | None, options: dict[str, Any] | None, infos: dict[Any, Any]
    ) -> None:
        """Reset one env, write its row, enter its info; errors have its index as `env_index`."""
        try:
            own_options = None if options is None else copy_value(options)
            result = self._steppers[index].reset(seed=seed, options=own_options)
            if not isinstance(result, tuple | list) or len(result) != 2:
                raise ObservationError(
                    f"returned {short(result, 200)} from reset, expected (obs, info); return "
                    "`obs, {}`",
                    index,
                )
            self._rows.obs.write(index, result[0])
            self.ended.discard(index)
            if result[1]:
                self.enter(infos, result[1], index, len(self.envs))
        except BaseException as error:
            note = f"This came from env {index}, in reset(seed={seed})."
            if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
                note += (
                    " An env's method is `def reset(self, *, seed=None, options=None)`, which "
                    "calls `super().reset(seed=seed)`."
                )
            blame(error, index, note)
            raise

    def step(self, actions: Iterable[Any]) -> dict[Any, Any]:
        """Step all envs, write their rows and return the batched infos.

        There is one action per env, in order. An env's exception is raised with its index as
        `env_index`; later envs are not stepped.
        """
        rows, ended, enter = self._rows, self.ended, self.enter
        rows.terminations[:] = rows.truncations[:] = False
        resets_next = bool(ended)  # NEXT_STEP only: elsewhere `ended` is empty here
        target, rewards = rows.obs.target, rows.reward_view
        infos, index = {}, 0
        try:
            # Not strict=True: the number of actions is checked already, and strict costs 0.7 us.
            each = zip(self._indices, self._steppers, rows.obs.keys, actions)  # noqa: B905  # see above
            for index, env, key, action in each:
                if resets_next and index in ended:
                    info = self._begin_episode(index)
                else:
                    result = env.step(action)
                    try:
                        target[key], rewards[index], terminated, truncated, info = result
                    except NEEDS_CONVERSION:
                        terminated, truncated, info = _write_converted(rows, index, result)
                    if terminated or truncated:
                        rows.terminations[index], rows.truncations[index] = terminated, truncated
                        info = self._end_episode(index, result[0], info)
                if info:
                    enter(infos, info, index, len(self.envs))
        except BaseException as error:
            blame(error, index, f"This came from env {index} of {len(self.envs)}.")
            raise
        return infos

    def step_env(self, index: int, action: Any, infos: dict[Any, Any]) -> None:
        """Step one env as `step` does, and enter its info into `infos`.

        It does not call `step`, as a worker with an env of its own spends most of its time here.
        """
        rows = self._rows
        rows.terminations[index] = rows.truncations[index] = False
        try:
            if index in self.ended:
                info = self._begin_episode(index)
            else:
                result, obs = self._steppers[index].step(action), rows.obs
                try:
                    obs.target[obs.keys[index]], rows.reward_view[index], ended, cut, info = result
                except NEEDS_CONVERSION:
                    ended, cut, info = _write_converted(rows, index, result)
                if ended or cut:
                    rows.terminations[index], rows.truncations[index] = ended, cut
                    info = self._end_episode(index, result[0], info)
            if info:
                self.enter(infos, info, index, len(self.envs))
        except BaseException as error:
            blame(error, index, f"This came from env {index} of {len(self.envs)}.")
            raise

    def _begin_episode(self, index: int) -> Any:
        """Reset an env whose episode had ended before this step; return the info."""
        obs, info = self._steppers[index].reset()
        self.ended.discard(index)
        self._rows.obs.write(index, obs)
        self._rows.rewards[index] = 0.0
        return info

    def _end_episode(self, index: int, obs: Any, info: Any) -> Any:
        """Apply the autoreset mode to the step that ends an episode; return the info to report."""
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            self.ended.add(index)
            return info
        # `reset` may reuse the memory of the env's observation and info, so copy them before.
        final = {"final_obs": deepcopy(obs), "final_info": copy_value(info)}
        obs, info = self._steppers[index].reset()
        self._rows.obs.write(index, obs)
        if isinstance(info, Mapping):
            return {**final, **info}
        return info or final  # which is no dict: reported when it is entered

    def stamp(self, stamps: EnvStamps | None) -> None:
        """Begin to stamp the envs' steps and resets, row i for env i; None stops."""
        self._steppers = self.envs if stamps is None else stamped(self.envs, stamps)

    def mark_done(self, index: int) -> None:
        """Stamp the time at which an env's latest results were written, if stamps are on."""
        if self._steppers is not self.envs:
            self._steppers[index].mark_done()


def blame(error: BaseException, index: int, note: str) -> None:
    """Note in an exception which env raised it: `env_index` for programs, a note for readers."""
    vars(error)["env_index"] = index
    if isinstance(error, Exception):
        error.add_note(note)


def _write_converted(rows: StepRows, index: int, result: Any) -> tuple[Any, Any, Any]:
    """Write a step's result that the fast path refused, or raise what is wrong with it."""
    if not isinstance(result, Sequence) or isinstance(result, str | bytes) or len(result) != 5:
        hint = ""
        if isinstance(result, tuple) and len(result) == 4:
            hint = (
                "; four are gym's old interface: `done` is two flags now, terminated (the task is "
                "over) and truncated (cut by a time limit)"
            )
        raise ObservationError(
            f"returned {short(result, 200)} from step, "
            f"expected (obs, reward, terminated, truncated, info){hint}",
            index,
        )
    obs, reward, terminated, truncated, info = result
    rows.obs.write(index, obs)
    try:
        if isinstance(reward, str | bytes | None):  # though `float` may read it
            raise TypeError
        # Anything that is one number, of any type and size.
        rows.rewards[index] = reward.item() if isinstance(reward, np.ndarray) else float(reward)
    except (TypeError, ValueError, OverflowError):
        problem = f"returned the reward {reward!r}, expected one number (a float)"
        raise ObservationError(problem, index) from None
    return terminated, truncated, info
