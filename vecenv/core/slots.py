"""The memory that `step(out=...)` writes into: what is checked, and the rows in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from vecenv.core.autoreset import StepRows
from vecenv.core.errors import SlotError
from vecenv.core.rows import ObservationRows, check_slot_array

__all__ = ["FLAG_DTYPES", "REWARD_DTYPES", "slot_arrays", "slot_rows"]

REWARD_DTYPES = (np.dtype(np.float64), np.dtype(np.float32))
FLAG_DTYPES = (np.dtype(np.bool_),)


def slot_rows(out: Any, own: ObservationRows, num_envs: int) -> StepRows:
    """Check the caller's slot and return the rows in it, over plain arrays.

    Args:
        out: Object with the arrays `obs, rewards, terminations, truncations`, see `StepSlot`.
        own: Rows of the same observation space, (num_envs, ...).
        num_envs: Rows that every array must have.

    Raises:
        SlotError: An array is missing, of wrong shape, dtype or layout, or is both flags at once.
    """
    obs, rewards, terminations, truncations = slot_arrays(out, num_envs)
    return StepRows(own.over(obs), rewards, terminations, truncations)


def slot_arrays(out: Any, num_envs: int) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """Return the observations of a slot as they are, and its other arrays checked and plain.

    Raises:
        SlotError: See `slot_rows`.
    """
    shape = (num_envs,)
    try:
        obs, rewards = out.obs, out.rewards
        terminations, truncations = out.terminations, out.truncations
    except AttributeError as error:
        raise SlotError(
            f"out is {type(out).__name__}, expected an object with the arrays obs, rewards, "
            f"terminations, truncations such as StepSlot: {error}"
        ) from None
    rewards = check_slot_array("rewards", rewards, shape, REWARD_DTYPES)
    terminations = check_slot_array("terminations", terminations, shape, FLAG_DTYPES)
    truncations = check_slot_array("truncations", truncations, shape, FLAG_DTYPES)
    if np.may_share_memory(terminations, truncations):
        raise SlotError(
            "out.terminations and out.truncations share memory, so one would overwrite the other; "
            "give each an array of its own"
        )
    return obs, rewards, terminations, truncations
