"""Settings of torch that hold for a gradient alone."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Settings"]


class Settings:
    """The precision of float32 products and torch's number of threads, inside of ``with``.

    Args:
        precision: For `torch.set_float32_matmul_precision`; None leaves it as it is.
        num_threads: For `torch.set_num_threads`; None leaves it as it is.
    """

    def __init__(self, precision: str | None = None, num_threads: int | None = None):
        self._wanted = precision, num_threads
        self._before: tuple[Any, Any] = None, None

    def __enter__(self) -> None:
        precision, num_threads = self._wanted
        if precision is not None:
            precision_before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(precision)
        else:
            precision_before = None
        threads_before = None if num_threads is None else torch.get_num_threads()
        self._before = precision_before, threads_before  # first: Ctrl-C may come in between
        if num_threads is not None and threads_before != num_threads:
            torch.set_num_threads(num_threads)

    def __exit__(self, *_: object) -> None:
        precision, num_threads = self._before
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        if num_threads is not None and num_threads != self._wanted[1]:
            torch.set_num_threads(num_threads)
