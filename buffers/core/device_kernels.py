"""Kernels of our own for CUDA devices, which `vecenv.core.cuda` compiles.

A kernel is a plain function of addresses and numbers, of which each thread does a part. Memory and
streams are torch's: a launch goes to its current stream, waits for nothing, and becomes part of a
CUDA graph that is being captured.

Where numba-cuda is missing, or the driver refuses its code, callers do the same by operations of
torch.
"""

from __future__ import annotations

import functools
import logging
import struct
import types
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

from vecenv.core import cuda
from vecenv.core.interrupts import interrupts_later

__all__ = ["DeviceKernel", "Launch"]

_BLOCK_SIZE = 128  # threads
_ENTRY = "buffers_kernel"
# Numbers as `struct` packs them, each into eight bytes.
_CODES = {"int64": "q", "float32": "f4x", "float64": "d"}

_logger = logging.getLogger("buffers")

# Launches a kernel for so many threads at least; what follows are its arguments, tensors for
# addresses, or 0.
Launch = Callable[..., None]


class DeviceKernel:
    """A function that is compiled for a device when it is first asked for there.

    Args:
        function: Calls `cuda.grid(1)`, a global name of its module, for the number of the thread.
            There may be more threads than were asked for. It reads and writes memory by index, as
            of one-dimensional arrays, so that it runs as plain Python with these.
        kinds: Of its arguments, such as "float32*" for an address, "int64" or "float32".
        scope: Further global names, such as types.

    Attributes:
        name: Of the function.
    """

    def __init__(self, function: Callable[..., None], kinds: tuple[str, ...], **scope: Any):
        self.name, self.kinds = function.__name__, kinds
        self._function, self._scope = function, scope
        self._launches: dict[int, Launch | None] = {}

    def bound(self, threads: Any) -> Callable[..., None]:
        """The function with its global names, `cuda` among them, which is `threads`."""
        scope = {**self._function.__globals__, **self._scope, "cuda": threads}
        made = types.FunctionType(self._function.__code__, scope, self.name)
        made.__module__, made.__qualname__ = self._function.__module__, self.name
        return made

    def on(self, device: torch.device) -> Launch | None:
        """How it is launched on a device, or None if operations of torch have to do.

        The first call for a device compiles, which takes a second; not while a CUDA graph is being
        captured, which would have to be given up.
        """
        if device.type != "cuda":
            return None
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self._launches:
            if torch.cuda.is_current_stream_capturing():
                return None
            with interrupts_later():
                self._launches[index] = self._loaded(index)
        return self._launches[index]

    def _loaded(self, index: int) -> Launch | None:
        try:
            cuda.require()
        except ModuleNotFoundError as error:
            _say(str(error), logging.INFO)
            return None
        except cuda.DeviceError as error:
            _say(str(error), logging.WARNING)
            return None
        try:
            capability = torch.cuda.get_device_capability(index)
            with torch.cuda.device(index):
                torch.zeros(1, device="cuda")  # makes torch's context, in which the code is loaded
                code = _machine_code(cuda.ptx(self.lower(), capability), capability)
                loaded = cuda.loaded(self.name, code, _ENTRY)
            return _launcher(loaded, self.kinds, torch.device("cuda", index))
        except Exception as error:  # whatever a compiler or driver of another version says
            _say(f"{self.name} can't be compiled for cuda:{index}: {error}", logging.WARNING)
            return None

    def lower(self) -> cuda.Lowered:
        """Lower it for devices; there need be none.

        Raises:
            ModuleNotFoundError: numba-cuda is not installed.
        """
        arguments = tuple(map(_numba_type, self.kinds))
        return cuda.lower(self.name, self.bound(cuda.require()), arguments, _ENTRY)


def _numba_type(kind: str) -> Any:
    """Numba's type of an argument: "float32*" is an address.

    >>> _numba_type("uint8*"), _numba_type("int64")
    (uint8*, int64)
    """
    if kind.endswith("*"):
        return numba.types.CPointer(getattr(numba.types, kind[:-1]))
    return getattr(numba.types, kind)


@functools.cache
def _say(told: str, level: int) -> None:
    """Log it, once."""
    _logger.log(level, "%s; operations of torch do the same, in more and smaller steps", told)


def _machine_code(text: str, capability: tuple[int, int]) -> bytes:
    """What ptxas makes of PTX; where that fails the PTX, for the driver of the device."""
    try:
        return cuda.machine_code(text, capability)[0]
    except Exception as error:
        _logger.debug("ptxas: %r; the driver of the device has to compile", error)
        return text.encode() + b"\0"


def _launcher(
    loaded: Callable[[int, int, int, int], None], kinds: tuple[str, ...], device: torch.device
) -> Launch:
    def launch(num_threads: int, *arguments: Any) -> None:
        values = pack_arguments(kinds, arguments)  # which the driver copies before it returns
        places = values.ctypes.data + 8 * np.arange(len(values), dtype=np.uint64)
        stream = torch.cuda.current_stream(device).cuda_stream
        num_blocks = -(-num_threads // _BLOCK_SIZE)
        with torch.cuda.device(device):
            loaded(num_blocks, _BLOCK_SIZE, stream, places.ctypes.data)

    return launch


def pack_arguments(kinds: tuple[str, ...], arguments: tuple[Any, ...]) -> np.ndarray:
    """Arguments of a kernel, each at the begin of one of int64 (A,).

    >>> pack_arguments(("int64", "float32"), (7, 1.0)).tolist()
    [7, 1065353216]
    """
    packing, addresses = _packing(kinds)
    given = list(arguments)
    for place in addresses:
        if isinstance(given[place], torch.Tensor):
            given[place] = given[place].data_ptr()
    return np.frombuffer(packing.pack(*given), np.int64)


@functools.cache
def _packing(kinds: tuple[str, ...]) -> tuple[struct.Struct, list[int]]:
    """How they are packed, and which are addresses."""
    addresses = [place for place, kind in enumerate(kinds) if kind.endswith("*")]
    codes = ["Q" if kind.endswith("*") else _CODES[kind] for kind in kinds]
    return struct.Struct("=" + "".join(codes)), addresses
