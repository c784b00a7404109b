"""Kernels compiled for CUDA devices; the only module that knows numba-cuda.

numba-cuda is used as a compiler only: it lowers `driver.run_thread`, bound to the kernels of one
kind of env, to LLVM's language; NVIDIA's libNVVM makes PTX of that and ptxas machine code. Memory,
streams and launches are the business of `devices`. So nothing here needs a device, and a check
without one counts registers and spills.

What numba-cuda lacks is put in here, see `_prepare`: `np.add` and `np.multiply` of numbers, which
`vecenv.jit.random` uses, what `copying` does, and compilation where there is no device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from llvmlite import ir
from numba import __version__ as numba_version
from numba import config, from_dtype, njit
from numba import types as numba_types

from vecenv.files import whole_file
from vecenv.fingerprint import fingerprint, fresh_njit, is_jit_off, is_lasting
from vecenv.jit import copying
from vecenv.jit.arrays import element_bounds
from vecenv.jit.binding import bound_scope, constants_of, functions_of, rebound
from vecenv.jit.cuda import driver
from vecenv.jit.cuda.errors import DeviceError
from vecenv.jit.episodes import run_rows
from vecenv.jit.failures import explain
from vecenv.jit.games import as_njit
from vecenv.jit.interpreted import interpretable
from vecenv.jit.kernels import EnvKernels

__all__ = [
    "LOWEST",
    "Program",
    "Resources",
    "bound_driver",
    "host_view",
    "is_simulated",
    "kept_code",
    "loaded",
    "lower",
    "machine_code",
    "ptx",
    "require",
    "resources",
    "simulated",
]

LOWEST = (7, 5)  # compute capability that CUDA 13's compiler knows at least
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
_ENTRY = "vecenv_run_thread"
_CONSTANT = re.compile(r"addrspace\(4\) constant \[(\d+) x i8\]")
_MOST_CONSTANT_BYTES = 60_000  # of 65,536
_INSTALL = 'pip install "vecenv[cuda]"'


class Program(NamedTuple):
    """A driver lowered for devices, bound to the kernels of one kind of env.

    Attributes:
        name: Of the kind of env.
        modules: Texts in LLVM's language (NVVM IR).
        entry: Name of the kernel in them.
        key: Fingerprint of all that they were made of.
    """

    name: str
    modules: tuple[str, ...]
    entry: str
    key: str


class Resources(NamedTuple):
    """What one thread of a kernel takes, as ptxas says.

    Attributes:
        registers: 32-bit registers.
        stack_bytes: Local memory for arrays and calls.
        spill_bytes: Local memory for registers that are not there.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int


def is_simulated() -> bool:
    """Whether numba-cuda's simulator takes the place of devices (NUMBA_ENABLE_CUDASIM=1)."""
    return bool(getattr(config, "ENABLE_CUDASIM", False))


def _module(name: str) -> Any:
    """Import a module of which type checkers know nothing, or another one of the same name."""
    return importlib.import_module(name)


@functools.cache
def _prepare() -> Any:
    """Import numba-cuda, add to it what kernels need, and return `numba.cuda`.

    Raises:
        ModuleNotFoundError: It is not installed; says how to install it.
    """
    try:
        with _earlier_numpy():
            _module("numba_cuda")
            cuda = _module("numba.cuda")
            if not is_simulated():
                _module("numba.cuda.np.arrayobj")
    except ImportError as error:
        raise ModuleNotFoundError(
            f"compiled envs on a CUDA device need numba-cuda: {_INSTALL} ({error})",
            name="numba_cuda",
        ) from error
    except Exception as error:  # it is not made for this NumPy, say
        raise DeviceError(
            f"numba-cuda can't be imported beside numpy {np.__version__} and numba "
            f"{numba_version}: {error!r}; install other versions of them"
        ) from error
    if is_simulated():
        return cuda
    extending, ufuncs = _module("numba.cuda.extending"), _module("numba.cuda.ufuncs")
    ufunc_db = _module("numba.cuda.np.ufunc_db")

    for function in (np.add, np.subtract, np.multiply):
        ufuncs.ufunc_db().setdefault(function, ufunc_db.get_ufunc_info(function))

    @extending.overload(copying.copy_numbers)
    def copy_numbers(source, source_start, target, target_start, count):
        return copying.copy_numbers

    _overload_write_bits(extending)
    return cuda


