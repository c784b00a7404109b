"""Check a batch of actions once, where it enters, and split it into actions of single envs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict, MultiBinary, Tuple
from gymnasium.vector.utils import iterate

from vecenv.core.errors import ActionError, ActionTypeError
from vecenv.core.infos import copy_value
from vecenv.core.spaces import ARRAY_SPACES, parts_of

__all__ = ["ActionBatcher", "as_array"]

# By kind of a space's dtype ("b": of bits): kinds that actions may have, and their names.
_INTEGERS = ("iu", "an integer dtype")
_KINDS = {"b": ("iub", "an integer dtype or bool"), "i": _INTEGERS, "u": _INTEGERS}
_KINDS["f"] = ("fiu", "a floating dtype or an integer dtype")  # integers pass as floats


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
        self._single, self._action_space = single_action_space, action_space
        self._num_envs = num_envs
        self._is_array = isinstance(single_action_space, ARRAY_SPACES)
        # Shape and kinds of the commonest actions: whole numbers, in which nothing can be wrong.
        self._plain_shape = (num_envs, *(single_action_space.shape or ()))
        self._plain_kinds = "iu" if self._is_array else ""

    def check(self, actions: Any, env_ids: np.ndarray | None = None) -> Any:
        """Return the actions in the form that `each` and the backends take; raise ActionError.

        There is one per entry of `env_ids`, int64 (B,), or per env. Arrays may be anything that
        `numpy.asarray` takes; they are neither copied nor cast.
        """
        is_plain = type(actions) is np.ndarray and actions.dtype.kind in self._plain_kinds
        if is_plain and env_ids is None and actions.shape == self._plain_shape:
            return actions
        count = self._num_envs if env_ids is None else len(env_ids)
        return _checked(self._single, actions, count, env_ids, "actions")

    def each(self, actions: Any) -> Iterable[Any]:
        """Iterate over the actions of single envs; `actions` must come from `check`."""
        return actions if self._is_array else iterate(self._action_space, actions)

    def snapshot(self, actions: Any) -> list[Any]:
        """Return the actions of single envs, independent of the caller's arrays."""
        if self._is_array:
            return list(actions.copy())
        return [copy_value(action) for action in iterate(self._action_space, actions)]


def _checked(space: Space, actions: Any, count: int, env_ids: np.ndarray | None, where: str) -> Any:
    """Check `count` actions of one (sub)space; `where` is their name in messages."""
    if isinstance(space, ARRAY_SPACES):
        return _checked_array(space, actions, count, env_ids, where)
    if isinstance(space, Dict | Tuple):
        parts = parts_of(space) or {}
        if isinstance(space, Dict):
            keys = list(actions) if hasattr(actions, "keys") else type(actions).__name__
            expected = f"a dict with the keys {list(parts)}"
        else:
            is_nest = isinstance(actions, tuple | list)
            keys = list(range(len(actions))) if is_nest else type(actions).__name__
            expected = f"a tuple of {len(parts)} batches, one per part of {space}"
        if not isinstance(keys, list) or set(keys) != parts.keys():
            raise ActionTypeError(f"{where} must be {expected}, got {keys}")
        found = {
            key: _checked(part, actions[key], count, env_ids, f"{where}[{key!r}]")
            for key, part in parts.items()
        }
        return found if isinstance(space, Dict) else tuple(found.values())
    expected = f"expected {count}: one of {space} per env"
    if not hasattr(actions, "__len__"):
        raise ActionTypeError(f"{where} is one {type(actions).__name__}, {expected}")
    if len(actions) != count:
        raise ActionError(f"{where} has {len(actions)} entries, {expected}")
    return actions


def _checked_array(
    space: Space, actions: Any, count: int, env_ids: np.ndarray | None, where: str
) -> np.ndarray:
    """Check actions of a space of fixed shape; this runs at every step."""
    try:
        array = actions if type(actions) is np.ndarray else as_array(actions)
    except (TypeError, ValueError) as error:
        raise ActionError(f"{where} can't be made one array: {error}") from error
    expected = count, *(space.shape or ())
    if array.shape != expected:
        told = f"{where} has shape {array.shape}, expected {expected}: one of {space} per env"
        if array.ndim and array.shape[1:] == expected[1:]:
            if len(array) < count:
                told += f" (none for entry {len(array)} and after)"
            told += "; pass one action per env, including envs about to reset"
        raise (ActionError if array.ndim else ActionTypeError)(told)
    kind, own = array.dtype.kind, space.dtype.kind  # type: ignore[union-attr]  # arrays have one
    kinds, names = _KINDS["b" if isinstance(space, MultiBinary) else own]
    if kind not in kinds:
        raise ActionTypeError(f"{where} has dtype {array.dtype}, expected {names} for {space}")
    # The minimum of anything with NaN is NaN, and comes without a temporary array.
    if kind == "f" and math.isnan(np.minimum.reduce(array, axis=None, initial=np.inf)):
        row = int(np.argmax(np.isnan(array).reshape(len(array), -1).any(axis=1)))
        env_id = row if env_ids is None else int(env_ids[row])
        raise ActionError(f"{where}[{row}] (env {env_id}) is {array[row]}; {space} has no NaN")
    return array
