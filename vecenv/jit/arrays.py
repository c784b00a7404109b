"""The caller's arrays in the form that compiled code takes: checked, cast, writable."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from numba import njit

from vecenv.core.errors import ActionError
from vecenv.core.rows import Outputs

__all__ = [
    "ActionReader",
    "copy_checked",
    "element_bounds",
    "first_invalid_row",
    "new_outputs",
]

_BOOL = np.dtype(np.bool_)


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
    if any value is allowed. Of uint64, values from 2**63 on are not.

    Raises:
        ValueError: All values of an element are such.
    """
    low: Any
    high: Any
    # Of Python ints: NumPy adds uint64 and int64 as float64.
    if isinstance(space, Discrete):
        low, high = int(space.start), int(space.start) + int(space.n) - 1
    elif isinstance(space, MultiDiscrete):
        low = space.start.astype(object)
        high = low + space.nvec.astype(object) - 1
    elif isinstance(space, MultiBinary):
        low, high = np.zeros(space.shape), np.ones(space.shape)
    elif isinstance(space, Box) and np.dtype(space.dtype).kind in "iu":
        low, high = space.low, space.high
    else:
        return np.zeros((2, 0), dtype=np.int64)
    bounds = np.stack([np.asarray(bound).astype(object).reshape(-1) for bound in (low, high)])
    most = np.iinfo(np.int64).max
    if (bounds[0] > most).any():
        raise ValueError(f"the action space {space} begins at 2**63 or above; use smaller numbers")
    return np.minimum(bounds, most).astype(np.int64)


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


@njit
def copy_checked(own, given, bounds, num_rows):
    """Copy the elements of actions and, in the copy, look for one out of bounds.

    It is compiled for each dtype, whatever the shape of actions.

    Args:
        own: (num_rows * elements of an action,), written.
        given: Of the same length and dtype.
        bounds: int64 (2, K) with K > 0, as of `first_invalid_row`.
        num_rows: Number of actions.

    Returns:
        The first row with such an element, or -1.
    """
    size, num_bounds = given.shape[0], bounds.shape[1]
    if num_bounds == 1:  # in one pass, in which many are compared at once
        low, high = bounds[0, 0], bounds[1, 0]
        num_bad = 0
        for k in range(size):
            action = given[k]
            own[k] = action
            num_bad += (action < low) | (action > high)
        if num_bad == 0:
            return -1
    else:
        for k in range(size):  # an assignment of arrays would look for overlaps first
            own[k] = given[k]
    row_size = num_bounds if num_bounds > 1 else size // num_rows
    for row in range(num_rows):
        for k in range(row_size):
            bound = k if num_bounds > 1 else 0
            element = own[row * row_size + k]
            if element < bounds[0, bound] or element > bounds[1, bound]:
                return row
    return -1


def new_outputs(num_rows: int, obs_shape: tuple[int, ...], obs_dtype: Any) -> Outputs:
    """Return arrays for `num_rows` rows, not filled in."""
    return Outputs(
        np.empty((num_rows, *obs_shape), obs_dtype),
        np.empty(num_rows, np.float64),
        np.empty(num_rows, _BOOL),
        np.empty(num_rows, _BOOL),
    )
