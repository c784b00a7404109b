"""Check a batch of actions once, where it enters, and split it into actions of single envs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, MultiBinary, Tuple
from gymnasium.vector.utils import iterate

from vecenv.core.errors import ActionError, ActionTypeError
from vecenv.core.infos import copy_value
from vecenv.core.spaces import ARRAY_SPACES, parts_of

__all__ = ["ActionBatcher", "as_array"]

# (actions, their env ids or None for all envs in order) -> checked actions
Check = Callable[[Any, "np.ndarray | None"], Any]

_KIND_NAMES = {"f": "a floating dtype", "i": "an integer dtype", "b": "bool"}


def as_array(value: Any) -> np.ndarray:
    """Return a user's value as an array; raise ValueError or TypeError if it can't be made one."""
    try:
        return np.asarray(value)
    except RuntimeError as error:  # raised for tensors with gradients
        raise TypeError(str(error)) from error


class ActionBatcher:
    """Checks batched actions against the action space of one env.

    Arrays of fixed shape are checked for count, shape, kind of dtype and NaN. Ranges are left to
    the envs, which know what an out-of-range action means. Dict and Tuple actions are checked
    leaf by leaf. Actions without a fixed shape (Text, Graph, custom spaces) are only counted.
    """

    def __init__(self, single_action_space: Space, action_space: Space, num_envs: int) -> None:
        self._action_space = action_space
        self._is_array = isinstance(single_action_space, ARRAY_SPACES)
        self._check = _make_check(single_action_space, num_envs, "actions")

    def check(self, actions: Any, env_ids: np.ndarray | None = None) -> Any:
        """Return the actions in the form that `each` and the backends take; raise ActionError.

        There is one per entry of `env_ids`, int64 (B,), or per env. Arrays may be anything that
        `numpy.asarray` takes; they are neither copied nor cast.
        """
        return self._check(actions, env_ids)

    def each(self, actions: Any) -> Iterable[Any]:
        """Iterate over the actions of single envs; `actions` must come from `check`."""
        return actions if self._is_array else iterate(self._action_space, actions)

    def snapshot(self, actions: Any) -> list[Any]:
        """Return the actions of single envs, independent of the caller's arrays."""
        if self._is_array:
            return list(actions.copy())
        return [copy_value(action) for action in iterate(self._action_space, actions)]


def _make_check(space: Space, num_envs: int, where: str) -> Check:
    """Build the check for one (sub)space; `where` is the name of the actions in messages."""
    if isinstance(space, ARRAY_SPACES):
        kind = np.dtype(space.dtype).kind if isinstance(space, Box) else "i"
        kind = "b" if isinstance(space, MultiBinary) else kind  # ints pass as floats
        return _array_check(space, num_envs, {"f": "fiu", "b": "iub"}.get(kind, "iu"), where)
    parts = {
        key: _make_check(part, num_envs, f"{where}[{key!r}]")
        for key, part in (parts_of(space) or {}).items()
    }

    def check_dict(actions: Any, env_ids: np.ndarray | None) -> dict[str, Any]:
        keys = list(actions) if hasattr(actions, "keys") else type(actions).__name__
        if not isinstance(keys, list) or set(keys) != parts.keys():
            raise ActionTypeError(f"{where} must be a dict with the keys {list(parts)}, got {keys}")
        return {key: part(actions[key], env_ids) for key, part in parts.items()}

    def check_tuple(actions: Any, env_ids: np.ndarray | None) -> tuple[Any, ...]:
        length = len(actions) if isinstance(actions, tuple | list) else type(actions).__name__
        if length != len(parts):
            raise ActionTypeError(
                f"{where} must be a tuple of {len(parts)} batches, one per part of {space}, "
                f"got {length}"
            )
        return tuple(part(actions[key], env_ids) for key, part in parts.items())

    def check_count(actions: Any, env_ids: np.ndarray | None) -> Any:
        count = num_envs if env_ids is None else len(env_ids)
        expected = f"expected {count}: one of {space} per env"
        if not hasattr(actions, "__len__"):
            raise ActionTypeError(f"{where} is one {type(actions).__name__}, {expected}")
        if len(actions) != count:
            raise ActionError(f"{where} has {len(actions)} entries, {expected}")
        return actions

    if isinstance(space, Dict):
        return check_dict
    return check_tuple if isinstance(space, Tuple) else check_count


def _array_check(space: Space, num_envs: int, kinds: str, where: str) -> Check:
    shape = space.shape
    assert shape is not None
    shape_of_all = (num_envs, *shape)

    def check(actions: Any, env_ids: np.ndarray | None) -> np.ndarray:
        try:
            # Runs at every step, so don't call `as_array` for what is an array already.
            array = actions if type(actions) is np.ndarray else as_array(actions)
        except (TypeError, ValueError) as error:
            raise ActionError(f"{where} can't be made one array: {error}") from error
        expected = shape_of_all if env_ids is None else (len(env_ids), *shape)
        if array.shape != expected:
            told = f"{where} has shape {array.shape}, expected {expected}: one of {space} per env"
            if array.ndim and array.shape[1:] == expected[1:]:
                if len(array) < expected[0]:
                    told += f" (none for entry {len(array)} and after)"
                told += "; pass one action per env, including envs about to reset"
            raise (ActionError if array.ndim else ActionTypeError)(told)
        kind = array.dtype.kind
        if kind not in kinds:
            wanted = " or ".join(_KIND_NAMES[k] for k in kinds if k in _KIND_NAMES)
            raise ActionTypeError(f"{where} has dtype {array.dtype}, expected {wanted} for {space}")
        # The minimum of anything with NaN is NaN, and comes without a temporary array.
        if kind == "f" and math.isnan(np.minimum.reduce(array, axis=None, initial=np.inf)):
            row = int(np.argmax(np.isnan(array).reshape(len(array), -1).any(axis=1)))
            env_id = row if env_ids is None else int(env_ids[row])
            raise ActionError(f"{where}[{row}] (env {env_id}) is {array[row]}; {space} has no NaN")
        return array

    return check
