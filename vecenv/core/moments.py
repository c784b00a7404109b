"""Join the moments of two sets of rows: the one formula of all running moments."""

from __future__ import annotations

from typing import Any

__all__ = ["joined"]


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
