"""Columns allocated once: NumPy pages on the host, and a tensor over them or on a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from buffers.core.copies import fill_block
from buffers.core.errors import BufferMisuseError
from buffers.core.memory import allocation, check_fits, zeroed_bytes

__all__ = [
    "Allocate",
    "Column",
    "ColumnSpec",
    "allocate_columns",
    "foreach_copy",
    "spec_bytes",
    "torch_dtype",
]

Allocate = Callable[..., np.ndarray]  # allocate(shape, dtype) -> zeroed array

# Copies a list of tensors into another in one call; torch has no public name for it.
foreach_copy = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class ColumnSpec(NamedTuple):
    """What a column will be, before it is allocated.

    place: Where it lives if the device is not the CPU: "host" only, "device" only, or "both". On
        the CPU it lives once, whatever this says.
    is_shared: The environment reads or writes it, so `allocate` may say where it lies.
    is_on_device: That memory is on the device, and host pages, if any, are a copy for us.
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
        spec: What it is.
        host: The NumPy pages, or None if the column lives on the device only.
        tensor: Over the same memory as `host`, or of its own on another device.
    """

    __slots__ = ("_host_tensor", "_pages", "spec", "tensor")

    def __init__(
        self, spec: ColumnSpec, device: torch.device, staged: bool, allocate: Allocate | None
    ):
        self.spec = spec
        self._pages: np.ndarray | None = None
        self._host_tensor: torch.Tensor | None = None
        if not staged or spec.place != "device":
            self._pages = _allocate_pages(spec, device, allocate)
            self._host_tensor = torch.from_numpy(self._pages)
        if spec.is_on_device and allocate is not None:
            self.tensor = _allocated_tensor(spec, device, allocate)
        elif self._host_tensor is None or (staged and spec.place == "both"):
            self.tensor = torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
        else:
            self.tensor = self._host_tensor

    @property
    def host(self) -> np.ndarray:
        """The NumPy pages; only for columns that have some."""
        assert self._pages is not None, f"{self.spec.name} lives on the device only"
        return self._pages

    @property
    def is_twofold(self) -> bool:
        """Whether host and device hold a copy each."""
        return self._host_tensor is not None and self.tensor is not self._host_tensor

    @property
    def nbytes(self) -> int:
        """Bytes held, on host and device together."""
        return self.spec.nbytes * (2 if self.is_twofold else 1)

    def rows(self) -> tuple[torch.Tensor, ...]:
        """Views of the tensor, one for each index of the first axis."""
        return self.tensor.unbind(0)

    def host_rows(self) -> tuple[torch.Tensor, ...]:
        """Views of the host pages as tensors, one for each index of the first axis."""
        assert self._host_tensor is not None, f"{self.spec.name} lives on the device only"
        return self._host_tensor.unbind(0)

    def upload(self, where: slice = slice(None)) -> None:
        """Enqueue the copy of the host pages, or some rows, to the device, if there are two."""
        if self.is_twofold:
            assert self._host_tensor is not None
            self.tensor[where].copy_(self._host_tensor[where], non_blocking=True)

    def download(self, where: slice) -> None:
        """Copy some rows from the device to the host pages, and wait for that."""
        if self.is_twofold:
            assert self._host_tensor is not None
            self._host_tensor[where].copy_(self.tensor[where])

    def copied_pages(self) -> list[np.ndarray]:
        """What a copy of the column is made of: its memory, on host and device, as host arrays."""
        host = [] if self._pages is None else [self._pages]
        return [self.tensor.cpu().numpy(), *host] if self.is_twofold or not host else host

    def take_copied_pages(self, pages: list[np.ndarray]) -> None:
        """Copy what `copied_pages` of an equal column returned into this one."""
        fill_block(self.tensor, pages[0])
        if self.is_twofold:
            np.copyto(self.host, pages[1])


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """The dtype of torch for one of NumPy."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def spec_bytes(specs: Iterable[ColumnSpec], staged: bool) -> tuple[int, int]:
    """Bytes the columns will take on the host and, if staged, on the device besides."""
    specs = list(specs)
    host = sum(spec.nbytes for spec in specs if not staged or spec.place != "device")
    device = sum(spec.nbytes for spec in specs if staged and spec.place != "host")
    return host, device


