"""SyncVectorEnv: any Gymnasium envs, batched in this process."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from vecenv.core.arguments import Seed, read_autoreset_mode, seed_per_env
from vecenv.core.autoreset import EnvGroup, blame
from vecenv.core.base import GymVecEnv, StepBatch, StepResult
from vecenv.core.ending import close_at_exit
from vecenv.core.errors import EnvCreationError
from vecenv.core.infos import keep_info, take_infos
from vecenv.core.replacing import (
    MissingEnv,
    SavedEnv,
    dump_env,
    load_env,
    pack_envs,
    raise_creation_errors,
    remade,
    unpack_envs,
)
from vecenv.core.rows import StepRows
from vecenv.core.spaces import ObservationMode, batch_env_spaces, require_new_env, take_row
from vecenv.timing.stamps import EnvStamps

__all__ = ["SyncVectorEnv"]


class SyncVectorEnv(GymVecEnv):
    """Gymnasium envs stepped one after the other in this process.

    A drop-in replacement for `gymnasium.vector.SyncVectorEnv`: same arguments, attributes, methods,
    results and errors, with less overhead and the additions of `VecEnv`.

    Args:
        env_fns: One factory per env, called without arguments.
        copy: Whether returned observations are copies, which the caller may keep. With False they
            are views of memory that the next call overwrites.
        observation_mode: "same", "different" (spaces of same shape and dtype) or the pair
            (batched space, single space).
        autoreset_mode: When envs whose episode has ended are reset, see `EnvGroup`: a member of
            `gymnasium.vector.AutoresetMode`, or its name or value ("same_step", "SameStep").

    Raises:
        EnvCreationError: A factory raised; names the env. Envs that were already made are closed.
        RuntimeError: The envs' spaces differ.

    Example:
        >>> import gymnasium as gym
        >>> envs = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3)
        >>> obs, infos = envs.reset(seed=1)
        >>> obs, rewards, terminations, truncations, infos = envs.step([0, 1, 0])
        >>> obs.shape, rewards
        ((3, 4), array([1., 1., 1.]))
        >>> envs.send([0, 1], env_ids=[2, 0])
        >>> envs.recv(min_envs=1).env_ids
        array([2])
        >>> envs.close()
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env]],
        copy: bool = True,
        observation_mode: ObservationMode = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        self.env_fns = env_fns
        self.copy = copy
        self.observation_mode = observation_mode
        mode = read_autoreset_mode(autoreset_mode)
        self.envs = make_envs(env_fns)
        try:
            spaces = batch_env_spaces(
                [env.observation_space for env in self.envs],
                [env.action_space for env in self.envs],
                observation_mode,
                type(self).__name__,
            )
        except Exception:
            _close_all(self.envs)
            raise
        first = self.envs[0]
        self._set_up(len(self.envs), spaces, mode, first.metadata, first.render_mode)
        rows = StepRows.make(self.single_observation_space, self.num_envs)
        self._group = EnvGroup(self.envs, mode, rows)
        self._bind_rows(rows)
        self._sent: deque[tuple[int, Any]] = deque()
        # Not in `__del__`: copies that share everything (EzPickle's) would then close each other's
        # envs.
        self._end = weakref.finalize(self._group, _close_all, self.envs)
        self._end.atexit = False
        close_at_exit(self)

    def _reset(
        self, seed: Seed, options: dict[str, Any] | None, reset_mask: np.ndarray | None
    ) -> tuple[Any, dict[str, Any]]:
        seeds = seed_per_env(seed, self.num_envs)
        if self._calls.num_in_flight == 0:
            self._sent.clear()  # a full reset gives up what was in flight
        try:
            infos = self._group.reset(seeds, options, reset_mask)
        except Exception as error:
            self._calls.forget_reset(error)
            raise
        self._note_reset(infos, slice(None) if reset_mask is None else np.flatnonzero(reset_mask))
        return self._observations(), infos

    def _step(self, actions: Any, out: Any) -> StepResult:
        slot = self._slot(out)
        self._refuse_ended()
        each = self._actions.each(actions)
        try:
            infos = self._group.step(each)
        except Exception as error:  # some envs have been stepped and others not
            self._calls.forget_reset(error)
            raise
        return self._results(out, slot, infos)

    def _send(self, actions: Any, env_ids: np.ndarray) -> None:
        self._refuse_ended(env_ids)
        self._sent.extend(zip(env_ids.tolist(), self._actions.snapshot(actions), strict=True))

    def _recv(self, count: int, most: int, timeout: float | None) -> StepBatch:
        """Step the `count` envs that were sent first; there is nothing to wait for."""
        indices, actions = zip(*(self._sent.popleft() for _ in range(count)), strict=True)
        env_ids = np.array(indices, dtype=np.int64)
        infos: Any = {}
        try:
            for index, action in zip(indices, actions, strict=True):
                self._group.step_env(index, action, infos)
        except Exception as error:
            # Some envs have been stepped and others not: give up all in flight.
            self._sent.clear()
            self._calls.give_up(error)
            raise
        if self._masks.is_apart:
            infos = {indices.index(k): info for k, info in infos.items()}
        else:
            infos = take_infos(infos, env_ids)
        return self._batch_of(env_ids, infos)

    def _keep_infos_apart(self) -> None:
        """Return unbatched infos from now on, see `InfosApart`; used in actors."""
        self._group.enter = keep_info
        self._masks.is_apart = True

    def _begin_stamps(self) -> EnvStamps | None:
        self._calls.require_open("timing.enable")
        stamps = EnvStamps.make(self.num_envs)
        self._group.stamp(stamps)
        return stamps

    def _end_stamps(self) -> None:
        self._group.stamp(None)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute, and return the results."""
        self._calls.require_idle("call")
        found = self._each("call", lambda index: self.envs[index].get_wrapper_attr(name))

        def value_of(index: int) -> Any:
            value = found[index]
            return value(*args, **kwargs) if callable(value) else value

        return tuple(self._each("call", value_of))

    def _set_attr(self, name: str, values: Sequence[Any]) -> None:
        self._each("set_attr", lambda index: self.envs[index].set_wrapper_attr(name, values[index]))

    def _each(self, call: str, function: Callable[[int], Any]) -> list[Any]:
        """Return the results of a function for each env; an exception names the env."""
        found = []
        for index in range(self.num_envs):
            try:
                found.append(function(index))
            except BaseException as error:
                blame(error, index, f"This came from env {index} of {self.num_envs}, in {call}.")
                raise
        return found

    def _reopen(self, factories: dict[int, Callable[[], Env]]) -> None:
        self._calls.unreset.update(factories)
        self.env_fns = [factories.get(env_id, made) for env_id, made in enumerate(self.env_fns)]
        spaces, errors = (self.single_observation_space, self.single_action_space), []
        for env_id, factory in factories.items():
            old, mode = self.envs[env_id], self.observation_mode
            try:
                new = remade(env_id, old, factory, self.envs, spaces, mode)
            except Exception as error:
                failed = _creation_error(error, env_id, self.env_fns)
                failed.__cause__ = error
                errors.append(failed)
                new = MissingEnv(str(failed), False, spaces)
            self.envs[env_id] = new
            self._group.ended.discard(env_id)
        raise_creation_errors(errors)

    def state_dict(self) -> dict[str, Any]:
        """Return the envs, pickled one by one; see `VecEnv.state_dict`."""
        self._calls.require_ready("state_dict")
        space = self.single_observation_space
        obs = self._rows.obs.take(np.arange(self.num_envs))
        ended = self._group.ended
        pickles = [
            dump_env(SavedEnv(env, index in ended, take_row(space, obs, index)), index)
            for index, env in enumerate(self.envs)
        ]
        return pack_envs(pickles, self._notes())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the envs by those of a state, and close the former ones: this runs code.

        See `VecEnv.load_state_dict`.
        """
        self._calls.require_idle("load_state_dict")
        pickles, notes = unpack_envs(state, self.num_envs)
        loaded = [
            load_env(pickled, index, env.observation_space, env.action_space)
            for index, (env, pickled) in enumerate(zip(self.envs, pickles, strict=True))
        ]
        before = list(self.envs)
        for index, saved in enumerate(loaded):
            self.envs[index] = saved.env
            self._rows.obs.write(index, saved.obs)
        self._group.ended.clear()
        self._group.ended.update(index for index, saved in enumerate(loaded) if saved.is_over)
        self._take_notes(*notes)
        self._sent.clear()
        self._calls.mark_reset()
        _close_all(before)

    def close_extras(self, **kwargs: Any) -> None:
        """Close all envs, even if some raise; then raise the first exception."""
        if hasattr(self, "_end"):
            self._end.detach()
        errors = _close_all(getattr(self, "envs", []))
        if errors:
            raise errors[0]


