"""Replace envs in a row of a vector env: restarted after an exception, reopened, missing, saved.

The state of an env is its pickle, with wrappers and random generators. Pickles are code: loading
one runs it.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env, Space
from gymnasium.utils import EzPickle
from gymnasium.vector.utils import create_empty_array

from vecenv.core.errors import EnvCreationError, EnvStateError
from vecenv.core.infos import copy_value
from vecenv.core.pickling import dumps, loads
from vecenv.core.spaces import require_new_env, require_spaces, short, take_row

__all__ = [
    "MissingEnv",
    "RestartingEnv",
    "SavedEnv",
    "dump_env",
    "load_env",
    "mixed_seed",
    "pack_envs",
    "raise_creation_errors",
    "read_reopened",
    "remade",
    "unpack_envs",
    "with_restarts",
    "without_restarts",
]

_FORMAT = "vecenv pickled envs 1"


class RestartingEnv:
    """Stands for an env in `EnvGroup`; if the env raises, makes a new one and reports truncation.

    The failed step returns the last observation, reward 0, truncated, and the info fields
    `restarts` (int, so far) and `restart_reason` (text). Autoreset does the rest. KeyboardInterrupt
    is no fault of the env.

    Attributes:
        env: The env that is being stepped.

    Args:
        env: The first env.
        factory: Makes the later envs.
        count: int64 (1,), shared with the caller: how often the env has been replaced.
    """

    def __init__(self, env: Env, factory: Callable[[], Env], count: np.ndarray) -> None:
        self.env = env
        self._count, self._factory = count, factory
        self._seed: int | None = None
        self._last_obs: Any = None
        self._lost: str | None = None  # why the episode in progress is lost

    def lose(self, last_obs: Any, reason: str) -> None:
        """Let the next step report that the episode was lost with the former worker."""
        self._last_obs, self._lost = last_obs, reason

    def go_on_with(self, env: Env, last_obs: Any, factory: Callable[[], Env] | None = None) -> None:
        """Stand for another env from now on; `last_obs` is its last observation."""
        self.env, self._last_obs, self._lost = env, last_obs, None
        self._factory = factory or self._factory

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the env; if it raises, try once with a new one."""
        self._lost = None
        self._seed = self._seed if seed is None else seed
        again = None if options is None else copy_value(options)  # the env may change its options
        try:
            result = self.env.reset(seed=seed, options=options)
        except (Exception, SystemExit):
            self._replace()
            result = self.env.reset(seed=seed, options=again)
        self._last_obs = result[0]
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env, or report the loss of its episode."""
        reason, self._lost = self._lost, None
        if reason is None:
            try:
                result = self.env.step(action)
                self._last_obs = result[0]
                return result
            except (Exception, SystemExit) as error:
                reason = f"{type(error).__name__}: {error} (action {short(action, 200)})"
                self._replace()
        info = {"restarts": int(self._count[0]), "restart_reason": reason}
        return self._last_obs, 0.0, False, True, info

    def _replace(self) -> None:
        """Make a new env and seed it from the seed of the last reset and the number of restarts."""
        with contextlib.suppress(Exception, SystemExit):  # it has just raised, so closing may fail
            self.env.close()
        self.env = self._factory()
        self._count += 1
        if self._seed is not None:
            self.env.reset(seed=mixed_seed(self._seed, int(self._count[0])))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


def mixed_seed(seed: int, count: int) -> int:
    """Return the seed of the env that replaces one for the `count`-th time."""
    return int(np.random.SeedSequence([seed, count]).generate_state(1)[0])


def with_restarts(
    envs: Sequence[Env], factories: Sequence[Callable[[], Env]], counts: np.ndarray
) -> list[Any]:
    """Wrap envs to restart when they raise; the caller reads counts, int64 (num_envs,)."""
    return [
        RestartingEnv(env, factory, counts[index : index + 1])
        for index, (env, factory) in enumerate(zip(envs, factories, strict=True))
    ]


def without_restarts(env: Any) -> Env:
    """Return the env itself."""
    return env.env if isinstance(env, RestartingEnv) else env


class MissingEnv(Env):
    """Takes the row of an env that could not be made, until that row is reopened.

    Args:
        reason: What kept the env from being made: a text, or an `EnvFault`.
        is_empty: Whether the row can be reset and stepped all the same: observations are zeros and
            every step is truncated, with the reason as `restart_reason` in the info. Else both
            raise EnvCreationError.
        spaces: (observation space, action space) of its row, once they are known.
    """

    def __init__(
        self, reason: Any, is_empty: bool, spaces: tuple[Space, Space] | None = None
    ) -> None:
        self.reason, self._is_empty = reason, is_empty
        if spaces is not None:
            self.observation_space, self.action_space = spaces

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Return an empty observation, or raise."""
        reason = getattr(self.reason, "text", self.reason)
        if not self._is_empty:
            raise EnvCreationError(f"this row has no env until it is reopened: {reason}")
        rows = create_empty_array(self.observation_space, 1, np.zeros)
        return take_row(self.observation_space, rows, 0), {"restart_reason": reason}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return a truncated step, or raise."""
        obs, info = self.reset()
        return obs, 0.0, False, True, info

    def get_wrapper_attr(self, name: str) -> Any:
        """Return None for any name, or raise."""
        if not self._is_empty:
            self.reset()

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set nothing, or raise."""
        self.get_wrapper_attr(name)
        return False


