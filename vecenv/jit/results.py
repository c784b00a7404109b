"""The arrays that a step of compiled environments writes, and the infos made from them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vecenv.core.errors import SlotError
from vecenv.core.rows import check_slot_array

__all__ = ["Outputs", "SlotCheck", "episode_infos", "final_infos", "new_outputs"]

_BOOL = np.dtype(np.bool_)
_FLOATS = (np.dtype(np.float64), np.dtype(np.float32))


class Outputs(NamedTuple):
    """Where a job with R rows writes its results; all C-contiguous.

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


def new_outputs(num_rows: int, obs_shape: tuple[int, ...], obs_dtype: Any) -> Outputs:
    """Return arrays for `num_rows` rows, not filled in."""
    return Outputs(
        np.empty((num_rows, *obs_shape), obs_dtype),
        np.empty(num_rows, np.float64),
        np.empty(num_rows, _BOOL),
        np.empty(num_rows, _BOOL),
    )


class SlotCheck:
    """Checks what is passed as `out`, for envs of one number and one observation shape."""

    def __init__(self, obs_shape: tuple[int, ...], obs_dtype: Any) -> None:
        self._obs_shape = obs_shape  # with the number of envs in front
        self._obs_dtype = np.dtype(obs_dtype)
        self._shape = obs_shape[:1]

    def arrays(self, out: Any) -> Outputs:
        """Return the arrays of `out`, an object with the attributes of `Outputs`.

        Raises:
            SlotError: Results can't be written into one of them.
        """
        try:
            outputs = Outputs(out.obs, out.rewards, out.terminations, out.truncations)
        except AttributeError as error:
            raise SlotError(
                f"out is {type(out).__name__}, expected an object with the arrays obs, rewards, "
                f"terminations, truncations such as StepSlot: {error}"
            ) from None
        obs, rewards, terminations, truncations = outputs
        try:
            if (
                type(obs) is type(rewards) is type(terminations) is type(truncations) is np.ndarray
                and obs.shape == self._obs_shape
                and obs.dtype == self._obs_dtype
                and rewards.shape == terminations.shape == truncations.shape == self._shape
                and rewards.dtype in _FLOATS
                and terminations.dtype == truncations.dtype == _BOOL
                # C-contiguous, aligned and writable
                and obs.flags.carray
                and rewards.flags.carray
                and terminations.flags.carray
                and truncations.flags.carray
            ):
                return outputs
        except AttributeError:
            pass  # not an array, as the checks below will find
        plain = Outputs(
            check_slot_array("obs", obs, self._obs_shape, (self._obs_dtype,)),
            check_slot_array("rewards", rewards, self._shape, _FLOATS),
            check_slot_array("terminations", terminations, self._shape, (_BOOL,)),
            check_slot_array("truncations", truncations, self._shape, (_BOOL,)),
        )
        if not all(array.flags.carray for array in plain):
            raise SlotError("an array of `out` is not aligned in memory; use `envs.allocate`")
        return plain


def episode_infos(runs: np.ndarray, is_over: np.ndarray) -> dict[str, Any]:
    """Return infos with the return and length of the episodes that ended in this step.

    Args:
        runs: RUN_DTYPE (R,), of the envs of the rows.
        is_over: bool (R,), the rows whose episode ended; goes into the infos.
    """
    episode = {
        "r": np.where(is_over, runs["last_return"], 0.0),
        "l": np.where(is_over, runs["last_length"], 0),
    }
    return {"episode": episode, "_episode": is_over}


def final_infos(
    infos: dict[str, Any], final_obs: np.ndarray, is_over: np.ndarray, env_ids: np.ndarray | None
) -> dict[str, Any]:
    """Return infos with what SAME_STEP autoreset adds to `infos` at the end of episodes.

    Args:
        infos: Infos of the step so far.
        final_obs: (N, *obs_shape), by env; copied.
        is_over: bool (R,), the rows whose episode ended; goes into the infos.
        env_ids: int64 (R,), the envs of the rows; None for all in order.
    """
    rows = np.flatnonzero(is_over)
    found = final_obs[rows if env_ids is None else env_ids[rows]]
    objects = np.full(len(is_over), None, dtype=object)
    objects[rows] = np.fromiter(found, dtype=object, count=len(rows))
    return {
        **infos,
        "final_obs": objects,
        "_final_obs": is_over,
        "final_info": infos,
        "_final_info": is_over,
    }