def _overload_write_bits(extending: Any) -> None:
    """Let threads store four numbers at once: their rows lie apart, so each store is one sector."""
    cgutils = _module("numba.cuda.cgutils")
    four = ir.VectorType(ir.FloatType(), 4)

    def address(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
        return context.make_array(array_type)(context, builder, array).data

    @extending.intrinsic
    def num_before_four(typingctx, out):
        """How many numbers come before the first that lies at a multiple of 16 bytes, uint64."""

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


@contextlib.contextmanager
def _earlier_numpy() -> Iterator[None]:
    """Let numba-cuda 0.30 be imported beside NumPy 2.5, which warns, and lacks `row_stack`."""
    numpy: Any = np
    is_lacking = not hasattr(np, "row_stack")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if is_lacking:
                numpy.row_stack = np.vstack
            yield
    finally:
        if is_lacking:
            del numpy.row_stack


@contextlib.contextmanager
def _without_device(capability: tuple[int, int]) -> Iterator[None]:
    """Answer numba-cuda's question for the device, for which it compiles nested functions."""
    modules = _module("numba.cuda.compiler"), _module("numba.cuda.dispatcher")

    class Device:
        compute_capability = capability

    before = [module.get_current_device for module in modules]
    try:
        for module in modules:
            module.get_current_device = Device
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module.get_current_device = function


def require() -> None:
    """Raise ModuleNotFoundError if numba-cuda is not installed; says how to install it."""
    _prepare()


# What is bound to the kernels, and what this module puts in their place.
_OWN = (driver.run_thread, run_rows, *driver.CHECKS, Path(__file__).read_bytes())
_programs: dict[str, Program] = {}


def lower(kernels: EnvKernels, params: np.ndarray | None) -> Program:
    """Lower the driver with these kernels.

    Args:
        kernels: The kind of env.
        params: (1,) parameter record, or None.

    Raises:
        ModuleNotFoundError: numba-cuda is not installed.
        KernelCompileError: A kernel uses what devices lack; names file and line.
    """
    cuda = _prepare()
    key = _key(kernels, params)
    if not is_lasting(key):
        return _lower(kernels, params, key, cuda)
    if key not in _programs:
        _programs[key] = _lower(kernels, params, key, cuda)
    return _programs[key]


def _key(kernels: EnvKernels, params: np.ndarray | None) -> str:
    """Return a fingerprint of all that the code depends on."""
    constants = constants_of(kernels, None if params is None else params.dtype)
    functions = functions_of(kernels).values()
    bounds = element_bounds(kernels.action_space).shape
    return fingerprint([*functions, *constants.values(), bounds, _OWN, _versions()])


def _lower(kernels: EnvKernels, params: np.ndarray | None, key: str, cuda: Any) -> Program:
    compiler = _module("numba.cuda.compiler")

    main = bound_driver(kernels, params, cuda, _device_view)
    try:
        with warnings.catch_warnings(), _without_device((9, 0)):
            warnings.simplefilter("ignore")
            result = compiler.compile_cuda(
                fresh_njit(main).py_func,  # Numba remembers globals of functions it has compiled
                numba_types.void,
                (numba_types.int64,) * len(driver.ARGUMENTS),
                nvvm_options=dict(_OPTIONS),
                cc=(9, 0),
            )
    except Exception as error:
        _explain(kernels, params, error)
    library = result.library
    kernel = library.get_function(result.fndesc.llvm_func_name)
    library._entry_name = kernel.name
    compiler.kernel_fixup(kernel, False)
    modules = [text.replace(kernel.name, _ENTRY) for text in library.llvm_strs]
    sizes = [int(size) for text in modules for size in _CONSTANT.findall(text)]
    if sum(sizes) > _MOST_CONSTANT_BYTES:  # there is no more constant memory
        modules = [text.replace("addrspace(4)", "addrspace(1)") for text in modules]
    if any("numba_attempt_nocopy_reshape" in text for text in modules):
        nvvm = _module("numba.cuda.cudadrv.nvvm")

        nvvm_library = nvvm.NVVM()
        version = ", ".join(f"i32 {number}" for number in nvvm_library.get_ir_version())
        modules.append(_RESHAPE.format(layout=nvvm_library.data_layout, version=version))
    return Program(kernels.name, tuple(modules), _ENTRY, key)


def _explain(kernels: EnvKernels, params: np.ndarray | None, error: Exception) -> NoReturn:
    """Raise KernelCompileError for the kernel at fault, from what numba-cuda says of each."""
    compiler = _module("numba.cuda.compiler")

    def compile_one(kernel: Any, given: tuple[Any, ...]) -> Any:
        with warnings.catch_warnings(), _without_device((9, 0)):
            warnings.simplefilter("ignore")
            return compiler.compile_cuda(kernel.py_func, None, given, cc=(9, 0)).signature

    compiled = {name: as_njit(function) for name, function in functions_of(kernels).items()}
    constants = constants_of(kernels, None if params is None else params.dtype)
    explain(kernels, compiled, constants, error, compile_one=compile_one, where="for a CUDA device")


def bound_driver(
    kernels: EnvKernels,
    params: np.ndarray | None,
    cuda: Any,
    view: Callable[[Any, tuple[int, ...]], Any],
    *,
    is_compiled: bool = True,
) -> Any:
    """Return `run_thread` with its global names bound to these kernels.

    Args:
        kernels: The kind of env.
        params: (1,) parameter record, or None.
        cuda: Has `grid(1)`, which is the number of the thread.
        view: Returns a function from an address and a number of rows to an array, given the dtype
            and shape of a row.
        is_compiled: Whether the kernels are compiled; else they run as plain Python.
    """
    functions = functions_of(kernels)
    constants = constants_of(kernels, None if params is None else params.dtype)
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
        "cuda": cuda,
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
    cgutils = _module("numba.cuda.cgutils")
    intrinsic = _module("numba.cuda.extending").intrinsic

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


def simulated(kernels: EnvKernels, params: np.ndarray | None) -> Callable[..., None]:
    """Return `launch(num_blocks, block_size, *arguments)` of numba-cuda's simulator.

    Threads are Python's; the kernels that they call are compiled for the processor.
    """
    cuda = _prepare()
    kernel = cuda.jit(bound_driver(kernels, params, cuda, host_view, is_compiled=not is_jit_off()))

    def launch(num_blocks: int, block_size: int, *arguments: int) -> None:
        kernel[num_blocks, block_size](*arguments)

    return launch


def host_view(dtype: Any, inner: tuple[int, ...]) -> Callable[[int, int], np.ndarray]:
    """Return a function from an address of the host's memory and a number of rows to an array."""
    dtype = np.dtype(dtype)
    row_bytes = dtype.itemsize * int(np.prod(inner, dtype=np.int64))

    def view(address: int, count: int) -> np.ndarray:
        if not address or not count or not row_bytes:
            return np.zeros((count if address else 0, *inner), dtype)
        memory = (ctypes.c_char * (row_bytes * int(count))).from_address(int(address))
        return np.frombuffer(memory, dtype).reshape(count, *inner)

    return view


def ptx(program: Program, capability: tuple[int, int]) -> str:
    """Return PTX for devices of this compute capability and above.

    Raises:
        DeviceError: libNVVM is missing or refuses the code.
    """
    _prepare()
    nvvm = _module("numba.cuda.cudadrv.nvvm")

    major, minor = capability
    try:
        unit = nvvm.CompilationUnit({**_OPTIONS, "arch": f"compute_{major}{minor}"})
        for text in program.modules:
            unit.add_module(nvvm.llvm_replace(text).encode())
        unit.verify()
        unit.lazy_add_module(_libdevice())
        return unit.compile().rstrip(b"\0").decode()
    except Exception as error:
        raise DeviceError(
            f"{program.name} can't be compiled for compute capability {major}.{minor}: {error}; "
            f"libNVVM comes with {_INSTALL}"
        ) from error


@functools.cache
def _libdevice() -> bytes:
    """Return NVIDIA's library of mathematical functions."""
    pathfinder = _module("cuda.pathfinder")

    return Path(pathfinder.find_bitcode_lib("device")).read_bytes()


def machine_code(text: str, capability: tuple[int, int]) -> tuple[bytes, str]:
    """Return the machine code that ptxas makes of PTX, and what it says of it.

    Raises:
        DeviceError: ptxas is missing, or fails.
    """
    pathfinder = _module("cuda.pathfinder")

    tool = pathfinder.find_nvidia_binary_utility("ptxas")
    if tool is None:
        raise DeviceError(f"ptxas was not found; it comes with {_INSTALL}")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(text)
        major, minor = capability
        command = [tool, "-v", "-O3", f"-arch=sm_{major}{minor}", str(source), "-o", str(target)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # so that Ctrl-C does not reach it
        )
        if done.returncode != 0:
            raise DeviceError(f"ptxas failed with exit status {done.returncode}: {done.stderr}")
        return target.read_bytes(), done.stdout + done.stderr


def loaded(name: str, code: bytes) -> Callable[[int, int, int, int], None]:
    """Load machine code or PTX into the current context.

    Returns:
        `launch(num_blocks, block_size, stream, places)`, whose last two arguments are addresses: of
        a stream, and of an array with the address of each argument.

    Raises:
        DeviceError: The driver of the device refuses the code.
    """
    cuda_driver = _module("cuda.bindings.driver")
    results = cuda_driver.CUresult

    def checked(result: tuple[Any, ...], doing: str, why: str = "") -> Any:
        if result[0] != results.CUDA_SUCCESS:
            raise DeviceError(f"{doing} {name} failed with {result[0].name}{why}")
        return result[1] if len(result) > 1 else None

    error, number = cuda_driver.cuDriverGetVersion()
    known = f"{number // 1000}.{number % 1000 // 10}" if error == results.CUDA_SUCCESS else "?"
    why = (
        f": the driver of the device is for CUDA {known}, the code was made by {_versions()}; a "
        "compiler of a later major version than the driver's makes code that it does not know"
    )
    module = checked(cuda_driver.cuModuleLoadData(code), "loading the code of", why)
    function = checked(
        cuda_driver.cuModuleGetFunction(module, _ENTRY.encode()), "finding the kernel of", why
    )
    context = checked(cuda_driver.cuCtxGetCurrent(), "finding the context of")
    run: Any = cuda_driver.cuLaunchKernel

    def launch(num_blocks: int, block_size: int, stream: int, places: int) -> None:
        result = run(function, num_blocks, 1, 1, block_size, 1, 1, 0, stream, places, 0)
        if result[0] == results.CUDA_ERROR_INVALID_CONTEXT:
            # A thread in which torch has not needed one so far: memory comes from torch's cache.
            checked(cuda_driver.cuCtxSetCurrent(context), "entering the context of")
            result = run(function, num_blocks, 1, 1, block_size, 1, 1, 0, stream, places, 0)
        if result[0] != results.CUDA_SUCCESS:
            checked(result, "launching the kernel of")

    return launch


_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def resources(report: str) -> Resources:
    """Read what ptxas says of a kernel and of the functions that it calls."""
    frames = [tuple(map(int, found)) for found in _STACK.findall(report)]
    return Resources(
        max(map(int, _REGISTERS.findall(report))),
        max(frame for frame, _, _ in frames),
        max(max(stores, loads) for _, stores, loads in frames),
    )


def kept_code(kernels: EnvKernels, params: np.ndarray | None, capability: tuple[int, int]) -> bytes:
    """Return machine code of the driver with these kernels, from disk, or made now and put there.

    Where ptxas is missing or fails, return PTX, which the driver of the device compiles.
    """
    _prepare()
    folder = _cache_folder()
    key = _key(kernels, params)
    kept = folder / f"{key}-sm{capability[0]}{capability[1]}.cubin"
    with contextlib.suppress(OSError):
        return kept.read_bytes()
    text = ptx(lower(kernels, params), capability)
    try:
        code, _ = machine_code(text, capability)
    except (DeviceError, OSError):
        return text.encode() + b"\0"
    if not is_lasting(key):
        return code
    with contextlib.suppress(OSError):  # a full disk, or one that can't be written
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(kept) as aside:
            aside.write_bytes(code)
    return code


def _cache_folder() -> Path:
    """Return where machine code is kept, as Numba's settings say."""
    if folder := vars(config)["CACHE_DIR"]:
        return Path(folder) / "vecenv-cuda"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "vecenv" / "cuda"


@functools.cache
def _versions() -> str:
    """Return the versions of what compiles."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in ("numba-cuda", "nvidia-nvvm", "nvidia-cuda-nvcc"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)
