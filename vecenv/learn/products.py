"""Float32 products by oneDNN, on processors where they are as exact and quicker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

__all__ = ["quick_products"]

# docs/learner.md has the measurements. From so many rows on, or products, oneDNN is quicker than
# MKL, which leaves AVX-512 of other makers than Intel alone.
_ROWS, _PRODUCTS = 512, 16_000_000


@contextmanager
def quick_products(
    num_rows: int, num_weights: int = 0, device: torch.device | str = "cpu"
) -> Iterator[None]:
    """Let torch compute float32 products of many rows by oneDNN inside of ``with``.

    It sets `torch.set_float32_matmul_precision("medium")`, which lets processors that have
    instructions for it round to bfloat16. On these, on other devices and for fewer rows nothing is
    set; so results have the error of float32 everywhere.

    Args:
        num_rows: Rows of the matrices.
        num_weights: Of the layers: few rows of wide layers are quicker, too.
        device: Where it is computed.
    """
    is_many = num_rows >= _ROWS or num_rows * num_weights >= _PRODUCTS
    before = torch.get_float32_matmul_precision()
    is_set = is_many and torch.device(device).type == "cpu" and before == "highest"
    if not (is_set and _is_exact()):
        yield
        return
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def _is_exact() -> bool:
    """Whether this processor does not round float32 products of medium precision."""
    with torch.inference_mode():
        a = torch.linspace(-1, 1, 512 * 64).view(512, 64)
        exact = a.double() @ a.double().T
        torch.set_float32_matmul_precision("medium")
        try:
            found = a @ a.T
        finally:
            torch.set_float32_matmul_precision("highest")
    return bool((found - exact).abs().max() < 1e-5 * exact.abs().max())