def remade(
    env_id: int,
    env: Env,
    factory: Callable[[], Env],
    others: Iterable[Env],
    spaces: tuple[Space, Space],
    observation_mode: Any,
) -> Env:
    """Close an env, then return a new one for its row; raise if it can't be made.

    The old env is closed first: a process may have memory, or a display, for only one of them. The
    factory may return none of the `others` of this process, and an env of these (observation space,
    action space), whose bounds may differ unless the observation mode is "same".
    """
    with contextlib.suppress(Exception):  # the old env is dropped in any case
        env.close()
    new = factory()
    require_new_env(new, {id(other.unwrapped): number for number, other in enumerate(others)})
    try:
        found = new.observation_space, new.action_space
        require_spaces(env_id, found, spaces, observation_mode, "that of the other envs")
    except RuntimeError:
        new.close()
        raise
    return new


def read_reopened(env_ids: np.ndarray, factories: Any) -> dict[int, Callable[[], Env]]:
    """Return the new factory of each row to be reopened, int64 (B,), in ascending order.

    Raises:
        TypeError: A factory can't be called.
        ValueError: The number of factories differs from the number of rows.
    """
    given: Sequence[Any] = [factories] * len(env_ids) if callable(factories) else factories
    if not isinstance(given, Sequence) or len(given) != len(env_ids):
        raise ValueError(
            f"rows has {len(env_ids)} envs, but factories is {given!r}; give one factory for all "
            "of these rows, or a list of one for each"
        )
    found = dict(sorted(zip(env_ids.tolist(), given, strict=True)))
    for env_id, factory in found.items():
        if not callable(factory):
            raise TypeError(
                f"the factory of env {env_id} is {factory!r}, expected a function that makes an "
                "env, such as `lambda: MyEnv()`"
            )
    return found


def raise_creation_errors(errors: Sequence[EnvCreationError]) -> None:
    """Raise the first of some errors in reopening rows, with the others as notes."""
    if errors:
        error, *others = errors
        error.add_note("Its row has no env until it is reopened; the other rows are as they were.")
        for other in others:
            error.add_note(str(other))
        raise error


# -- states of envs: each is pickled, with wrappers and random generators --------------------------


class SavedEnv(NamedTuple):
    """An env, whether its episode has ended without a reset since, and its last observation."""

    env: Env
    is_over: bool
    obs: Any


def dump_env(saved: SavedEnv, index: int) -> bytes:
    """Pickle an env, by value where needed; raise EnvStateError if that fails."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            if isinstance(obj, EzPickle) and kind.__getstate__ is EzPickle.__getstate__:
                # EzPickle would make a new env from the old one's arguments. So pickle attributes:
                # this raises if an engine can't be pickled, rather than losing its state.
                state = dict(vars(obj))
                return copyreg.__newobj__, (kind,), state, None, None, _set_attributes  # type: ignore[attr-defined]  # typeshed leaves it out
            return super().reducer_override(obj)

    def dump() -> bytes:
        file = io.BytesIO()
        Pickler(file).dump(tuple(saved))
        return file.getvalue()

    return _guarded(dump, f"the state of env {index} can't be saved, as pickling it failed")


def _guarded(function: Callable[[], Any], problem: str) -> Any:
    """Return a function's result; users' classes may raise anything when they are pickled."""
    try:
        return function()
    except Exception as error:
        raise EnvStateError(f"{problem} with {type(error).__name__}: {error!s:.300}") from error


def _set_attributes(obj: Any, state: dict[str, Any]) -> None:
    vars(obj).update(state)


def load_env(pickled: Any, index: int, observation_space: Space, action_space: Space) -> SavedEnv:
    """Unpickle env `index`, which must have these spaces: this runs code of the pickle.

    Raises:
        EnvStateError: It can't be unpickled, or has other spaces.
    """
    problem = f"the state of env {index} can't be loaded, as unpickling it failed"
    saved = _guarded(lambda: SavedEnv(*loads(pickled)), problem)
    spaces = saved.env.observation_space, saved.env.action_space
    for space, expected in zip(spaces, (observation_space, action_space), strict=True):
        is_comparable = type(expected).__eq__ is not object.__eq__
        if not (space == expected if is_comparable else type(space) is type(expected)):
            raise EnvStateError(
                f"the state of env {index} is of an env with the space {space}, expected "
                f"{expected}; make the envs as they were saved"
            )
    return saved


def pack_envs(pickles: Sequence[bytes], notes: Any) -> dict[str, Any]:
    """Return the state of a vector env, from the states of its envs and its own notes."""
    return {"format": _FORMAT, "envs": list(pickles), "notes": dumps(notes)}


def unpack_envs(state: Mapping[str, Any], num_envs: int) -> tuple[list[bytes], Any]:
    """Return the pickled envs of a state, and the notes: unpickling these runs code.

    Raises:
        EnvStateError: It is not a state of `num_envs` envs.
    """
    pickles = state.get("envs") if isinstance(state, Mapping) else None
    if not isinstance(pickles, list) or state.get("format") != _FORMAT:
        raise EnvStateError(
            f"state is no state of envs that are stepped one by one ({_FORMAT!r}); pass what "
            "`state_dict` of a SyncVectorEnv or AsyncVectorEnv returned"
        )
    if len(pickles) != num_envs:
        raise EnvStateError(f"state has {len(pickles)} envs, expected {num_envs}")
    if not all(isinstance(pickled, bytes) for pickled in (*pickles, state.get("notes"))):
        raise EnvStateError(
            "state has no pickles of the envs: a checkpoint gives those only to the user who has "
            "written them, as unpickling runs code"
        )
    return pickles, _guarded(lambda: loads(state["notes"]), "unpickling the notes of state failed")
