"""Private parts of torch, which may change; each use has a fallback.

Tested with torch 2.13, 2.14, and 2.4 (which lacks such packages: autograd is used there).
Used are: `aoti_compile_and_package`; `aoti_load_package`; the C interface of CPU packages, since
`aoti_load_package` holds the GIL while it runs, so two halves would take turns; and the default
of `Distribution._validate_args`.
"""

from __future__ import annotations

import ctypes
import tempfile
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

__all__ = ["compile_graph", "load_library", "load_package", "no_validation"]

# Files of a package that needs no other library.
_SELF_CONTAINED = (
    ".so", ".cpp", "_metadata.json", "/version", "/byteorder", "/archive_format",
    "/archive_version", "/serialization_id",
)  # fmt: skip


def compile_graph(graph: Any, inputs: Sequence[Tensor], file: Path) -> None:
    """Compile a graph of ATen operations ahead of time, into a package named `*.pt2`."""
    from torch._inductor import aoti_compile_and_package  # torch 2.6 or newer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's warnings about itself
        aoti_compile_and_package(torch.export.export(graph, (*inputs,)), package_path=str(file))


def load_package(file: Path, device: torch.device) -> Callable[..., Sequence[Tensor]]:
    """Load a package as a function of tensors on a device, for one thread at a time."""
    if device.type == "cpu":
        with suppress(Exception):
            return load_library(file)
    from torch._inductor import aoti_load_package

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        index = -1 if device.index is None else device.index
        return aoti_load_package(str(file), run_single_threaded=True, device_index=index)


def load_library(file: Path) -> Callable[..., Sequence[Tensor]]:
    """Load a package for the CPU as a function that runs without the GIL."""
    library, aoti = _library_of(file), getattr(torch._C, "_aoti")  # noqa: B009 - not typed
    container, number = ctypes.c_void_p(), ctypes.c_size_t()
    make = library.AOTInductorModelContainerCreateWithDevice
    _require(make(ctypes.byref(container), ctypes.c_size_t(1), b"cpu", None))
    _require(library.AOTInductorModelContainerGetNumOutputs(container, ctypes.byref(number)))

    def call(*tensors: Tensor) -> Sequence[Tensor]:
        handles = aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
        inputs = (ctypes.c_void_p * len(handles))(*(_POINTER_OF(x, None) for x in handles))
        outputs = (ctypes.c_void_p * number.value)()
        sizes = ctypes.c_size_t(len(inputs)), ctypes.c_size_t(len(outputs))
        run = library.AOTInductorModelContainerRun
        _require(run(container, inputs, sizes[0], outputs, sizes[1], None, None))
        found = [_CAPSULE_OF(pointer, None, None) for pointer in outputs]
        return aoti.alloc_tensors_by_stealing_from_void_ptrs(found)

    weakref.finalize(call, library.AOTInductorModelContainerDelete, container).atexit = False
    return call


@cache  # operating systems do not free loaded code
def _library_of(file: Path) -> ctypes.CDLL:
    """Load the code of a package; refuse packages that need more steps of torch's loader."""
    with zipfile.ZipFile(file) as package, tempfile.TemporaryDirectory() as folder:
        names = package.namelist()
        if others := [name for name in names if not name.endswith(_SELF_CONTAINED)]:
            raise NotImplementedError(f"the package needs {others}, too")
        [name] = [name for name in names if name.endswith(".so")]
        return ctypes.CDLL(package.extract(name, folder))


def _require(error: int) -> None:
    if error:
        raise RuntimeError(f"AOTInductor returned the error {error}, see standard error")


_POINTER_OF, _CAPSULE_OF = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
_POINTER_OF.restype, _POINTER_OF.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_CAPSULE_OF.restype = ctypes.py_object
_CAPSULE_OF.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@contextmanager
def no_validation() -> Iterator[None]:
    """Turn off the argument checks of distributions: a graph has no values to check."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
