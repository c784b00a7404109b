"""How different collected transitions are from each other, as functions of arrays.

Rows are laid out as they were collected, (time, envs, ...). Envs that are stepped side by side give
transitions of different episodes, and with equally many of them a learner may get further.
"""

from __future__ import annotations

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

__all__ = [
    "action_scores",
    "batched",
    "distinct_share",
    "gradient_variance",
    "intraclass_correlation",
    "nearest_neighbour_distance",
    "policy_gradients",
    "reward_to_go",
]

_BLOCK_ROWS = 512


def batched(rows: np.ndarray, steps: int) -> np.ndarray:
    """Cut (T, N, ...) into batches (B, steps * N, ...) as a learner gets them; the rest is left.

    Example:
        >>> batched(np.arange(10).reshape(5, 2), steps=2).tolist()
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    count = len(rows) // steps
    return rows[: count * steps].reshape(count, steps * rows.shape[1], *rows.shape[2:])


def distinct_share(keys: np.ndarray) -> float:
    """Return how many of the rows are different from each other, as a share of all.

    Args:
        keys: Any dtype (R,), equal for equal states.

    Example:
        >>> distinct_share(np.array([7, 7, 8, 9]))
        0.75
    """
    return len(np.unique(keys)) / len(keys)


def nearest_neighbour_distance(states: np.ndarray, scale: np.ndarray) -> float:
    """Return the mean distance of a state to the one most like it, 0 if all come twice.

    Args:
        states: Floating (R, D).
        scale: Floating (D,), the unit of each feature, such as its standard deviation in the
            larger set that sets are compared in; features with scale 0 do not count.

    Returns:
        Root mean square over the features that count; 0 if none does, or there is one row only.

    Example:
        >>> nearest_neighbour_distance(np.array([[0.0], [2.0], [6.0]]), np.array([2.0]))
        1.3333333333333333
    """
    varies = scale > 0
    if not varies.any() or len(states) < 2:
        return 0.0
    points = (states[:, varies] / scale[varies]).astype(np.float64)
    squares = (points**2).sum(1)
    total = 0.0
    for begin in range(0, len(points), _BLOCK_ROWS):
        block = points[begin : begin + _BLOCK_ROWS]
        distances = squares[begin : begin + _BLOCK_ROWS, None] + squares - 2 * block @ points.T
        rows = np.arange(len(block))
        distances[rows, begin + rows] = np.inf
        # The expansion above is inexact next to 0, so the distance found is computed again.
        nearest = points[distances.argmin(1)]
        total += np.sqrt(((block - nearest) ** 2).sum(1)).sum()
    return float(total / len(points) / np.sqrt(varies.sum()))


def intraclass_correlation(batches: np.ndarray) -> float:
    """Return how much alike the rows of one batch are, ICC(1), the mean over the features.

    1: within a batch all rows are equal; 0: a batch is a random choice of all rows; below 0: a
    batch is more mixed than that.

    Args:
        batches: Floating (B, K, D), at least two batches of at least two rows.

    Returns:
        The mean over the features that vary; 0 if none does.

    Example:
        >>> alike = np.array([[[1.0], [1.0]], [[5.0], [5.0]]])
        >>> intraclass_correlation(alike), intraclass_correlation(alike.transpose(1, 0, 2))
        (1.0, -1.0)
    """
    size = batches.shape[1]
    between = size * batches.mean(1).var(0, ddof=1)
    within = batches.var(1, ddof=1).mean(0)
    total = between + (size - 1) * within
    varies = total > 1e-12
    if not varies.any():
        return 0.0
    return float(((between - within)[varies] / total[varies]).mean())


def reward_to_go(rewards: np.ndarray, is_over: np.ndarray, fragment: int) -> np.ndarray:
    """Sum up the rewards that follow in the same fragment and episode, the step's own included.

    Args:
        rewards: Floating (T, N).
        is_over: bool (T, N), whether the step ended its episode.
        fragment: Steps after which the sum begins anew.

    Example:
        >>> rewards = np.array([[1.0], [2.0], [4.0], [8.0]])
        >>> is_over = np.array([[False], [True], [False], [False]])
        >>> reward_to_go(rewards, is_over, fragment=3)[:, 0].tolist()
        [3.0, 2.0, 4.0, 8.0]
    """
    sums = np.array(rewards, np.float64)
    for t in range(len(sums) - 2, -1, -1):
        if (t + 1) % fragment:
            sums[t] += np.where(is_over[t], 0.0, sums[t + 1])
    return sums


def action_scores(actions: np.ndarray, space: Space) -> np.ndarray | None:
    """Return the gradient of log pi by the outputs of a linear policy whose weights are 0.

    Softmax for each discrete choice; for real numbers a normal distribution with the mean and the
    spread that the actions have. None for other spaces.

    Args:
        actions: Of the space (M, *action_shape).
        space: Of one action.

    Returns:
        float64 (M, P).

    Example:
        >>> action_scores(np.array([0, 1]), Discrete(2)).tolist()
        [[0.5, -0.5], [-0.5, 0.5]]
    """
    if isinstance(space, Box):
        if not np.issubdtype(space.dtype or object, np.floating):
            return None
        values = actions.reshape(len(actions), -1).astype(np.float64)
        variance = values.var(0)
        return (values - values.mean(0)) / np.where(variance > 0, variance, 1.0)
    if isinstance(space, Discrete):
        sizes, starts = [int(space.n)], np.array([space.start])
    elif isinstance(space, MultiDiscrete):
        sizes, starts = np.ravel(space.nvec).tolist(), np.ravel(space.start)
    elif isinstance(space, MultiBinary):
        count = int(np.prod(space.shape))
        sizes, starts = [2] * count, np.zeros(count, np.int64)
    else:
        return None
    choices = actions.reshape(len(actions), -1) - starts
    parts = [np.eye(size)[choices[:, k]] - 1 / size for k, size in enumerate(sizes)]
    return np.concatenate(parts, 1)


def policy_gradients(states: np.ndarray, scores: np.ndarray, returns: np.ndarray) -> np.ndarray:
    """Estimate the policy gradient from each batch (REINFORCE, without a baseline).

    Args:
        states: Floating (B, K, D), standardised; a constant is added to them.
        scores: Floating (B, K, P), see `action_scores`.
        returns: Floating (B, K), see `reward_to_go`.

    Returns:
        float64 (B, P * (D + 1)), the means over the rows of scores x states x returns.

    Example:
        >>> states, returns = np.array([[[3.0], [1.0]]]), np.array([[2.0, 4.0]])
        >>> policy_gradients(states, np.array([[[1.0], [0.5]]]), returns).tolist()
        [[4.0, 2.0]]
    """
    constant = np.ones((*states.shape[:2], 1))
    features = np.concatenate([states, constant], axis=2, dtype=np.float64)
    weighted = scores * returns[:, :, None]
    means = np.einsum("bkp,bkd->bpd", weighted, features, optimize=True) / states.shape[1]
    return means.reshape(len(states), -1)


def gradient_variance(gradients: np.ndarray) -> tuple[float, float]:
    """Return the variance over estimates, summed over the parameters, and its standard error.

    The error holds for normally distributed estimates, which means over many rows about are.

    Args:
        gradients: float64 (B, P), at least two estimates.

    Example:
        >>> gradient_variance(np.array([[0.0], [2.0], [4.0]]))
        (4.0, 4.0)
    """
    centred = gradients - gradients.mean(0)
    num_free = len(gradients) - 1
    squares = ((centred @ centred.T) ** 2).sum() / num_free**2  # of the covariance's elements
    return float((centred**2).sum() / num_free), float(np.sqrt(2 * squares / num_free))