def allocate_columns(
    what: str,
    specs: Iterable[ColumnSpec],
    device: torch.device,
    *,
    staged: bool,
    allocate: Allocate | None,
    advice: str,
) -> dict[str, Column]:
    """Allocate all columns, zeroed, after comparing their size with the free memory.

    Args:
        what: Names the buffer in messages.
        specs: The columns.
        device: Where the tensors live.
        staged: Host and device have memory of their own, as always if the device is not the CPU.
        allocate: Supplies the pages of columns the environment reads or writes; None for own
        memory.
        advice: What to do if the memory does not suffice.

    Raises:
        BufferMemoryError: More is needed than is free; nothing was allocated.
        BufferMisuseError: `allocate` returned something else than asked for.
    """
    specs = list(specs)
    host_bytes, device_bytes = spec_bytes(specs, staged)
    if device.type == "cuda":
        host_bytes += sum(_unused_bytes(spec) for spec in specs if spec.place == "both")
    if staged and device.type == "cpu":
        host_bytes, device_bytes = host_bytes + device_bytes, 0
    if device_bytes:
        check_fits(what, device_bytes, device, advice)
    with allocation(what, host_bytes, torch.device("cpu"), advice):
        return {spec.name: Column(spec, device, staged, allocate) for spec in specs}


def _unused_bytes(spec: ColumnSpec) -> int:
    """What torch takes for pinned pages besides those asked for: it rounds up to a power of 2."""
    return (1 << (spec.nbytes - 1).bit_length()) - spec.nbytes if spec.nbytes else 0


def _allocate_pages(
    spec: ColumnSpec, device: torch.device, allocate: Allocate | None
) -> np.ndarray:
    if allocate is None or not spec.is_shared or spec.is_on_device:
        # Memory of torch is aligned to cache lines; pinned, it can be copied without blocking.
        pinned = device.type == "cuda" and spec.place == "both"
        if pinned:
            dtype = torch_dtype(spec.dtype)
            return torch.zeros(spec.shape, dtype=dtype, device="cpu", pin_memory=True).numpy()
        return zeroed_bytes(spec.nbytes).numpy().view(spec.dtype).reshape(spec.shape)
    pages: Any = allocate(spec.shape, spec.dtype)
    if not isinstance(pages, np.ndarray):
        raise BufferMisuseError(
            f"allocate must return a NumPy array for {spec.name}, got {type(pages).__name__}"
        )
    if pages.shape != spec.shape or pages.dtype != spec.dtype:
        raise BufferMisuseError(
            f"allocate returned shape {pages.shape} and dtype {pages.dtype} for {spec.name}, "
            f"expected {spec.shape} and {spec.dtype}"
        )
    if not (pages.flags.c_contiguous and pages.flags.writeable):
        raise BufferMisuseError(
            f"allocate returned an array for {spec.name} that is not C-contiguous or not writeable"
        )
    return pages


def _allocated_tensor(spec: ColumnSpec, device: torch.device, allocate: Any) -> torch.Tensor:
    tensor, dtype = allocate(spec.shape, spec.dtype), torch_dtype(spec.dtype)
    if (
        not isinstance(tensor, torch.Tensor)
        or (tensor.device, tensor.dtype, tuple(tensor.shape)) != (device, dtype, spec.shape)
        or not tensor.is_contiguous()
    ):
        kind = type(tensor).__name__
        if isinstance(tensor, torch.Tensor):
            kind = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        raise BufferMisuseError(
            f"allocate returned {kind} for {spec.name}, expected a contiguous tensor {dtype} "
            f"{spec.shape} on {device}"
        )
    return tensor
