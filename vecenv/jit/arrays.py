"""The caller's actions in the form that compiled code takes: cast, and within their bounds."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from numba import njit

from vecenv.core.errors import ActionError

__all__ = ["ActionReader", "element_bounds", "find_invalid_row", "first_invalid_row"]


class ActionReader:
    """Casts actions to the dtype of their space, and checks their bounds.

    Before, `vecenv.core.actions.ActionBatcher` has checked shape, kind of dtype, and NaN.

    Attributes:
        bounds: See `element_bounds`; one column if all elements have the same. Compiled code checks
            them before it steps anything.
    """

    def __init__(self, space: Space, num_envs: int) -> None:
        self.bounds = element_bounds(space)
        if self.bounds.shape[1] > 1 and (self.bounds == self.bounds[:, :1]).all():
            self.bounds = self.bounds[:, :1].copy()  # one column is checked in one pass
        self._space, self._dtype = space, np.dtype(space.dtype)
        self._cast: np.ndarray | None = None  # allocated by the first cast
        self._num_envs = num_envs

    def read(self, actions: np.ndarray) -> np.ndarray:
        """Return actions (N, ...) of the space's dtype, C-contiguous.

        Returns the caller's array if possible; otherwise an array that the next call overwrites.

        Raises:
            ActionError: A value does not fit into the dtype.
        """
        if actions.dtype == self._dtype and actions.flags.carray:
            return actions
        if not np.can_cast(actions.dtype, self._dtype):
            self.check(actions, None)
        if self._cast is None:
            self._cast = np.zeros((self._num_envs, *actions.shape[1:]), self._dtype)
        np.copyto(self._cast, actions, casting="unsafe")
        return self._cast

    def check(self, actions: np.ndarray, env_ids: np.ndarray | None) -> None:
        """Raise for actions (R, ...) out of bounds; row i is for env `env_ids[i]`, or for env i."""
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
    """Return lowest and highest value of each element of one action in C order, int64 (2, K).

    K = 0 if any value is allowed. For uint64, values from 2**63 on are not allowed: raises
    ValueError if an element has only such values.
    """
    low: Any
    high: Any
    # In Python ints: NumPy would add uint64 and int64 as float64.
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

    With K = 1 the bounds are those of all elements; with K = 0 nothing is checked.
    """
    if bounds.shape[1] == 0 or actions.size == 0:
        return -1
    elements = actions.reshape(len(actions), -1)
    is_bad = ((elements < bounds[0]) | (elements > bounds[1])).any(axis=1)
    return int(np.argmax(is_bad)) if is_bad.any() else -1


@njit
def find_invalid_row(elements, bounds, num_rows):
    """Compute `first_invalid_row` of flat actions, for K > 0, in compiled code."""
    size, num_bounds = elements.shape[0], bounds.shape[1]
    if num_bounds == 1:  # one pass compares many at once
        low, high = bounds[0, 0], bounds[1, 0]
        num_bad = 0
        for k in range(size):
            num_bad += (elements[k] < low) | (elements[k] > high)
        if num_bad == 0:
            return -1
    row_size = size // num_rows
    for row in range(num_rows):
        for k in range(row_size):
            bound = k if num_bounds > 1 else 0
            element = elements[row * row_size + k]
            if element < bounds[0, bound] or element > bounds[1, bound]:
                return row
    return -1
