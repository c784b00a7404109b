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
from typing import Any, NoReturn

import numpy as np
from llvmlite import ir
from numba import config, from_dtype, njit
from numba import types as numba_types

from vecenv.core import cuda
from vecenv.core.announcing import announced
from vecenv.core.compiling import fingerprint, fresh_njit, is_lasting
from vecenv.files import whole_file
from vecenv.jit import copying
from vecenv.jit.arrays import element_bounds
from vecenv.jit.binding import bound_scope, constants_of, functions_of, rebound
from vecenv.jit.cuda import driver
from vecenv.jit.episodes import run_rows
from vecenv.jit.failures import explain
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
_OWN = (driver.run_thread, run_rows, *driver.CHECKS)
_OWN += tuple(Path(file).read_bytes() for file in (__file__, cuda.__file__))
_programs: dict[str, cuda.Lowered] = {}


def lower(kernels: EnvKernels, params: np.ndarray | None) -> cuda.Lowered:
    """Lower the driver with these kernels.

    Args:
        kernels: The kind of env.
        params: (1,) parameter record, or None.

    Raises:
        ModuleNotFoundError: numba-cuda is not installed.
        KernelCompileError: A kernel uses what devices lack; names file and line.
    """
    key = _key(kernels, params)
    if not is_lasting(key):
        return _lower(kernels, params)
    if key not in _programs:
        _programs[key] = _lower(kernels, params)
    return _programs[key]


def _key(kernels: EnvKernels, params: np.ndarray | None) -> str:
    """Return a fingerprint of everything that the code depends on."""
    constants = constants_of(kernels, params)
    functions = functions_of(kernels).values()
    bounds = element_bounds(kernels.action_space).shape
    return fingerprint([*functions, *constants.values(), bounds, _OWN, cuda.versions()])


def _lower(kernels: EnvKernels, params: np.ndarray | None) -> cuda.Lowered:
    main = bound_driver(kernels, params, _prepare(), _device_view)
    # A fresh function, because Numba remembers the globals of compiled ones.
    function, arguments = fresh_njit(main).py_func, (numba_types.int64,) * len(driver.ARGUMENTS)
    try:
        return cuda.lower(kernels.name, function, arguments, ENTRY)
    except Exception as error:
        _explain(kernels, params, error)


def _explain(kernels: EnvKernels, params: np.ndarray | None, error: Exception) -> NoReturn:
    """Raise KernelCompileError for the kernel at fault, by compiling each with numba-cuda."""

    def compile_one(kernel: Any, given: tuple[Any, ...]) -> Any:
        return cuda.signature_of(kernel.py_func, given)

    compiled = {name: as_njit(function) for name, function in functions_of(kernels).items()}
    constants = constants_of(kernels, params)
    explain(kernels, compiled, constants, error, compile_one=compile_one, where="for a CUDA device")


def bound_driver(
    kernels: EnvKernels,
    params: np.ndarray | None,
    threads: Any,
    view: Callable[[Any, tuple[int, ...]], Any],
    *,
    is_compiled: bool = True,
) -> Any:
    """Return `run_thread` with its global names bound to these kernels.

    Args:
        kernels: The kind of env.
        params: (1,) parameter record, or None.
        threads: Has `grid(1)`, the number of the thread.
        view: Takes the dtype and shape of a row; returns a function from an address and a number of
            rows to an array.
        is_compiled: Whether the kernels are compiled; else they run as plain Python.
    """
    functions = functions_of(kernels)
    constants = constants_of(kernels, params)
    if is_compiled:
        functions = {name: as_njit(function) for name, function in functions.items()}
        scope = bound_scope(functions, constants, lambda one: njit(one, inline="always"))
    else:
        scope = bound_scope(functions, constants, lambda one: one)
        scope["run_rows"] = interpretable(scope["run_rows"])
    num_bounds = element_bounds(kernels.action_space).shape[1]
    obs_dtype, obs_shape = constants["OBS_DTYPE"], constants["OBS_SHAPE"]
    action_dtype, action_shape = constants["ACTION_DTYPE"], constants["ACTION_SHAPE"]
    if num_bounds == 0:
        is_float = np.dtype(action_dtype).kind == "f"
        check = driver.has_no_nan if is_float else driver.any_is_allowed
    else:
        check = driver.array_is_allowed if action_shape else driver.number_is_allowed
    scope |= {
        "cuda": threads,
        "NUM_BOUNDS": num_bounds,
        "BAD_ACTION": driver.BAD_ACTION,
        "IS_OVER": driver.IS_OVER,
        "BAD_MASK": driver.BAD_MASK,
        "FAULT_SHIFT": driver.FAULT_SHIFT,
        "states_at": view(constants["STATE_DTYPE"], ()),
        "runs_at": view(constants["RUN_DTYPE"], ()),
        "params_at": view(scope["PARAMS_DTYPE"], ()),
        "ids_at": view(np.int64, ()),
        "actions_at": view(action_dtype, action_shape),
        "obs_at": view(obs_dtype, obs_shape),
        "floats_at": view(np.float32, ()),
        "doubles_at": view(np.float64, ()),
        "bools_at": view(np.bool_, ()),
        "masks_at": view(np.bool_, (constants["NUM_MASKED_ACTIONS"],)),
    }
    scope["is_allowed"] = rebound(check, scope)
    if is_compiled:
        scope["is_allowed"] = njit(scope["is_allowed"])
    return rebound(driver.run_thread, scope)


def _device_view(dtype: Any, inner: tuple[int, ...]) -> Any:
    """Return a device function from an address and a number of rows to an array."""
    numba_cuda = _prepare()
    cgutils, intrinsic = numba_cuda.cgutils, numba_cuda.extending.intrinsic

    dtype = np.dtype(dtype)
    array_type = numba_types.Array(from_dtype(dtype), 1 + len(inner), "C")

    @intrinsic
    def view(typingctx, address, count):
        def codegen(context, builder, signature, args):
            array = context.make_array(array_type)(context, builder)
            strides = dtype.itemsize * np.cumprod((1, *inner[::-1]))[::-1]
            numbers = [context.get_constant(numba_types.intp, int(n)) for n in (*inner, *strides)]
            context.populate_array(
                array,
                data=builder.inttoptr(args[0], array.data.type),
                shape=cgutils.pack_array(builder, [args[1], *numbers[: len(inner)]]),
                strides=cgutils.pack_array(builder, numbers[len(inner) :]),
                itemsize=context.get_constant(numba_types.intp, dtype.itemsize),
                meminfo=None,
            )
            return array._getvalue()

        return array_type(numba_types.int64, numba_types.int64), codegen

    return view


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
