"""Moments: a mean with its confidence interval, and the one formula of all running moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["joined", "mean_of"]

_STUDENT = 12.7062, 4.30265, 3.18245, 2.77645  # 97.5 % quantiles for 1 to 4 degrees of freedom


def mean_of(numbers: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Return mean, standard deviation (ddof 1) and half the width of the 95 % interval of the mean.

    The interval is Student's. Without a second number, deviation and interval are NaN.
    """
    mean, freedom = float(np.mean(numbers)), len(numbers) - 1
    if not freedom:
        return mean, math.nan, math.nan
    # From 5 degrees of freedom on: the expansion 26.7.5 of Abramowitz and Stegun, within 0.2 %.
    more = 2.37227 / freedom + 2.82249 / freedom**2 + 2.55585 / freedom**3
    point = (*_STUDENT, 1.959964 + more)[min(freedom - 1, len(_STUDENT))]
    std = float(np.std(numbers, ddof=1))
    return mean, std, point * std / math.sqrt(freedom + 1)


def joined(
    count: Any, mean: Any, squares: Any, part_count: Any, part_mean: Any, part_squares: Any
) -> tuple[Any, Any, Any]:
    """Return count, mean and sum of squared deviations of two sets of rows together.

    Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983). It uses only
    arithmetic, so it works for numbers, arrays, tensors and in kernels.
    """
    total = count + part_count
    change = part_mean - mean
    return (
        total,
        mean + change * (part_count / total),
        squares + part_squares + change * change * (count * part_count / total),
    )
