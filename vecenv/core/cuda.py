"""Compile, load and launch functions for CUDA devices; no other module uses numba-cuda.

numba-cuda is only a compiler here: it lowers a function to LLVM's language, NVIDIA's libNVVM makes
PTX from it, and NVIDIA's ptxas makes machine code. Drivers of the same major version load machine
code; they refuse PTX of a minor version later than theirs. Callers manage memory, streams and
launch sizes. So only `loaded` needs a device, and a check without a device can count registers and
spills. Importing this module imports neither numba-cuda nor torch.

This module adds what numba-cuda lacks, see `require`: `np.add` and `np.multiply` of numbers, and
compilation without a device. numba-cuda is in maintenance mode since June 2026 (`docs/gpu.md` says
what its successor lacks), so pyproject.toml has an upper bound for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

__all__ = [
    "LOWEST",
    "DeviceError",
    "Lowered",
    "loaded",
    "lower",
    "machine_code",
    "ptx",
    "require",
    "signature_of",
    "versions",
]

LOWEST = (7, 5)  # lowest compute capability that CUDA 13's compiler knows
_LOWERED_FOR = (9, 0)  # any will do: the lowered text is the same for all
_OPTIONS = {"opt": 3}
# numba-cuda has NumPy's general function in CUDA C, for which it needs another compiler. Arrays
# that kernels may reshape are in C order, as Numba's own types demand, and are so afterwards.
_RESHAPE = """target triple = "nvptx64-nvidia-cuda"
target datalayout = "{layout}"
define i32 @"numba_attempt_nocopy_reshape"(i64 %nd, i64* %dims, i64* %strides, i64 %newnd, \
i64* %newdims, i64* %newstrides, i64 %itemsize, i32 %is_f_order) alwaysinline
{{
begin:
  %is_c_order = icmp eq i32 %is_f_order, 0
  br i1 %is_c_order, label %count, label %refuse
count:
  %is_flat = icmp eq i64 %newnd, 1
  br i1 %is_flat, label %flat, label %next
flat:  ; without a loop, so that nothing of it is left in local memory
  store i64 %itemsize, i64* %newstrides
  ret i32 1
next:
  %left = phi i64 [ %newnd, %count ], [ %axis, %body ]
  %stride = phi i64 [ %itemsize, %count ], [ %larger, %body ]
  %is_left = icmp sgt i64 %left, 0
  br i1 %is_left, label %body, label %end
body:
  %axis = sub i64 %left, 1
  %place = getelementptr i64, i64* %newstrides, i64 %axis
  store i64 %stride, i64* %place
  %dim_at = getelementptr i64, i64* %newdims, i64 %axis
  %dim = load i64, i64* %dim_at
  %larger = mul i64 %stride, %dim
  br label %next
end:
  ret i32 1
refuse:
  ret i32 0
}}
!nvvmir.version = !{{!0}}
!0 = !{{{version}}}
"""
_CONSTANT = re.compile(r"addrspace\(4\) constant \[(\d+) x i8\]")
_MOST_CONSTANT_BYTES = 60_000  # of 65,536
_INSTALL = 'pip install "vecenv[cuda]"'


class DeviceError(RuntimeError):
    """A device is missing, too old, or can't run the code; the message says what to do."""


class Lowered(NamedTuple):
    """A function lowered for devices: texts in LLVM's language (NVVM IR) and the kernel's name."""

    name: str
    modules: tuple[str, ...]
    entry: str


_module: Any = importlib.import_module  # type checkers don't know these modules


@functools.cache
def require() -> Any:
    """Import numba-cuda, add to it what kernels need, and return `numba.cuda`.

    Raises:
        ModuleNotFoundError: numba-cuda is not installed; says how to install it.
        DeviceError: It does not fit the installed NumPy or Numba.
    """
    try:
        # numba-cuda 0.30 can be imported with NumPy 2.5, which warns and lacks `row_stack`.
        with _patched("row_stack", np.vstack, np):
            _module("numba_cuda")
            cuda = _module("numba.cuda")
            for name in ("cgutils", "compiler", "extending", "np.arrayobj"):
                _module(f"numba.cuda.{name}")
    except ImportError as error:
        raise ModuleNotFoundError(
            f"kernels for CUDA devices need numba-cuda: {_INSTALL} ({error})", name="numba_cuda"
        ) from error
    except Exception as error:  # such as one that is not made for this NumPy
        raise DeviceError(
            f"numba-cuda can't be imported beside numpy {np.__version__} and numba "
            f"{numba.__version__}: {error!r}; install other versions of them"
        ) from error
    ufuncs, ufunc_db = _module("numba.cuda.ufuncs"), _module("numba.cuda.np.ufunc_db")
    for function in (np.add, np.subtract, np.multiply):
        ufuncs.ufunc_db().setdefault(function, ufunc_db.get_ufunc_info(function))
    return cuda


