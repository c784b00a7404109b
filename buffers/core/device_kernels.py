"""Kernels of our own for CUDA devices; the only module here that knows numba-cuda.

A kernel is a plain function of addresses and numbers, of which each thread does a part. numba-cuda
is used as a compiler only: it lowers the function to LLVM's language, NVIDIA's libNVVM makes PTX of
that, and its ptxas machine code, which drivers of the same major version load; PTX of a later minor
version than theirs they refuse. Memory and streams are torch's: a launch goes to its current
stream, waits for nothing, and becomes part of a CUDA graph that is being captured.

Where numba-cuda is missing, or the driver refuses its code, callers do the same by operations of
torch. (`vecenv.jit.cuda` compiles whole envs likewise; the packages know nothing of each other.)
"""

from __future__ import annotations

import functools
import importlib
import logging
import struct
import subprocess
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from buffers.core.interrupts import interrupts_later

__all__ = ["DeviceKernel", "Launch", "Lowered"]

_BLOCK_SIZE = 128  # threads
_ENTRY = "buffers_kernel"
_OPTIONS = {"opt": 3}
# Numbers as `struct` packs them, each into eight bytes.
_CODES = {"int64": "q", "float32": "f4x", "float64": "d"}
_INSTALL = 'pip install "vecenv[cuda]"'

_logger = logging.getLogger("buffers")

# Launches a kernel for so many threads at least; what follows are its arguments, tensors for
# addresses, or 0.
Launch = Callable[..., None]


class Lowered(NamedTuple):
    """A kernel in LLVM's language (NVVM IR).

    Attributes:
        modules: Texts.
        entry: Name of the kernel in them.
    """

    modules: tuple[str, ...]
    entry: str


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

    def bound(self, cuda: Any) -> Callable[..., None]:
        """The function with its global names, `cuda` among them."""
        scope = {**self._function.__globals__, **self._scope, "cuda": cuda}
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
            _cuda()
        except ImportError as error:
            _say(f"kernels of our own need numba-cuda: {_INSTALL} ({error})", logging.INFO)
            return None
        except Exception as error:  # it is not made for this NumPy, say
            _say(f"numba-cuda can't be imported: {error!r}", logging.WARNING)
            return None
        try:
            capability = torch.cuda.get_device_capability(index)
            with torch.cuda.device(index):
                torch.zeros(1, device="cuda")  # makes torch's context, in which the code is loaded
                loaded = _load(self.name, _machine_code(self.ptx(capability), capability))
            return _launcher(*loaded, self.kinds, torch.device("cuda", index))
        except Exception as error:  # whatever a compiler or driver of another version says
            _say(f"{self.name} can't be compiled for cuda:{index}: {error}", logging.WARNING)
            return None

    def lower(self) -> Lowered:
        """Lower it for devices; there need be none.

        Raises:
            ModuleNotFoundError: numba-cuda is not installed.
        """
        cuda = _cuda()
        compiler = importlib.import_module("numba.cuda.compiler")
        result = compiler.compile_cuda(
            self.bound(cuda), numba.types.void, tuple(map(_numba_type, self.kinds)),
            nvvm_options=dict(_OPTIONS), cc=(9, 0),
        )  # fmt: skip
        library = result.library
        kernel = library.get_function(result.fndesc.llvm_func_name)
        library._entry_name = kernel.name
        compiler.kernel_fixup(kernel, False)
        return Lowered(
            tuple(text.replace(kernel.name, _ENTRY) for text in library.llvm_strs), _ENTRY
        )

    def ptx(self, capability: tuple[int, int]) -> str:
        """PTX for devices of this compute capability and above; raises as `lower`."""
        modules = self.lower().modules
        nvvm = importlib.import_module("numba.cuda.cudadrv.nvvm")
        major, minor = capability
        unit = nvvm.CompilationUnit({**_OPTIONS, "arch": f"compute_{major}{minor}"})
        for text in modules:
            unit.add_module(nvvm.llvm_replace(text).encode())
        unit.verify()
        return unit.compile().rstrip(b"\0").decode()


@functools.cache
def _cuda() -> Any:
    """`numba.cuda` of numba-cuda, which knows compilation without a device.

    Raises:
        ImportError: It is not there, or its simulator takes its place.
    """
    numpy: Any = np
    is_lacking = not hasattr(np, "row_stack")
    try:
        with warnings.catch_warnings():  # NumPy 2.5 warns of numba-cuda 0.30, and lacks `row_stack`
            warnings.simplefilter("ignore")
            if is_lacking:
                numpy.row_stack = np.vstack
            importlib.import_module("numba_cuda")
            importlib.import_module("numba.cuda.compiler")  # which the simulator does not have
            importlib.import_module("numba.cuda.np.arrayobj")
            return importlib.import_module("numba.cuda")
    finally:
        if is_lacking:
            del numpy.row_stack


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
        tool = importlib.import_module("cuda.pathfinder").find_nvidia_binary_utility("ptxas")
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            source.write_text(text)
            architecture = "-arch=sm_{}{}".format(*capability)
            command = [tool, "-O3", architecture, str(source), "-o", str(target)]
            # In a session of its own Ctrl-C does not reach it.
            subprocess.run(command, capture_output=True, check=True, start_new_session=True)
            return target.read_bytes()
    except Exception as error:
        _logger.debug("ptxas: %r; the driver of the device has to compile", error)
        return text.encode() + b"\0"


def _load(name: str, code: bytes) -> tuple[Any, Any]:
    """Load machine code or PTX into the current context; return the kernel and the context.

    Raises:
        RuntimeError: The driver of the device refuses the code.
    """
    driver = importlib.import_module("cuda.bindings.driver")
    error, module = driver.cuModuleLoadData(code)
    if error == driver.CUresult.CUDA_SUCCESS:
        error, function = driver.cuModuleGetFunction(module, _ENTRY.encode())
        if error == driver.CUresult.CUDA_SUCCESS:
            return function, driver.cuCtxGetCurrent()[1]
    raise RuntimeError(f"loading {name} failed with {error.name}")


def _launcher(function: Any, context: Any, kinds: tuple[str, ...], device: torch.device) -> Launch:
    driver = importlib.import_module("cuda.bindings.driver")
    run, results = driver.cuLaunchKernel, driver.CUresult

    def launch(num_threads: int, *arguments: Any) -> None:
        values = pack_arguments(kinds, arguments)  # which the driver copies before it returns
        places = values.ctypes.data + 8 * np.arange(len(values), dtype=np.uint64)
        stream = torch.cuda.current_stream(device).cuda_stream
        num_blocks = -(-num_threads // _BLOCK_SIZE)
        given = num_blocks, 1, 1, _BLOCK_SIZE, 1, 1, 0, stream, places.ctypes.data, 0
        with torch.cuda.device(device):
            result = run(function, *given)
            if result[0] == results.CUDA_ERROR_INVALID_CONTEXT:
                # A thread in which torch has not needed one so far.
                driver.cuCtxSetCurrent(context)
                result = run(function, *given)
        if result[0] != results.CUDA_SUCCESS:
            raise RuntimeError(f"launching a kernel failed with {result[0].name}")

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
