"""The driver on a device, and its compilation with the kernels of one kind of env.

One thread does one row of a job, by the rules in `jit.driver`. All arguments are int64, by value:
settings, counts and addresses. So a launch copies nothing else to the device, and a CUDA graph
keeps all of it.

A device can't raise errors. A row that can't be stepped (its action is out of bounds, or its
episode is over while autoreset is disabled) is left unchanged and noted in the word `faults`, which
lies in host memory; the env raises the error at the next call.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import config, njit
from numba import types as numba_types

from vecenv.core import atomics, cuda
from vecenv.core.compiling import announced, fingerprint, fresh_njit, is_lasting
from vecenv.files import whole_file
from vecenv.jit import driver as host_driver
from vecenv.jit import kernels as authors
from vecenv.jit.binding import bound_scope, njit_parts, parts_of, rebound
from vecenv.jit.driver import DISABLED, JOB_DTYPE, MASK, OBSERVE, RESET, STEP, element_bounds
from vecenv.jit.errors import explain
from vecenv.jit.interpreted import interpretable
from vecenv.jit.kernels import EnvKernels

ENTRY = "vecenv_run_thread"
ARGUMENTS = (
    *(JOB_DTYPE.names or ()),  # the parts and chunks of threads of the host are not used
    "bounds",  # int64 (2, NUM_BOUNDS), see `element_bounds`
    "chosen",  # bool (num_rows,), or 0: rows that RESET resets; it only observes the others
    "faults",  # int64 (1,)
)
Job = namedtuple("Job", ARGUMENTS)  # all fields are numbers

# Values of `faults`: one of these, shifted, plus the number of the env.
BAD_ACTION, IS_OVER, BAD_MASK = 1, 2, 3
FAULT_SHIFT = 56

# Bound by `bound_driver`; the views are those of `jit.driver`. `threads` tells a thread its number.
threads = run_rows = unpack = is_allowed = runs_at = elements_at = cast("Any", None)
int64_at = float32_at = float64_at = bool_at = cast("Any", None)
NUM_BOUNDS = NUM_ELEMENTS = 0  # of an action


def run_thread(*arguments):
    """Do one row of a job; see ARGUMENTS."""
    job = Job(*arguments)
    row = threads.grid(1)
    if row >= job.num_rows:  # the last block has spare threads
        return
    env = row if job.env_ids == 0 else int64_at(job.env_ids, job.num_rows)[row]
    op, fault = job.op, 0
    if op == STEP:
        elements = elements_at(job.actions, job.num_rows * NUM_ELEMENTS)
        if not is_allowed(elements, row, int64_at(job.bounds, 2 * NUM_BOUNDS)):
            fault = BAD_ACTION
        if job.autoreset_mode == DISABLED and runs_at(job.runs, job.num_envs)[env]["episode_over"]:
            fault = IS_OVER
        if fault != 0:
            op = OBSERVE  # the env is not stepped
            if job.rewards32 != 0:
                float32_at(job.rewards32, job.num_rows)[row] = 0.0
            else:
                float64_at(job.rewards64, job.num_rows)[row] = 0.0
            bool_at(job.terminations, job.num_rows)[row] = False
            bool_at(job.truncations, job.num_rows)[row] = False
    elif op == RESET and job.chosen != 0 and not bool_at(job.chosen, job.num_rows)[row]:
        op = OBSERVE
    count = run_rows(unpack(job, op), row, row + 1)
    if op == MASK and count != 0:
        fault = BAD_MASK
    if fault != 0:
        int64_at(job.faults, 1)[0] = fault << FAULT_SHIFT | env  # threads may race: one stays


def action_is_allowed(elements, row, bounds):
    """Return whether no element of a row's action is NaN or beyond bounds int64 (2 * NUM_BOUNDS,).

    It becomes `is_allowed`.
    """
    for k in range(NUM_ELEMENTS):
        element = elements[row * NUM_ELEMENTS + k]
        if element != element:
            return False
        if NUM_BOUNDS > 0 and (element < bounds[k] or element > bounds[NUM_BOUNDS + k]):
            return False
    return True


@functools.cache
def _prepare() -> Any:
    """Return `numba.cuda`, with a `write_bits` for devices; raises as `cuda.require`.

    Threads store four numbers at once: rows lie apart, so each store is one sector.
    """
    numba_cuda = cuda.require()
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

    @extending.overload(authors.write_bits)
    def write_bits(bits, num_bits, out):
        if out.dtype != numba_types.float32 or out.layout != "C":
            return authors.write_bits

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

    return numba_cuda


# What the code depends on, beside the kernels.
_OWN = [host_driver.run_rows, Path(__file__).read_bytes()]
_OWN += [Path(str(one.__file__)).read_bytes() for one in (atomics, cuda, host_driver)]


def lower(kernels: EnvKernels, params: np.ndarray | None) -> cuda.Lowered:
    """Lower the driver with these kernels and a parameter record (1,), or None.

    Raises KernelCompileError if a kernel uses what devices lack; names file and line.
    """
    numba_cuda = _prepare()
    array_at = numba_cuda.extending.intrinsic(atomics.make_array_at)
    view = functools.partial(host_driver.array_maker, array_at=array_at)
    main = bound_driver(kernels, params, numba_cuda, view)
    # A fresh function, because Numba remembers the globals of compiled ones.
    function = fresh_njit(main).py_func
    arguments = numba_types.StarArgTuple.from_types((numba_types.int64,) * len(ARGUMENTS))
    try:
        return cuda.lower(kernels.name, function, (arguments,), ENTRY)
    except Exception as error:
        parts = njit_parts(kernels, params)
        explain(kernels, *parts, error, cuda.signature_of, " for a CUDA device")


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
    finish: Callable[[Any], Any] = functools.partial(njit, inline="always")
    if not is_compiled:
        finish = lambda one: one  # noqa: E731  # nothing
    functions, constants = (njit_parts if is_compiled else parts_of)(kernels, params)
    scope = {**globals(), **bound_scope(functions, constants, finish, view), "threads": threads}
    if not is_compiled:
        scope["run_rows"] = interpretable(scope["run_rows"])
    scope["elements_at"] = view(constants["ACTION_DTYPE"], ())
    scope["NUM_ELEMENTS"] = int(np.prod(constants["ACTION_SHAPE"]))
    scope["NUM_BOUNDS"] = element_bounds(kernels.action_space).shape[1]
    scope["is_allowed"] = finish(rebound(action_is_allowed, scope))
    return rebound(run_thread, scope)


def kept_code(kernels: EnvKernels, params: np.ndarray | None, capability: tuple[int, int]) -> bytes:
    """Return machine code of the driver with these kernels, cached on disk.

    If ptxas is missing or fails, return PTX, which the device's own driver compiles.
    """
    _prepare()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vecenv" / "cuda"
    if numbas := vars(config)["CACHE_DIR"]:
        folder = Path(numbas) / "vecenv-cuda"
    functions, constants = parts_of(kernels, params)
    depends = [*functions.values(), *constants.values(), *_OWN, cuda.versions()]
    key = fingerprint([*depends, element_bounds(kernels.action_space).shape])
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
