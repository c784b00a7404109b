"""Devices: the source of memory, and the launches of compiled drivers.

torch owns memory and streams. Launches go to torch's current stream: so they are ordered with
torch's other work, and become part of a CUDA graph that is being captured. Nothing waits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from vecenv.core import cuda
from vecenv.core.cuda import DeviceError
from vecenv.jit.cuda import compiler
from vecenv.jit.cuda.driver import ARGUMENTS
from vecenv.jit.kernels import EnvKernels

__all__ = ["Device", "Launch", "open_device", "torch_dtype"]

BLOCK_SIZE = 128  # threads per block

# Launches a driver for a number of rows; the arguments are int64, in the order of ARGUMENTS.
Launch = Callable[[int, np.ndarray], None]


def open_device(device: Any) -> Device:
    """Return the device of this name: "cuda", "cuda:1" or a `torch.device`.

    "cuda" is the device that is current at the time of use.

    Raises:
        ModuleNotFoundError: torch or numba-cuda is not installed.
        DeviceError: There is no such device, or it is too old.
        ValueError: `device` is not a CUDA device.
    """
    try:
        import torch
    except ImportError as error:
        raise ModuleNotFoundError(
            'compiled envs on a CUDA device need torch: pip install "vecenv[cuda]"', name="torch"
        ) from error
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        wanted = torch.device("cpu")
    if wanted.type != "cuda":
        raise ValueError(
            f"device is {device!r}, expected a CUDA device: 'cuda', 'cuda:1' or a torch.device"
        )
    cuda.require()
    return Device(wanted)


class Device:
    """A CUDA device: its memory, and how compiled drivers are launched on it."""

    torch_device: Any

    def __init__(self, wanted: Any) -> None:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            built = "is built for it" if torch.backends.cuda.is_built() else "is a build without it"
            raise DeviceError(
                f"device is {wanted}, but torch {torch.__version__}, which {built}, sees no CUDA "
                "device: is there one, and its driver (nvidia-smi)? make_vec without device= "
                "steps the same envs on the CPU"
            )
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        if index >= count:
            raise DeviceError(f"device is {wanted}, but there are {count} CUDA devices, from 0 on")
        self.torch_device = torch.device("cuda", index)
        self.capability = torch.cuda.get_device_capability(index)
        if self.capability < cuda.LOWEST:
            own, least = (".".join(map(str, one)) for one in (self.capability, cuda.LOWEST))
            raise DeviceError(
                f"{self.torch_device} ({torch.cuda.get_device_name(index)}) has compute capability "
                f"{own}, kernels need {least} or newer"
            )
        torch.cuda.init()

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a tensor of zeros of a NumPy dtype, on the device."""
        import torch

        return torch.zeros(shape, dtype=torch_dtype(dtype), device=self.torch_device)

    def host_zeros(self, count: int) -> Any:
        """Return a tensor int64 of zeros in host memory that the device can write to."""
        import torch

        # Pinned pages have one address for host and device.
        # device="cpu" overrides torch's default device: only host memory can be pinned.
        return torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=True)

    def load(self, kernels: EnvKernels, params: np.ndarray | None) -> Launch:
        """Compile or load the driver with these kernels; return the function that launches it."""
        import torch

        code = compiler.kept_code(kernels, params, self.capability)
        device = self.torch_device
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # creates torch's context, into which the code is loaded
            loaded = cuda.loaded(kernels.name, code, compiler.ENTRY)
        values = np.zeros(len(ARGUMENTS), np.int64)
        places = np.array([values[k:].ctypes.data for k in range(len(values))], np.uint64)
        places_at = places.ctypes.data

        # The default argument keeps `places` alive; its address alone would not.
        def launch(num_rows: int, arguments: np.ndarray, kept: Any = places) -> None:
            values[:] = arguments  # the driver copies them before it returns
            stream = torch.cuda.current_stream(device).cuda_stream
            is_current = torch.cuda.current_device() == device.index
            with nullcontext() if is_current else torch.cuda.device(device):
                loaded(-(-num_rows // BLOCK_SIZE), BLOCK_SIZE, stream, places_at)

        return launch


@functools.cache
def torch_dtype(dtype: Any) -> Any:
    """Return torch's dtype for one of NumPy's.

    Raises:
        TypeError: torch has none.
    """
    import torch

    dtype = np.dtype(dtype)
    found = getattr(torch, "bool" if dtype.kind == "b" else dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no dtype for NumPy's {dtype}")
    return found
