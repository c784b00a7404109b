"""The caller's arrays in the form that compiled code takes: checked, cast, writable."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from numba import njit

from vecenv.core.atomics import array_at, integer_at
from vecenv.core.errors import ActionError
from vecenv.core.slots import Outputs

__all__ = [
    "ActionReader",
    "copy_checked",
    "element_bounds",
    "first_invalid_row",
    "integer_type",
    "new_outputs",
]

_BOOL = np.dtype(np.bool_)
_INT64 = np.dtype(np.int64)
_INT8 = np.dtype(np.int8)
_UINT8 = np.dtype(np.uint8)


class ActionReader:
    """Casts actions to the dtype of their space and checks their bounds.

    `vecenv.core.actions.ActionBatcher` has checked them: right shape and kind of dtype, no NaN.

    Attributes:
        bounds: int64 (2, K), lowest and highest value of each element of one action, or K = 1 if
            they are those of all elements; K = 0 if any value is allowed. Compiled code checks them
            before it steps anything.
        no_actions: (0, *action_shape) of the space's dtype.
    """

    def __init__(self, space: Space, num_envs: int) -> None:
        self.bounds = element_bounds(space)
        if self.bounds.shape[1] > 1 and (self.bounds == self.bounds[:, :1]).all():
            self.bounds = self.bounds[:, :1].copy()  # which are checked in one pass
        self._space = space
        self._any = self.bounds.shape[1] == 0
        self._dtype = np.dtype(space.dtype)
        self._shape = (num_envs, *(space.shape or ()))
        self.no_actions = np.zeros((0, *self._shape[1:]), dtype=self._dtype)
        self._cast: np.ndarray | None = None  # allocated by the first cast

    def read(self, actions: np.ndarray) -> np.ndarray:
        """Return actions (R, ...) of the space's dtype, C-contiguous.

        Returns the caller's array if possible, else rows of an array that the next call overwrites.

        Raises:
            ActionError: A value does not fit into the dtype.
        """
        if actions.dtype == self._dtype and actions.flags.carray:
            return actions
        if not self._any and not np.can_cast(actions.dtype, self._dtype):
            self.check(actions, None)
        if self._cast is None:
            self._cast = np.zeros(self._shape, dtype=self._dtype)
        cast = self._cast[: len(actions)]
        np.copyto(cast, actions, casting="unsafe")
        return cast

    def check(self, actions: np.ndarray, env_ids: np.ndarray | None) -> None:
        """Refuse actions (R, ...) out of bounds; row i is for env `env_ids[i]`, or for env i."""
        if self._any:
            return
        if (row := first_invalid_row(actions, self.bounds)) >= 0:
            self.refuse(actions, row, row if env_ids is None else int(env_ids[row]))

    def refuse(self, actions: np.ndarray, row: int, env_id: int) -> NoReturn:
        """Raise ActionError for the action of this row, which is for this env."""
        space = self._space
        expected = f"an action of {space}"
        if isinstance(space, Discrete):
            expected = f"an integer from {self.bounds[0, 0]} to {self.bounds[1, 0]} ({space})"
        raise ActionError(
            f"actions[{row}] (env {env_id}) is {actions[row]}, expected {expected}; "
            "nothing was stepped"
        )


def element_bounds(space: Space) -> np.ndarray:
    """Return the bounds of actions of a space, int64 (2, K).

    They are the lowest and highest value of each of the K elements of one action in C order; K = 0
    if any value is allowed.
    """
    if isinstance(space, Discrete):
        low, high = np.array([space.start]), np.array([space.start + space.n - 1])
    elif isinstance(space, MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    elif isinstance(space, MultiBinary):
        low, high = np.zeros(space.shape), np.ones(space.shape)
    elif isinstance(space, Box) and np.dtype(space.dtype).kind in "iu":
        # Python ints, as the bounds of uint64 are beyond int64
        low, high = space.low, np.minimum(space.high.astype(object), np.iinfo(np.int64).max)
        high = np.asarray(high)  # of a Box of no dimensions a number
    else:
        return np.zeros((2, 0), dtype=np.int64)
    return np.stack([low.reshape(-1), high.reshape(-1)]).astype(np.int64)


def first_invalid_row(actions: np.ndarray, bounds: np.ndarray) -> int:
    """Return the first row of actions (R, ...) with an element out of bounds int64 (2, K), or -1.

    bounds[0] and bounds[1] are the lowest and highest values of the K elements of one action, in C
    order, or of all elements if K = 1; with K = 0 nothing is checked.
    """
    if bounds.shape[1] == 0:
        return -1
    elements = actions.reshape(len(actions), math.prod(actions.shape[1:]))
    is_bad = ((elements < bounds[0]) | (elements > bounds[1])).any(axis=1)
    return int(np.argmax(is_bad)) if is_bad.any() else -1


def integer_type(dtype: np.dtype) -> int:
    """Return the bytes of an integer, negative if it has no sign, as `copy_checked` takes them."""
    return -dtype.itemsize if dtype.kind == "u" else dtype.itemsize


@njit
def copy_checked(target, source, integer_type, num_rows, row_size, bounds):
    """Copy integers between addresses and, in the copy, look for one out of bounds.

    Args:
        target: Address of memory where there is room for them.
        source: Address of (num_rows, row_size).
        integer_type: Of both, see the function.
        num_rows: Number of rows.
        row_size: Elements of a row.
        bounds: int64 (2, K), as of `first_invalid_row`; K is 1 or row_size.

    Returns:
        The first row with such an element, or -1.
    """
    size, num_bytes = num_rows * row_size, num_rows * row_size * abs(integer_type)
    given, own = array_at(source, (num_bytes,), _UINT8), array_at(target, (num_bytes,), _UINT8)
    for k in range(num_bytes):  # an assignment of arrays would look for overlaps first
        own[k] = given[k]
    if bounds.shape[1] == 1:  # most are of these types, and all in bounds
        if integer_type == 8 and _are_all_in(array_at(target, (size,), _INT64), bounds):
            return -1
        if integer_type == 1 and _are_all_in(array_at(target, (size,), _INT8), bounds):
            return -1
    for row in range(num_rows):
        for k in range(row_size):
            bound = k if bounds.shape[1] > 1 else 0
            element = _element(target, row * row_size + k, integer_type)
            if element < bounds[0, bound] or element > bounds[1, bound]:
                return row
    return -1


@njit
def _are_all_in(elements, bounds):
    """Whether no element (K,) is out of bounds int64 (2, 1)."""
    low, high = bounds[0, 0], bounds[1, 0]
    num_bad = 0
    for k in range(elements.shape[0]):  # to its end, in which many are compared at once
        num_bad += (elements[k] < low) | (elements[k] > high)
    return num_bad == 0


@njit
def _element(address, k, integer_type):
    """Element k of integers at an address, int64."""
    address += k * abs(integer_type)
    if integer_type == 1:
        return integer_at(address, np.int8)
    if integer_type == 2:
        return integer_at(address, np.int16)
    if integer_type == 4:
        return integer_at(address, np.int32)
    if integer_type == -1:
        return integer_at(address, np.uint8)
    if integer_type == -2:
        return integer_at(address, np.uint16)
    if integer_type == -4:
        return integer_at(address, np.uint32)
    return integer_at(address, np.int64)  # of uint64 what is beyond it is below any bound


def new_outputs(num_rows: int, obs_shape: tuple[int, ...], obs_dtype: Any) -> Outputs:
    """Return arrays for `num_rows` rows, not filled in."""
    return Outputs(
        np.empty((num_rows, *obs_shape), obs_dtype),
        np.empty(num_rows, np.float64),
        np.empty(num_rows, _BOOL),
        np.empty(num_rows, _BOOL),
    )