def make_envs(env_fns: Sequence[Callable[[], Env]]) -> list[Env]:
    """Call the factories; if one raises, close the envs made so far and name the env."""
    envs: list[Env] = []
    known: dict[int, int] = {}
    for index, env_fn in enumerate(env_fns):
        try:
            env = env_fn()
            require_new_env(env, known)
            envs.append(env)
        except Exception as error:
            _close_all(envs)
            failed = _creation_error(error, index, env_fns)
            if envs:
                failed.add_note(
                    'If a process can hold only one env of this kind, use backend="async" '
                    f"(AsyncVectorEnv) with num_workers={len(env_fns)}: a worker for each."
                )
            raise failed from error
    return envs


def _creation_error(
    error: Exception, index: int, env_fns: Sequence[Callable[[], Env]]
) -> EnvCreationError:
    """Return the error that names an env and its factory."""
    return EnvCreationError(
        f"Making env {index} of {len(env_fns)} failed with "
        f"{type(error).__name__}: {error} (raised by env_fns[{index}], {env_fns[index]!r})"
    )


def _close_all(envs: Sequence[Env]) -> list[Exception]:
    """Close every env and return the exceptions that were raised."""
    errors = []
    for index, env in enumerate(envs):
        try:
            env.close()
        except Exception as error:
            error.add_note(f"This came from env {index} of {len(envs)}, in close().")
            errors.append(error)
    return errors
