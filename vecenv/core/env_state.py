"""State of Gymnasium's envs: each env is pickled, with wrappers and random generators.

Pickles are code: loading one runs it.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gymnasium import Env, Space
from gymnasium.utils import EzPickle

from vecenv.core.errors import EnvStateError
from vecenv.core.pickling import dumps, loads

__all__ = ["SavedEnv", "dump_env", "load_env", "pack_envs", "unpack_envs"]

_FORMAT = "vecenv pickled envs 1"


class SavedEnv(NamedTuple):
    """An env, whether its episode has ended without a reset since, and its last observation."""

    env: Env
    is_over: bool
    obs: Any


def dump_env(saved: SavedEnv, index: int) -> bytes:
    """Pickle an env; raise EnvStateError if that fails."""

    def dump() -> bytes:
        try:
            return _dumps(pickle.Pickler, saved)
        except Exception:  # closures, lambdas, classes of a notebook: by value
            import cloudpickle

            return _dumps(cloudpickle.Pickler, saved)

    return _guarded(dump, f"the state of env {index} can't be saved, as pickling it failed")


def _guarded(function: Callable[[], Any], problem: str) -> Any:
    """Return a function's result; users' classes may raise anything when they are pickled."""
    try:
        return function()
    except Exception as error:
        raise EnvStateError(f"{problem} with {type(error).__name__}: {error!s:.300}") from error


def _dumps(base: Any, saved: SavedEnv) -> bytes:
    class Pickler(base):
        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            if isinstance(obj, EzPickle) and kind.__getstate__ is EzPickle.__getstate__:
                # EzPickle would make a new env from the old one's arguments. So pickle attributes:
                # this raises if an engine can't be pickled, rather than losing its state.
                state = dict(vars(obj))
                return copyreg.__newobj__, (kind,), state, None, None, _set_attributes  # type: ignore[attr-defined]  # typeshed leaves it out
            inherited = getattr(super(), "reducer_override", None)
            return NotImplemented if inherited is None else inherited(obj)

    file = io.BytesIO()
    Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(tuple(saved))
    return file.getvalue()


def _set_attributes(obj: Any, state: dict[str, Any]) -> None:
    vars(obj).update(state)


def load_env(pickled: Any, index: int, observation_space: Space, action_space: Space) -> SavedEnv:
    """Unpickle env `index`, which must have these spaces: this runs code of the pickle.

    Raises:
        EnvStateError: It can't be unpickled, or has other spaces.
    """
    problem = f"the state of env {index} can't be loaded, as unpickling it failed"
    saved = _guarded(lambda: SavedEnv(*pickle.loads(pickled)), problem)
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
