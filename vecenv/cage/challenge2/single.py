"""One CAGE Challenge 2 environment behind Gymnasium's interface for single envs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Env, logger
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode
from rich.table import Table

from vecenv.cage.challenge2.env import METADATA, Cage2VectorEnv
from vecenv.cage.challenge2.view.render import RENDER_MODES
from vecenv.core.errors import ActionError, ActionTypeError

__all__ = ["Cage2Env"]

_SAVED = "_saved_state"  # in what is pickled, instead of the vector env


class Cage2Env(Env[np.ndarray, Any]):
    """One copy of the CAGE Challenge 2 simulator.

    With seed s it does what env i of a `Cage2VectorEnv` does with seed s - i.

    Args:
        render_mode: "ansi" or "rgb_array", what `render` returns.
        **options: `red_agent`, `episode_length`, `rules`, `scenario`, `observation`, `green`,
            `obs_dtype` and `step_infos` as for `Cage2VectorEnv`.

    Raises:
        TypeError, ValueError: An argument is not what it should be; the message names it.

    Example:
        >>> env = Cage2Env(red_agent="meander", episode_length=30, step_infos=["red_type"])
        >>> obs, info = env.reset(seed=1)
        >>> obs, reward, terminated, truncated, info = env.step(0)
        >>> reward, truncated, info
        (0.0, False, {'red_type': 1})
        >>> env.close()
    """

    metadata: dict[str, Any] = METADATA

    def __init__(self, *, render_mode: str | None = None, **options: Any) -> None:
        for name in ("num_envs", "autoreset_mode", "num_threads", "episode_infos"):
            if name in options:
                raise TypeError(f"{name} is for vector envs; a single env takes none")
        self._options = {**options, "render_mode": render_mode}
        self._envs = self._make_envs()
        self.observation_space = self._envs.single_observation_space
        self.action_space = self._envs.single_action_space
        self.render_mode = render_mode
        self._num_actions = int(self._envs.single_action_space.n)  # type: ignore[attr-defined]
        self._actions = np.zeros(1, np.int64)
        self._is_over = False

    def _make_envs(self) -> Cage2VectorEnv:
        mode = AutoresetMode.DISABLED
        return Cage2VectorEnv(1, autoreset_mode=mode, num_threads=1, **self._options)

    @property
    def scenario(self) -> Any:
        """The tables."""
        return self._envs.scenario

    @property
    def true_state(self) -> Any:
        """The true state: a live read-only STATE_DTYPE record."""
        return self._envs.true_state[0]

    def decoded_state(self) -> dict[str, np.ndarray]:
        """Return the true state per host, see `state.decode`."""
        return {name: rows[0] for name, rows in self._envs.decoded_state().items()}

    def action_masks(self) -> np.ndarray:
        """Return which actions can have an effect, int8 (num_actions,) of 0 and 1.

        It is what `action_space.sample(mask=...)` takes; `mask.view(bool)` is the same as bool.
        """
        return self._envs.action_masks()[0]

    def observe(self) -> np.ndarray:
        """Return the observation of the state as it is; nothing is stepped."""
        return self._envs.observe()[0]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the whole state as arrays (copies), the random stream included.

        An env made with the same arguments goes on from it bit for bit after `load_state_dict`. The
        arrays can be stored with `numpy.savez`. Copies (`copy.deepcopy`) and pickles of an env,
        wrapped or not, go on from where it was, too. The stream of `action_space.sample` is not a
        part of the state; copies and pickles have it.

        Raises:
            ResetNeeded: The env was never reset.
        """
        return self._envs.state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from a state that `state_dict` returned; `observe` gives its observation.

        Raises:
            KeyError: An entry is missing.
            ValueError: It is the state of another network, or of a vector env of several envs.
        """
        self._envs.load_state_dict(state)
        self._is_over = bool(self._envs.state_dict()["runs"]["episode_over"][0])

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "_envs"}
        try:
            return {**kept, _SAVED: self.state_dict()}
        except ResetNeeded:
            return {**kept, _SAVED: None}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        state = kept.pop(_SAVED)
        vars(self).update(kept)
        self._envs = self._make_envs()
        if state is not None:
            self._envs.load_state_dict(state)

    def blue_table(self) -> Table:
        """Return what blue sees, for people: print it with `rich`."""
        return self._envs.blue_table()

    def true_table(self) -> Table:
        """Return what is true, for people: print it with `rich`."""
        return self._envs.true_table()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: Of the random stream; None lets it go on.
            options: None are known.
        """
        if options:
            raise ValueError(f"options has {sorted(options)}, but this env knows none")
        super().reset(seed=seed)
        obs, _ = self._envs.reset(seed=seed)
        self._is_over = False
        return obs[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Let blue act, then red.

        Args:
            action: Integer, number of the action.

        Raises:
            ActionError: No integer, or there is no such action. Nothing was stepped.
            ResetNeeded: Before the first `reset`, or the episode is over.
        """
        self._actions[0] = self._checked(action)
        if self._is_over:
            raise ResetNeeded("the episode is over; call reset() before the next step")
        obs, rewards, _, truncations, infos = self._envs.step(self._actions)
        self._is_over = bool(truncations[0])
        info = {name: int(infos[name][0]) for name in self._envs.step_infos}
        return obs[0], float(rewards[0]), False, self._is_over, info

    def _checked(self, action: Any) -> int:
        try:
            number = np.asarray(action)
        except ValueError as error:
            raise ActionTypeError(f"action is {action!r}, expected one integer") from error
        expected = f"expected an integer from 0 to {self._num_actions - 1}"
        if number.shape != () or number.dtype.kind not in "iu":
            raise ActionTypeError(f"action is {action!r}, {expected}")
        if not 0 <= number < self._num_actions:
            raise ActionError(f"action is {action!r}, {expected}")
        return int(number)

    def render(self) -> Any:
        """Return a text or a picture, as `render_mode` says."""
        if self.render_mode is None:
            logger.warn(f"render_mode is None: make the env with one of {', '.join(RENDER_MODES)}")
            return None
        return self._envs.render_env()

    def close(self) -> None:
        """Close the env; may be called twice."""
        self._envs.close()
