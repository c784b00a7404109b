"""What pays at which size of batches and networks; docs/learner.md has the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from vecenv.machine import usable_cores

__all__ = ["gradient_options", "quick_products"]

# From so many rows on, or products of rows and weights, oneDNN is quicker than MKL, which leaves
# AVX-512 of other makers than Intel alone.
_ROWS, _PRODUCTS = 512, 16_000_000
_SPLIT_ROWS = 1024  # or as many products: half of a gradient is worth another thread
_COMPILED_ROWS = 4_000_000  # of all calls: about half a minute by autograd


def gradient_options(
    compile: str,
    *,
    num_calls: int,
    num_rows: int,
    num_weights: int = 0,
    may_split: bool = True,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return `compile` and `threads` for a `Gradient` whose loss is a mean over rows.

    Args:
        compile: "on", "off", or "auto": if the calls have 4 million rows together.
        num_calls: Calls to come.
        num_rows: Rows of a batch; two threads halve them from 1 024 on, or where rows times weights
            are 16 million, if there are two cores.
        num_weights: Of the module.
        may_split: Whether two threads may have halves of the rows.
        earlier: `Gradient.describe` of the run that goes on, which is followed.
    """
    if earlier is not None and earlier.get("path"):
        return {"compile": earlier["path"] == "compiled", "threads": earlier["threads"]}
    is_many = num_rows >= _SPLIT_ROWS or num_rows * num_weights >= _PRODUCTS
    is_split = may_split and is_many and usable_cores() > 1
    is_compiled = compile == "on" or (compile == "auto" and num_calls * num_rows >= _COMPILED_ROWS)
    return {"compile": is_compiled, "threads": 2 if is_split else 1}


@contextmanager
def quick_products(
    num_rows: int, num_weights: int = 0, device: torch.device | str = "cpu"
) -> Iterator[None]:
    """Let torch compute products of many rows by oneDNN inside of ``with``.

    It sets `torch.set_float32_matmul_precision("medium")`, which lets processors that have
    instructions for it round to bfloat16. On these, on a `device` that is not the CPU, and where
    neither `num_rows` are many nor `num_weights` of the layers times these, nothing is set; so
    results have the error of float32 everywhere.
    """
    is_many = num_rows >= _ROWS or num_rows * num_weights >= _PRODUCTS
    before = torch.get_float32_matmul_precision()
    if is_many and torch.device(device).type == "cpu" and before == "highest" and _is_exact():
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
        error = (a @ a.T - exact).abs().max()
    return bool(error < 1e-5 * exact.abs().max())
