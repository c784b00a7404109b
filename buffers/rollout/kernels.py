"""Compiled passes over a finished rollout: dead steps, advantages, rows to learn from, episodes.

Advantages: memory layout decides the speed. The kernel walks the rows of the rollout from the last
to the first and hands each row to `_advantage_row` as plain one-dimensional views: only in this
form does LLVM turn the loop into vector instructions (a two-dimensional loop with the same body
runs four times slower).

One thread: at 128 x 2048 the work takes about as long as copying the inputs, less than waking a
second thread gains.
"""

from __future__ import annotations

import numpy as np

from buffers.core.compiling import njit
from buffers.core.kernels import bounded, random_word

__all__ = [
    "ADVANTAGE_EPSILON",
    "UNWRITTEN",
    "UNWRITTEN_FLAG",
    "are_all_finite",
    "collect_rows",
    "fill_advantages",
    "finished_episodes",
    "first_missing_final",
    "mark_dead_steps",
    "normalize_batches",
    "pad_batches",
    "shuffle",
    "temporal_difference",
]

# Bits of a float32 that has not been written yet: a NaN that no computation gives. Async vector
# envs mark rewards in `step(out=)` likewise, so that what a dead worker leaves is told apart too.
UNWRITTEN = 0x7FC5EED1
UNWRITTEN_FLAG = 2  # the same of flags, which are 0 or 1

ADVANTAGE_EPSILON = 1e-8  # added to standard deviations, as CleanRL and stable-baselines3 do

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
def temporal_difference(reward, value, next_value, final_value, terminated, truncated, gamma):
    """Error of one transition: r + gamma * (value of its true successor) - value.

    A terminated transition has no successor; the successor of a truncated one is worth
    `final_value`. The unused value may be anything, NaN too: it is not multiplied by zero but left
    out.
    """
    successor = final_value if truncated else next_value
    target = reward if terminated else reward + gamma * successor
    return target - value


@njit(nogil=True, cache=True)
def _advantage_row(
    rewards, values, next_values, terminations, truncations, final_values, valid,
    next_advantages, gamma, decay, zero, advantages, returns,
):  # fmt: skip
    """Fill one row of advantages and returns, given the row after it; all arrays are (N,).

    `final_values` and `valid` may be None; flags are uint8.
    """
    for i in range(rewards.shape[0]):
        terminated = terminations[i] != 0
        truncated = truncations[i] != 0
        final_value = next_values[i] if final_values is None else final_values[i]
        advantage = temporal_difference(
            rewards[i], values[i], next_values[i], final_value, terminated, truncated, gamma
        )
        carried = decay * next_advantages[i]
        advantage = advantage if terminated | truncated else advantage + carried
        if valid is not None:
            advantage = advantage if valid[i] != 0 else zero
        advantages[i] = advantage
        returns[i] = advantage + values[i]


@njit(nogil=True, cache=True)
def fill_advantages(
    rewards, values, terminations, truncations, final_values, valid, gamma, decay, advantages,
    returns,
):  # fmt: skip
    """Fill advantages and returns of a whole rollout.

    Args:
        rewards: float (T, N), C-contiguous like all the others.
        values: float (T + 1, N), of the same dtype as rewards.
        terminations, truncations: uint8 (T, N), zero or not.
        final_values: float (T, N), read where truncated; or None: the next row of values is used.
        valid: uint8 (T, N); a row with zero gets advantage 0. Or None: all count.
        gamma, decay: Discount and discount * lambda, scalars of the dtype of rewards.
        advantages, returns: float (T, N), written; they must not overlap the inputs.
    """
    zero, later = gamma - gamma, np.zeros_like(values[0])
    for t in range(rewards.shape[0] - 1, -1, -1):
        _advantage_row(
            rewards[t], values[t], values[t + 1], terminations[t], truncations[t],
            None if final_values is None else final_values[t],
            None if valid is None else valid[t],
            later, gamma, decay, zero, advantages[t], returns[t],
        )  # fmt: skip
        later = advantages[t]


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


