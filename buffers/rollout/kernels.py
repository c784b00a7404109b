"""Compiled passes over a finished rollout: dead steps, rows to learn from, episodes."""

from __future__ import annotations

import numpy as np

from buffers.core.compiling import njit
from buffers.core.kernels import bounded, random_word

__all__ = [
    "UNWRITTEN",
    "are_all_finite",
    "collect_rows",
    "finished_episodes",
    "first_missing_final",
    "mark_dead_steps",
    "shuffle",
]

# Bits of a float32 that has not been written yet: a NaN that no computation gives. Async vector
# envs mark rewards in `step(out=)` likewise, so that what a dead worker leaves is told apart too.
UNWRITTEN = 0x7FC5EED1

_ONE = np.uint64(1)
_EXPONENT = 0x7F800000  # all set in infinities and NaNs of float32, and in nothing else


@njit(nogil=True, cache=True)
def are_all_finite(bits):
    """Whether float32 numbers, given as their bits int32 (K,), are neither infinite nor NaN."""
    found = 0
    for k in range(bits.shape[0]):
        found |= (bits[k] & _EXPONENT) == _EXPONENT
    return found == 0


@njit(nogil=True, cache=True)
def _mark_dead_row(terminations_before, truncations_before, valid):
    """Clear valid uint8 (N,) where the step before ended an episode; flags uint8 (N,)."""
    for i in range(valid.shape[0]):
        valid[i] = valid[i] if (terminations_before[i] | truncations_before[i]) == 0 else 0


@njit(nogil=True, cache=True)
def mark_dead_steps(terminations, truncations, over_before, valid):
    """Clear valid where an environment was only reset: under NEXT_STEP the row after an episode.

    Args:
        terminations, truncations: uint8 (T, N).
        over_before: uint8 (N,), the flags of the step before the first row.
        valid: uint8 (T, N); cleared in place, never set.
    """
    _mark_dead_row(over_before, over_before, valid[0])
    for t in range(1, valid.shape[0]):
        _mark_dead_row(terminations[t - 1], truncations[t - 1], valid[t])


@njit(nogil=True, cache=True)
def collect_rows(valid, rows):
    """List in rows int64 (K,) where valid uint8 (K,) is set; return how many there are."""
    count = 0
    for k in range(valid.shape[0]):
        rows[count] = k
        count += 1 if valid[k] != 0 else 0
    return count


@njit(nogil=True, cache=True)
def first_missing_final(terminations, truncations, valid, has_final):
    """Index of the first row cut off and without final value, or -1; arrays are uint8 (K,)."""
    for k in range(truncations.shape[0]):
        if truncations[k] != 0 and terminations[k] == 0 and valid[k] != 0 and has_final[k] == 0:
            return k
    return -1


@njit(nogil=True, cache=True)
def finished_episodes(
    rewards, terminations, truncations, valid, running_returns, running_lengths, returns, lengths
):  # fmt: skip
    """Add up each environment's rewards, and list the episodes that ended, in order of time.

    A row with valid zero adds nothing, and an episode ending in such a row is dropped.

    Args:
        rewards: float32 (T, N).
        terminations, truncations, valid: uint8 (T, N).
        running_returns: float64 (N,), the sums of the episodes in progress, carried over.
        running_lengths: int64 (N,), their numbers of steps.
        returns: float64 (T * N,), written from the start.
        lengths: int64 (T * N,), written from the start.

    Returns:
        The number of episodes written.
    """
    count = 0
    for t in range(rewards.shape[0]):
        for i in range(rewards.shape[1]):
            is_valid = valid[t, i] != 0
            if is_valid:
                running_returns[i] += rewards[t, i]
                running_lengths[i] += 1
            if (terminations[t, i] | truncations[t, i]) != 0:
                if is_valid:
                    returns[count] = running_returns[i]
                    lengths[count] = running_lengths[i]
                    count += 1
                running_returns[i] = 0.0
                running_lengths[i] = 0
    return count


@njit(nogil=True, cache=True)
def shuffle(rows, generator):
    """Shuffle rows int64 (K,), K < 2**31, in place (Fisher-Yates).

    generator uint64 (2,) moves on.
    """
    key, counter = generator[0], generator[1]
    for last in range(rows.shape[0] - 1, 0, -1):
        chosen = bounded(random_word(key, counter), last + 1)
        counter = np.add(counter, _ONE)
        rows[last], rows[chosen] = rows[chosen], rows[last]
    generator[1] = counter