@contextlib.contextmanager
def _patched(name: str, value: Any, *modules: Any) -> Iterator[None]:
    """Let modules have another attribute, and give no warnings, in this context."""
    before = [getattr(module, name, None) for module in modules]
    try:
        for module in modules:
            setattr(module, name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, found in zip(modules, before, strict=True):
            setattr(module, name, found) if found is not None else delattr(module, name)


class _Device:
    compute_capability = _LOWERED_FOR


def _without_device() -> contextlib.AbstractContextManager[None]:
    """Give numba-cuda a device's properties, which it asks for when compiling nested functions."""
    modules = _module("numba.cuda.compiler"), _module("numba.cuda.dispatcher")
    return _patched("get_current_device", _Device, *modules)


def lower(
    name: str, function: Callable[..., None], arguments: tuple[Any, ...], entry: str
) -> Lowered:
    """Lower a plain function, with arguments of these types, to a kernel of the name `entry`.

    No device is needed. It raises what numba-cuda raises of functions that devices can't run.
    """
    require()
    compiler = _module("numba.cuda.compiler")
    with _without_device():
        result = compiler.compile_cuda(
            function, types.void, arguments, nvvm_options=dict(_OPTIONS), cc=_LOWERED_FOR
        )
    library = result.library
    kernel = library.get_function(result.fndesc.llvm_func_name)
    library._entry_name = kernel.name
    compiler.kernel_fixup(kernel, False)
    modules = [text.replace(kernel.name, entry) for text in library.llvm_strs]
    sizes = [int(size) for text in modules for size in _CONSTANT.findall(text)]
    if sum(sizes) > _MOST_CONSTANT_BYTES:  # more than there is of constant memory
        modules = [text.replace("addrspace(4)", "addrspace(1)") for text in modules]
    if any("numba_attempt_nocopy_reshape" in text for text in modules):
        nvvm = _module("numba.cuda.cudadrv.nvvm").NVVM()
        numbers = ", ".join(f"i32 {number}" for number in nvvm.get_ir_version())
        modules.append(_RESHAPE.format(layout=nvvm.data_layout, version=numbers))
    return Lowered(name, tuple(modules), entry)


def signature_of(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return Numba's signature of a function that kernels call; raises as `lower` does."""
    require()
    compiler = _module("numba.cuda.compiler")
    with _without_device():
        return compiler.compile_cuda(function, None, arguments, cc=_LOWERED_FOR).signature


def ptx(program: Lowered, capability: tuple[int, int]) -> str:
    """Return PTX for this compute capability and above; DeviceError if libNVVM can't make it."""
    require()
    nvvm = _module("numba.cuda.cudadrv.nvvm")
    major, minor = capability
    try:
        unit = nvvm.CompilationUnit({**_OPTIONS, "arch": f"compute_{major}{minor}"})
        for text in program.modules:
            unit.add_module(nvvm.llvm_replace(text).encode())
        unit.verify()
        mathematics = _module("cuda.pathfinder").find_bitcode_lib("device")
        unit.lazy_add_module(Path(mathematics).read_bytes())
        return unit.compile().rstrip(b"\0").decode()
    except Exception as error:
        raise DeviceError(
            f"{program.name} can't be compiled for compute capability {major}.{minor}: {error}; "
            f"libNVVM comes with {_INSTALL}"
        ) from error


def machine_code(text: str, capability: tuple[int, int]) -> tuple[bytes, str]:
    """Return ptxas's machine code of PTX, and its output; raise DeviceError if it fails."""
    tool = _module("cuda.pathfinder").find_nvidia_binary_utility("ptxas")
    if tool is None:
        raise DeviceError(f"ptxas was not found; it comes with {_INSTALL}")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(text)
        major, minor = capability
        command = [tool, "-v", "-O3", f"-arch=sm_{major}{minor}", str(source), "-o", str(target)]
        options: dict[str, Any] = {"start_new_session": True}  # so that Ctrl-C does not reach it
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        if done.returncode != 0:
            raise DeviceError(f"ptxas failed with exit status {done.returncode}: {done.stderr}")
        return target.read_bytes(), done.stdout + done.stderr


def loaded(name: str, code: bytes, entry: str) -> Callable[[int, int, int, int], None]:
    """Load machine code, or PTX that ends with a zero byte, into the current context.

    Returns:
        `launch(num_blocks, block_size, stream, places)` of the kernel `entry`; the last two
        arguments are addresses: of a stream, and of an array with the address of each argument.

    Raises:
        DeviceError: The device's driver refuses the code.
    """
    driver = _module("cuda.bindings.driver")
    results = driver.CUresult

    def checked(result: tuple[Any, ...], doing: str, why: str = "") -> Any:
        if result[0] != results.CUDA_SUCCESS:
            raise DeviceError(f"{doing} {name} failed with {result[0].name}{why}")
        return result[1] if len(result) > 1 else None

    error, number = driver.cuDriverGetVersion()
    known = f"{number // 1000}.{number % 1000 // 10}" if error == results.CUDA_SUCCESS else "?"
    why = (
        f": the driver of the device is for CUDA {known}, the code was made by {versions()}; a "
        "compiler of a later major version than the driver's makes code that it does not know"
    )
    module = checked(driver.cuModuleLoadData(code), "loading the code of", why)
    found = driver.cuModuleGetFunction(module, entry.encode())
    function = checked(found, "finding the kernel of", why)
    context = checked(driver.cuCtxGetCurrent(), "finding the context of")
    run: Any = driver.cuLaunchKernel

    def launch(num_blocks: int, block_size: int, stream: int, places: int) -> None:
        result = run(function, num_blocks, 1, 1, block_size, 1, 1, 0, stream, places, 0)
        if result[0] == results.CUDA_ERROR_INVALID_CONTEXT:
            # torch may not have used a device in this thread yet; memory comes from torch's cache.
            checked(driver.cuCtxSetCurrent(context), "entering the context of")
            result = run(function, num_blocks, 1, 1, block_size, 1, 1, 0, stream, places, 0)
        if result[0] != results.CUDA_SUCCESS:
            checked(result, "launching the kernel of")

    return launch


@functools.cache
def versions() -> str:
    """Return the versions of the packages that compile."""
    found = []
    for name in ("numba-cuda", "nvidia-nvvm", "nvidia-cuda-nvcc"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)