@njit(nogil=True, cache=True)
def pad_batches(rows, num_batches, size, order, weights):
    """Cut rows evenly into batches, and repeat rows of each until it has `size`.

    Repeated rows are spread evenly over a batch, so that each half of it has rows of its own.

    Args:
        rows: int64 (K,), K from num_batches to num_batches * size.
        num_batches: Their number; sizes without padding differ by one at most.
        size: Of every batch.
        order: int64 (num_batches * size,), written: the rows of each batch in their order, some of
            them twice or more.
        weights: float32 (num_batches * size,), written: 1, and 0 where the row before is repeated.
    """
    start = 0
    for k in range(num_batches):
        count = rows.shape[0] // num_batches + (k < rows.shape[0] % num_batches)
        taken = 0
        for j in range(size):
            is_own = taken * size < (j + 1) * count  # ceil((j + 1) * count / size) are, up to here
            taken += is_own
            order[k * size + j] = rows[start + taken - 1]
            weights[k * size + j] = is_own
        start += count


@njit(nogil=True, cache=True)
def normalize_batches(advantages, sizes, weights):
    """Subtract each batch's mean and divide by its standard deviation.

    Args:
        advantages: float32 (K,), batch after batch; changed in place.
        sizes: int64 (M,), of the batches; their sum is K.
        weights: float32 (K,), not 0 in the rows that mean and deviation are of, at least one of
            each batch; or None: all.
    """
    start = 0
    for k in range(sizes.shape[0]):
        stop = start + sizes[k]
        total, count = 0.0, 0
        for j in range(start, stop):
            if weights is None or weights[j] != 0:
                total += advantages[j]
                count += 1
        mean = total / count
        squares = 0.0
        for j in range(start, stop):
            if weights is None or weights[j] != 0:
                squares += (advantages[j] - mean) ** 2
        scale = 1.0 / (np.sqrt(squares / max(count - 1, 1)) + ADVANTAGE_EPSILON)
        for j in range(start, stop):
            advantages[j] = (advantages[j] - mean) * scale
        start = stop


@njit(nogil=True, cache=True)
def collect_sequences(valid, length, ids):
    """List the sequences of `length` steps of one environment that have a valid row.

    Args:
        valid: uint8 (T, N).
        length: Of the sequences; the last ones of a rollout may be shorter.
        ids: int64 (K,), written: number of the sequence in its environment * N + environment.

    Returns:
        How many there are.
    """
    num_steps, num_envs = valid.shape
    count = 0
    for first in range(0, num_steps, length):
        for i in range(num_envs):
            has_row = False
            for t in range(first, min(first + length, num_steps)):
                has_row |= valid[t, i] != 0
            if has_row:
                ids[count] = first // length * num_envs + i
                count += 1
    return count


@njit(nogil=True, cache=True)
def lay_out_sequences(ids, is_own, valid, length, size, rows, weights):
    """List the rows of sequences, and their weights, batch after batch and step after step.

    Args:
        ids: int64 (M * size,), of the sequences of M batches, see `collect_sequences`.
        is_own: float32 (M * size,), 0 of sequences that are repeated.
        valid: uint8 (T, N).
        length: Of the sequences, L.
        size: Sequences of a batch.
        rows: int64 (M, L, size), written: t * N + environment; where a sequence is shorter, its
            last row again.
        weights: float32 (M, L, size), written: 1 where the row is valid, of a sequence that is not
            repeated, and of a step that it has; else 0.
    """
    num_steps, num_envs = valid.shape
    for k in range(rows.shape[0]):
        for j in range(length):
            for s in range(size):
                chunk, i = divmod(ids[k * size + s], num_envs)
                t = chunk * length + j
                last = min(t, num_steps - 1)
                rows[k, j, s] = last * num_envs + i
                weights[k, j, s] = is_own[k * size + s] if t == last and valid[t, i] else 0.0
