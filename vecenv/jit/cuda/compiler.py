"""Drivers compiled for CUDA devices: `driver.run_thread`, bound to the kernels of one kind of env.

`vecenv.core.cuda` compiles. Functions of `copying` that devices need in another form are added
here, see `_prepare`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, njit
from numba import types as numba_types

from vecenv.core import atomics, cuda
from vecenv.core.compiling import announced, fingerprint, fresh_njit, is_lasting
from vecenv.files import whole_file
from vecenv.jit import copying
from vecenv.jit import driver as host_driver
from vecenv.jit.arrays import element_bounds
from vecenv.jit.binding import bound_scope, constants_of, functions_of, rebound
from vecenv.jit.cuda import driver
from vecenv.jit.episodes import run_rows
from vecenv.jit.errors import explain
from vecenv.jit.games import as_njit
from vecenv.jit.interpreted import interpretable
from vecenv.jit.kernels import EnvKernels

__all__ = [
    "ENTRY",
    "bound_driver",
    "kept_code",
    "lower",
]

ENTRY = "vecenv_run_thread"


@functools.cache
def _prepare() -> Any:
    """Return `numba.cuda` with the versions that kernels need; raises as `cuda.require`."""
    numba_cuda = cuda.require()
    _overload_write_bits(numba_cuda)
    return numba_cuda


def _overload_write_bits(numba_cuda: Any) -> None:
    """Let threads store four numbers at once: rows lie apart, so each store is one sector."""
    extending, cgutils = numba_cuda.extending, numba_cuda.cgutils
    four = ir.VectorType(ir.FloatType(), 4)

    def address(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
        return context.make_array(array_type)(context, builder, array).data

    @extending.intrinsic
    def num_before_four(typingctx, out):
        """Return how many numbers precede the first one at a multiple of 16 bytes, uint64."""

        def codegen(context, builder, signature, args):
            word = context.get_value_type(numba_types.uint64)
            place = builder.ptrtoint(address(context, builder, out, args[0]), word)
            return builder.lshr(builder.and_(builder.neg(place), word(15)), word(2))

        return numba_types.uint64(out), codegen

    @extending.intrinsic
    def store_four(typingctx, out, start, a, b, c, d):
        def codegen(context, builder, signature, args):
            numbers = ir.Constant(four, ir.Undefined)
            for place, number in enumerate(args[2:]):
                numbers = builder.insert_element(numbers, number, ir.IntType(32)(place))
            first = address(context, builder, out, args[0])
            place = cgutils.gep(builder, first, args[1])
            builder.store(numbers, builder.bitcast(place, four.as_pointer()), align=16)
            return context.get_dummy_value()

        floats = (numba_types.float32,) * 4
        return numba_types.none(out, numba_types.uint64, *floats), codegen

    one, step = np.uint64(1), np.uint64(4)

    @extending.overload(copying.write_bits)
    def write_bits(bits, num_bits, out):
        if out.dtype != numba_types.float32 or out.layout != "C":
            return copying.write_bits

        def by_four(bits, num_bits, out):
            bits, end, done = np.uint64(bits), np.uint64(num_bits), np.uint64(0)
            first = min(num_before_four(out), end)
            while done < first:
                out[done] = np.float32(bits & one)
                bits >>= one
                done += one
            while done + step <= end:
                a, b = np.float32(bits & one), np.float32((bits >> one) & one)
                c = np.float32((bits >> np.uint64(2)) & one)
                d = np.float32((bits >> np.uint64(3)) & one)
                store_four(out, done, a, b, c, d)
                bits >>= step
                done += step
            while done < end:
                out[done] = np.float32(bits & one)
                bits >>= one
                done += one

        return by_four


# Functions that are bound to the kernels.
_OWN = (driver.run_thread, driver.action_is_allowed, run_rows)
_OWN += tuple(Path(str(one.__file__)).read_bytes() for one in (atomics, cuda, host_driver))
_OWN += (Path(__file__).read_bytes(),)


def lower(kernels: EnvKernels, params: np.ndarray | None) -> cuda.Lowered:
    """Lower the driver with these kernels and a parameter record (1,), or None.

    Raises:
        ModuleNotFoundError: numba-cuda is not installed.
        KernelCompileError: A kernel uses what devices lack; names file and line.
    """
    main = bound_driver(kernels, params, _prepare(), _device_view)
    # A fresh function, because Numba remembers the globals of compiled ones.
    function = fresh_njit(main).py_func
    arguments = numba_types.StarArgTuple.from_types((numba_types.int64,) * len(driver.ARGUMENTS))
    try:
        return cuda.lower(kernels.name, function, (arguments,), ENTRY)
    except Exception as error:
        compiled = {name: as_njit(function) for name, function in functions_of(kernels).items()}
        constants = constants_of(kernels, params)
        explain(kernels, compiled, constants, error, cuda.signature_of, " for a CUDA device")


def _key(kernels: EnvKernels, params: np.ndarray | None) -> str:
    """Return a fingerprint of everything that the code depends on."""
    constants = constants_of(kernels, params)
    functions = functions_of(kernels).values()
    bounds = element_bounds(kernels.action_space).shape
    return fingerprint([*functions, *constants.values(), bounds, _OWN, cuda.versions()])


def bound_driver(
    kernels: EnvKernels,
    params: np.ndarray | None,
    threads: Any,
    view: Callable[[Any, tuple[int, ...]], Any],
    *,
    is_compiled: bool = True,
) -> Any:
    """Return `run_thread` with its global names bound to these kernels, compiled or plain Python.

    `threads` has `grid(1)`, the number of the thread; `view` is as `driver.array_maker`.
    """
    functions, constants = functions_of(kernels), constants_of(kernels, params)
    if is_compiled:
        functions = {name: as_njit(function) for name, function in functions.items()}
        scope = bound_scope(functions, constants, lambda one: njit(one, inline="always"), view)
    else:
        scope = bound_scope(functions, constants, lambda one: one, view)
        scope["run_rows"] = interpretable(scope["run_rows"])
    own = {name: value for name, value in vars(driver).items() if value is not None}
    scope = {**own, **scope, "cuda": threads}
    scope["elements_at"] = view(constants["ACTION_DTYPE"], ())
    scope["NUM_ELEMENTS"] = int(np.prod(constants["ACTION_SHAPE"]))
    scope["NUM_BOUNDS"] = element_bounds(kernels.action_space).shape[1]
    check = rebound(driver.action_is_allowed, scope)
    scope["is_allowed"] = njit(check) if is_compiled else check
    return rebound(driver.run_thread, scope)


def _device_view(dtype: Any, inner: tuple[int, ...]) -> Any:
    """Return a device function from an address and a number of rows to an array."""
    return host_driver.array_maker(
        dtype, inner, _prepare().extending.intrinsic(atomics.make_array_at)
    )


def kept_code(kernels: EnvKernels, params: np.ndarray | None, capability: tuple[int, int]) -> bytes:
    """Return machine code of the driver with these kernels, cached on disk.

    If ptxas is missing or fails, return PTX, which the device's own driver compiles.
    """
    _prepare()
    folder = _cache_folder()
    key = _key(kernels, params)
    kept = folder / f"{key}-sm{capability[0]}{capability[1]}.cubin"
    with contextlib.suppress(OSError):
        return kept.read_bytes()
    is_kept = is_lasting(key)
    with announced(kernels.name, is_kept=lambda: is_kept, target=" for a CUDA device"):
        text = cuda.ptx(lower(kernels, params), capability)
        try:
            code, _ = cuda.machine_code(text, capability)
        except (cuda.DeviceError, OSError):
            return text.encode() + b"\0"
    if not is_kept:
        return code
    with contextlib.suppress(OSError):  # the disk is full, or read-only
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(kept) as aside:
            aside.write_bytes(code)
    return code


def _cache_folder() -> Path:
    """Return the cache folder of machine code, according to Numba's settings."""
    if folder := vars(config)["CACHE_DIR"]:
        return Path(folder) / "vecenv-cuda"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "vecenv" / "cuda"
