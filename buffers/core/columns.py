"""Columns allocated once: NumPy pages on the host, and a tensor over them or on a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch

from buffers.core.errors import BufferMisuseError
from buffers.core.memory import allocation, zeroed_bytes

__all__ = ["Allocate", "ColumnSpec", "allocate_columns", "torch_dtype"]

Allocate = Callable[..., Any]  # allocate(shape, dtype) -> zeroed array, or tensor on the device


class ColumnSpec(NamedTuple):
    """Description of a column to be allocated.

    place: Where the column lives if the device is not the CPU: "host" only, "device" only, or
        "both". On the CPU there is one copy in any case.
    is_shared: The environment reads or writes the column, so `allocate` may provide its memory.
    is_on_device: This memory is on the device; host pages, if any, are a copy of the buffer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    place: Literal["host", "device", "both"]
    is_shared: bool = False
    is_on_device: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return math.prod(self.shape) * self.dtype.itemsize


class Column:
    """One array of a buffer.

    Attributes:
        spec: Its description.
        tensor: Shares the memory of `host`, or has memory of its own on another device.
        host: The NumPy pages; None if the column is on the device only.
        is_twofold: Host and device have one copy each.
        nbytes: Bytes held, on host and device together.
    """

    def __init__(
        self, spec: ColumnSpec, device: torch.device, staged: bool, allocate: Allocate | None
    ):
        self.spec, self.host = spec, cast(Any, None)
        dtype, given = torch_dtype(spec.dtype), allocate if spec.is_shared else None
        if not staged or spec.place != "device":
            if given is not None and not spec.is_on_device:
                self.host = _checked(spec, given(spec.shape, spec.dtype), None)
            elif device.type == "cuda" and spec.place == "both":
                # Only pinned memory is copied asynchronously.
                pinned = torch.zeros(spec.shape, dtype=dtype, device="cpu", pin_memory=True)
                self.host = pinned.numpy()
            else:  # torch's allocator aligns to cache lines
                self.host = zeroed_bytes(spec.nbytes).numpy().view(spec.dtype).reshape(spec.shape)
        self._there: Any = None if self.host is None else torch.from_numpy(self.host)
        self.is_twofold = self._there is not None and staged and spec.place == "both"
        if spec.is_on_device and given is not None:
            self.tensor = _checked(spec, given(spec.shape, spec.dtype), device)
        elif self._there is None or self.is_twofold:
            self.tensor = torch.zeros(spec.shape, dtype=dtype, device=device)
        else:
            self.tensor = self._there
        self.nbytes = spec.nbytes * (2 if self.is_twofold else 1)

    def upload(self, where: slice = slice(None)) -> None:
        """Enqueue the copy of host pages, or of some rows, to the device, if both have memory."""
        if self.is_twofold:
            self.tensor[where].copy_(self._there[where], non_blocking=True)


def _checked(spec: ColumnSpec, given: Any, device: torch.device | None) -> Any:
    """Check that `allocate` returned an array, or a tensor on `device`, as described by `spec`."""
    dtype = spec.dtype if device is None else torch_dtype(spec.dtype)
    if isinstance(given, np.ndarray):
        there, is_whole = None, given.flags.carray
    else:
        is_whole = isinstance(given, torch.Tensor) and given.is_contiguous()
        there = given.device if is_whole else None
    shape: Any = getattr(given, "shape", None)
    if not is_whole or (given.dtype, tuple(shape), there) != (dtype, spec.shape, device):
        told = type(given).__name__
        told += "" if shape is None else f" {getattr(given, 'dtype', '')} {tuple(shape)}"
        place = "a NumPy array" if device is None else f"a tensor on {device}"
        raise BufferMisuseError(
            f"allocate returned {told} for {spec.name}, expected {place}, {dtype} {spec.shape}, "
            "C-contiguous and writeable"
        )
    return given


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """The torch dtype of a NumPy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def allocate_columns(
    what: str, specs: Iterable[ColumnSpec], device: torch.device, *, staged: bool,
    allocate: Allocate | None, advice: str,
) -> dict[str, Column]:  # fmt: skip
    """Allocate all columns, zeroed, after comparing their size with the free memory.

    If `staged`, host and device have separate memory; required if the device is not the CPU.

    Raises:
        BufferMemoryError: More memory is needed than is free; nothing was allocated.
        BufferMisuseError: `allocate` returned other memory than requested.
    """
    specs = list(specs)
    host_bytes = sum(spec.nbytes for spec in specs if not staged or spec.place != "device")
    device_bytes = sum(spec.nbytes for spec in specs if staged and spec.place != "host")
    with (
        allocation(what, device_bytes, device, advice),
        allocation(what, host_bytes, torch.device("cpu"), advice),
    ):
        return {spec.name: Column(spec, device, staged, allocate) for spec in specs}
