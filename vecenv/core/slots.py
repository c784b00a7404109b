"""The memory that `step(out=...)` writes into: what is checked, and the rows in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vecenv.core.autoreset import StepRows
from vecenv.core.errors import SlotError
from vecenv.core.rows import ObservationRows, check_slot_array

__all__ = [
    "FLAG_DTYPES",
    "REWARD_DTYPES",
    "Outputs",
    "SlotCheck",
    "slot_arrays",
    "slot_rows",
]

REWARD_DTYPES = (np.dtype(np.float64), np.dtype(np.float32))
_BOOL = np.dtype(np.bool_)
FLAG_DTYPES = (_BOOL,)


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
    if not _are_plain(rewards, terminations, truncations, shape):
        rewards = check_slot_array("rewards", rewards, shape, REWARD_DTYPES)
        terminations = check_slot_array("terminations", terminations, shape, FLAG_DTYPES)
        truncations = check_slot_array("truncations", truncations, shape, FLAG_DTYPES)
    if np.may_share_memory(terminations, truncations):
        raise SlotError(
            "out.terminations and out.truncations share memory, so one would overwrite the other; "
            "give each an array of its own"
        )
    return obs, rewards, terminations, truncations


def _are_plain(rewards: Any, terminations: Any, truncations: Any, shape: tuple[int, ...]) -> bool:
    """Whether `check_slot_array` would return all three as they are; quicker, for every step."""
    return (
        type(rewards) is type(terminations) is type(truncations) is np.ndarray
        and rewards.shape == terminations.shape == truncations.shape == shape
        and rewards.dtype in REWARD_DTYPES
        and terminations.dtype == truncations.dtype == _BOOL
        # C-contiguous, aligned and writable
        and rewards.flags.carray
        and terminations.flags.carray
        and truncations.flags.carray
    )


class Outputs(NamedTuple):
    """The output arrays of a call with R rows; all C-contiguous.

    Attributes:
        obs: (R, *obs_shape).
        rewards: float32 or float64 (R,).
        terminations: bool (R,).
        truncations: bool (R,).
    """

    obs: np.ndarray
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray


class SlotCheck:
    """Checks the arrays of `out`; made once for the observations of all envs."""

    def __init__(self, obs_shape: tuple[int, ...], obs_dtype: Any) -> None:
        self._obs_shape = obs_shape  # of all envs: (N, ...)
        self._obs_dtype = np.dtype(obs_dtype)
        self._shape = obs_shape[:1]

    def arrays(self, out: Any) -> Outputs:
        """Return the arrays of `out`, an object with the attributes of `Outputs`.

        Raises:
            SlotError: See `slot_rows`.
        """
        try:
            outputs = Outputs(out.obs, out.rewards, out.terminations, out.truncations)
        except AttributeError:
            slot_arrays(out, self._shape[0])  # raises
            raise
        obs, rewards, terminations, truncations = outputs
        if (  # quicker than the calls below
            _are_plain(rewards, terminations, truncations, self._shape)
            # With one owner they may overlap, which is for the calls below to say.
            and (terminations.base is None or terminations.base is not truncations.base)
            and terminations is not truncations
            and type(obs) is np.ndarray
            and obs.shape == self._obs_shape
            and obs.dtype == self._obs_dtype
            and obs.flags.carray
        ):
            return outputs
        obs, *others = slot_arrays(out, self._shape[0])
        obs = check_slot_array("obs", obs, self._obs_shape, (self._obs_dtype,))
        return Outputs(obs, *others)
