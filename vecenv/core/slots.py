"""The memory that `step(out=...)` writes into: what is checked, and the rows in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vecenv.core.autoreset import StepRows
from vecenv.core.errors import SlotError
from vecenv.core.rows import ObservationRows, check_slot_array

__all__ = ["FLAG_DTYPES", "REWARD_DTYPES", "Outputs", "SlotCheck", "slot_arrays", "slot_rows"]

REWARD_DTYPES = (np.dtype(np.float64), np.dtype(np.float32))
FLAG_DTYPES = (np.dtype(np.bool_),)


class Outputs(NamedTuple):
    """The output arrays of a call with R rows; all C-contiguous.

    Attributes:
        obs: (R, *obs_shape).
        rewards: float32 or float64 (R,).
        terminations: bool (R,).
        truncations: bool (R,).
    """

    obs: Any
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray


def slot_arrays(out: Any, num_envs: int) -> Outputs:
    """Return the observations of a slot as they are, and its other arrays checked and plain.

    Raises:
        SlotError: An array is missing, of wrong shape, dtype or layout, or is both flags at once.
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
    return Outputs(obs, rewards, terminations, truncations)


def slot_rows(out: Any, own: ObservationRows, num_envs: int) -> StepRows:
    """Check the caller's slot and return the rows in it, over plain arrays.

    Args:
        out: Object with the arrays `obs, rewards, terminations, truncations`, see `StepSlot`.
        own: Rows of the same observation space, (num_envs, ...).
        num_envs: Rows that every array must have.

    Raises:
        SlotError: See `slot_arrays`; observations included.
    """
    obs, *others = slot_arrays(out, num_envs)
    return StepRows(own.over(obs), *others)


class SlotCheck:
    """Checks the arrays of `out`; made once for the observations of all envs, (N, ...)."""

    def __init__(self, obs_shape: tuple[int, ...], obs_dtype: Any) -> None:
        self._obs_shape, self._obs_dtypes = obs_shape, (np.dtype(obs_dtype),)

    def arrays(self, out: Any) -> Outputs:
        """Return the arrays of `out`, an object with the attributes of `Outputs`.

        Raises:
            SlotError: See `slot_rows`.
        """
        found = slot_arrays(out, self._obs_shape[0])
        obs = check_slot_array("obs", found.obs, self._obs_shape, self._obs_dtypes)
        return Outputs(obs, *found[1:])
