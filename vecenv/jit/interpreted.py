"""Kernels as plain Python: for debugging, and for a dry run that finds indices out of range.

Compiled code does not check indices, so a wrong one reads or writes other memory; NumPy checks
them. Compiled integers of less than 64 bits are widened in every operation, NumPy's are not. So
kernels get their records and arrays as `Record` and `WideArray`, which return wide numbers,
constants as wide numbers, and NumPy with functions that return wide numbers.
"""

from __future__ import annotations

import ctypes
import inspect
import linecache
import logging
import re
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard

import numpy as np
from gymnasium.spaces import Discrete
from numba import njit

from vecenv.core.function_copies import FIXED_PACKAGES, Copies
from vecenv.core.masks import mask_width, sample_actions
from vecenv.core.rows import aligned_zeros
from vecenv.jit.episodes import MASK, NEXT_STEP, RESET, RUN_DTYPE, STEP, Batch
from vecenv.jit.failures import KernelResultError
from vecenv.jit.kernels import EnvKernels
from vecenv.jit.leftovers import Trial, find_leftovers

__all__ = [
    "KernelIndexError",
    "WideArray",
    "calls_users_code",
    "checked_in_trials",
    "interpretable",
    "try_out",
]

_logger = logging.getLogger("vecenv")
_NUM_STEPS = 64  # of a dry run
_MIN_STEPS = 8
NUM_EPISODES = 3  # that are played whole
_TRIAL_SECONDS = 0.02  # a dry run with enough steps ends after this time
_LIMIT_SECONDS = 2.0  # any dry run is stopped after this time
# Until it is stopped once more, as what is raised in a callback from C code (LLVM's) is lost; not
# soon, as that would cut off what the thread does at its end.
_STOP_SECONDS = (1.5, 0.5)


class KernelIndexError(IndexError):
    """A kernel uses an index that is out of range.

    Attributes:
        filename: File of the kernel, or of the function that it calls.
        lineno: Line with the index.
    """

    def __init__(self, message: str, filename: str = "", lineno: int = 0) -> None:
        super().__init__(message)
        self.filename = filename
        self.lineno = lineno


class WideArray(np.ndarray):
    """View of an array that returns elements as compiled code does: wide numbers, records."""

    def __getitem__(self, key: Any) -> Any:
        return _wide(super().__getitem__(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        _note_loss(value, self.dtype)
        super().__setitem__(key, _fitting(value, self.dtype))

    def __iter__(self) -> Any:
        return (self[k] for k in range(len(self)))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Compute with plain arrays; a Python int is an int64 beside narrow integers."""
        if all(_is_narrow(one) for one in inputs if isinstance(one, np.ndarray)):
            inputs = tuple(np.int64(one) if type(one) is int else one for one in inputs)
        if out := options.get("out"):
            plain = tuple(one.view(np.ndarray) for one in out)
            options |= {"out": plain, "casting": "unsafe"}
        arrays = (one.view(np.ndarray) if isinstance(one, WideArray) else one for one in inputs)
        result = getattr(ufunc, method)(*arrays, **options)
        return out[0] if out else _wide(result)

    def max(self, *args: Any, **options: Any) -> Any:
        """Return the maximum as a wide number."""
        return _wide(super().max(*args, **options))

    def min(self, *args: Any, **options: Any) -> Any:
        """Return the minimum as a wide number."""
        return _wide(super().min(*args, **options))


class Record:
    """Reference to a record that returns fields as compiled code does."""

    __slots__ = ("_void",)

    def __init__(self, void: np.void) -> None:
        object.__setattr__(self, "_void", void)

    def __getattr__(self, name: str) -> Any:
        return _wide(self._void[self._checked(name)])

    def __setattr__(self, name: str, value: Any) -> None:
        dtype = self._void.dtype[self._checked(name)]
        _note_loss(value, dtype.base)
        if dtype.subdtype is None:
            self._void[name] = _fitting(value, dtype)
        else:
            self._void[name][...] = _fitting(value, dtype.base)

    __getitem__ = __getattr__
    __setitem__ = __setattr__

    def __repr__(self) -> str:
        names = self._void.dtype.names or ()
        return f"Record({', '.join(f'{name}={self._void[name]}' for name in names)})"

    def _checked(self, name: Any) -> str:
        names = self._void.dtype.names or ()
        if isinstance(name, int | np.integer):
            name = names[name]
        if name not in names:
            raise AttributeError(f"the record has no field {name!r}; it has {', '.join(names)}")
        return name


def _is_narrow(array: np.ndarray) -> bool:
    return array.dtype.kind in "iu" and array.itemsize < 8


def _wide(value: Any) -> Any:
    """Return an element or a field as compiled code sees it."""
    if isinstance(value, np.ndarray):
        return value.view(WideArray)
    if isinstance(value, np.void):
        return Record(value)
    if isinstance(value, np.floating):
        return np.float64(value)
    if isinstance(value, np.bool_):
        return value.item()
    if isinstance(value, np.integer) and value.itemsize < 8:
        # A Python int goes with int64 and with uint64, as narrow ones do.
        return _Int64(value.item()) if getattr(_here, "wraps", False) else value.item()
    return value


class _Int64(int):
    """Integer whose sums, products and so on keep 64 bits, as in compiled code; it is slow."""


def _wrapping(name: str) -> Callable[..., Any]:
    compute = getattr(int, name)

    def operate(*args: Any) -> Any:
        result = compute(*args)
        return _Int64((result + 2**63) % 2**64 - 2**63) if type(result) is int else result

    return operate


for _name in (
    "add",
    "sub",
    "mul",
    "floordiv",
    "mod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
):
    for _full in (f"__{_name}__", f"__r{_name}__"):
        setattr(_Int64, _full, _wrapping(_full))
for _full in ("__neg__", "__pos__", "__abs__", "__invert__"):
    setattr(_Int64, _full, _wrapping(_full))
# In this thread: `wraps`, whether narrow integers are `_Int64`; `is_trial`; `tells`, whether lossy
# stores are told of.
_here = threading.local()


def _fitting(value: Any, dtype: np.dtype) -> Any:
    """Convert a value that is assigned as compiled code does: without a check of its range."""
    if isinstance(value, Record):
        return value._void
    if dtype.kind in "iu":
        if isinstance(value, float):
            return np.float64(value)
        if isinstance(value, int):
            bits = 8 * dtype.itemsize
            value = int(value) & (1 << bits) - 1
            return value - (1 << bits) if dtype.kind == "i" and value >> bits - 1 else value
    return value


_lossy: set[tuple[str, int]] = set()  # lines that were told of


def _note_loss(value: Any, dtype: np.dtype) -> None:
    """Log a line, once, of a user's kernel that stores a number which its target can't hold."""
    if dtype.kind not in "iu" or not getattr(_here, "tells", False):
        return
    if isinstance(value, float):
        value = float(value)  # which Python compares with large integers exactly
        is_kept = value.is_integer()
    elif isinstance(value, int) and dtype.kind == "i":  # unsigned ones are meant to overflow
        is_kept = True
    else:
        return
    is_kept = is_kept and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    frame: Any = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if is_kept or frame is None or (frame.f_code.co_filename, frame.f_lineno) in _lossy:
        return
    file, line = frame.f_code.co_filename, frame.f_lineno
    _lossy.add((file, line))
    source = linecache.getline(file, line, frame.f_globals).strip()
    _logger.warning(
        "%s:%d, in %s\n    %s\nstores %s as %s, which can't hold it: use another dtype, or "
        "int(...) if it is meant",
        file, line, frame.f_code.co_name, source, value, dtype,
    )  # fmt: skip


def interpretable(run_rows: Any, kernels: EnvKernels | None = None) -> Callable[..., Any]:
    """Return the loop over envs as plain Python, with all functions that it calls.

    It takes a `Batch` of plain arrays, the first row and the end of the rows. What the `step` of
    `kernels` returns is checked.
    """
    own_step = None if kernels is None else getattr(kernels.step, "py_func", kernels.step)
    name = "" if kernels is None else kernels.name

    def step_problem(_: str, result: Any, *args: Any) -> str | None:
        if _is_step_result(result):
            return None
        came = "None (this branch ends without `return`)"
        if result is not None:
            came = f"({', '.join(map(_kind, result))})"
        return (
            f"{name}: kernel step returns {came} here; expected a tuple (reward, terminated, "
            "truncated) of a number and two bools"
        )

    def remake(found: Any, copy: types.FunctionType) -> Any:
        if own_step is not None and getattr(found, "py_func", found) is own_step:
            return _checked(copy, own_step, step_problem)
        if (check := getattr(found, "check_in_trials", None)) is not None:
            return _checked(copy, *check, only_in_trials=True)
        return copy

    copies = Copies(remake, convert=_wide_constant, with_plain=True)
    loop = copies.copy(run_rows)

    def run(batch: Batch, start: int, stop: int) -> int:
        arrays = (
            value.view(WideArray) if isinstance(value, np.ndarray) else value for value in batch
        )
        with np.errstate(all="ignore"):  # compiled code does not warn
            try:
                return loop(Batch(*arrays), start, stop)
            except (TypeError, ValueError) as error:
                frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
                source = linecache.getline(frame.f_code.co_filename, line)
                if frame.f_code is loop.__code__ and "env_step(" in source:  # the unpacking
                    raise TypeError(
                        "step must return (reward, terminated, truncated), a number and two bools; "
                        f"{error}"
                    ) from error
                raise

    return run


def checked_in_trials(author: Any, problem: Callable[..., str | None]) -> Any:
    """Return a compiled function like one of a user's, whose results are checked in trials.

    There it raises KernelResultError if there is a problem, with the line of `author`.

    Args:
        author: Compiled function.
        problem: Called with the name of `author`, its result and its arguments; returns what is
            wrong, or None.
    """

    def call(*args):
        return author(*args)

    compiled: Any = njit(call)
    compiled.check_in_trials = (getattr(author, "py_func", author), problem)
    return compiled


def _checked(
    call: Callable[..., Any],
    author: types.FunctionType,
    problem: Callable[..., str | None],
    *,
    only_in_trials: bool = False,
) -> Callable[..., Any]:
    """Return a function that refuses its results where there is a problem.

    Raises:
        KernelResultError: What the problem is, with the line of `author` that returned it.
    """

    def checked(*args: Any) -> Any:
        if only_in_trials and not getattr(_here, "is_trial", False):
            return call(*args)
        records = [arg for arg in args[:3] if isinstance(arg, Record)]  # params do not change
        before = [record._void.copy() for record in records]
        result = call(*args)
        text = problem(author.__name__, result, *args)
        if text is None:
            return result
        for record, kept in zip(records, before, strict=True):
            for field in kept.dtype.names:
                record._void[field] = kept[field]
        file, line = author.__code__.co_filename, _returning_line(author.__code__, call, *args)
        source = linecache.getline(file, line, author.__globals__).strip()
        raise KernelResultError(
            f"{file}:{line}, in {author.__name__}\n    {source}\n{text}", file, line
        )

    return checked


def _kind(value: Any) -> str:
    return "array" if isinstance(value, np.ndarray) else type(value).__name__.lstrip("_").lower()


def _is_step_result(result: Any) -> bool:
    """Whether compiled code reads a result of `step` as it was meant, or refuses it itself."""
    if result is None:
        return False
    if not isinstance(result, tuple) or len(result) != 3:
        return True  # which can't be unpacked or compiled
    reward, *flags = (
        one[()] if isinstance(one, np.ndarray) and one.ndim == 0 else one for one in result
    )
    is_flag = [isinstance(one, bool | np.bool_) for one in flags]
    are_whole = all(isinstance(one, bool | np.bool_ | int | np.integer) for one in flags)
    if isinstance(reward, bool | np.bool_):
        return all(is_flag)
    return are_whole and isinstance(reward, int | float | np.number)


def _returning_line(code: types.CodeType, function: Callable[..., Any], *args: Any) -> int:
    """Call a function once more, and return the line at which this code in it returns."""
    lines = [code.co_firstlineno]

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is code:
            lines.append(frame.f_lineno)

    outer = sys.getprofile()
    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(outer)
    return lines[-1]


def _wide_constant(value: Any) -> Any:
    """Return a global, a closed-over value or an attribute of NumPy as compiled code sees it."""
    if value is np:
        return _NUMPY
    if value is np.ndenumerate:
        return lambda array: ((index, array[index]) for index, _ in np.ndenumerate(array))
    if isinstance(value, type):
        return _WIDE_TYPES.get(value, value)
    is_function = callable(value) and (getattr(value, "__module__", "") or "numpy") == "numpy"
    return _with_wide_results(value) if is_function else _wide(value)


class _WideNumpy(types.ModuleType):
    """NumPy as compiled code sees it."""

    def __getattr__(self, name: str) -> Any:
        found = _wide_constant(getattr(np, name))
        setattr(self, name, found)
        return found


def _wide_type(narrow: type[np.integer]) -> type:
    """Return a dtype like an integer type; called, it converts to that, but returns a wide one."""
    bounds = np.iinfo(narrow)

    def make(_: type, value: Any = 0) -> int:
        wrapped = (int(value) - bounds.min) % (bounds.max - bounds.min + 1)
        return int(wrapped + bounds.min)

    return type(narrow.__name__, (narrow,), {"__new__": make})


def _with_wide_results(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: _wide(function(*args, **options))


_NUMPY = _WideNumpy("numpy")
_WIDE_TYPES = {
    narrow: _wide_type(narrow)
    for narrow in (np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32)
}


def calls_users_code(run_rows: Any) -> bool:
    """Whether the loop over envs calls any function that does not belong to this package."""
    packages = {"vecenv", *FIXED_PACKAGES}
    found: list[str] = []

    def note(_: Any, copy: types.FunctionType) -> types.FunctionType:
        found.append((copy.__module__ or "").split(".")[0])
        return copy

    Copies(note, with_plain=True).copy(run_rows)
    return not packages.issuperset(found)


def try_out(
    kernels: EnvKernels,
    loop: Callable[..., Any],
    params: np.ndarray | None,
    max_episode_steps: int,
    seconds: float | None = None,
) -> int:
    """Run one separate env for a few steps in Python, to find mistakes that compiled code hides.

    These are indices out of range, wrong results of `step`, and memory that is left unwritten.

    Kernels that Python or NumPy can't run, or not in half a second, are left to the compiler.

    Args:
        kernels: The kind of env.
        loop: Its loop, from `interpretable`.
        params: (1,) parameter record, which is copied, or None.
        max_episode_steps: Limit of an episode; NO_LIMIT for none.
        seconds: Play `NUM_EPISODES` whole episodes, for at most so long, instead of a few steps.

    Returns:
        How many episodes have ended.

    Raises:
        KernelIndexError: An index is out of range; names file and line.
        KernelResultError: `step` returns something wrong, or a kernel leaves something unwritten.
    """

    def play(trial: Trial, *, wraps: bool = False, tells: bool = False) -> Trial:
        copied = None if params is None else params.copy()
        trial.seconds = seconds
        trial.error = _failure(
            kernels, loop, copied, max_episode_steps, trial, wraps=wraps, tells=tells
        )
        return trial

    clean = play(Trial(), tells=True)  # others begin with foreign numbers in memory
    error = clean.error
    if isinstance(error, KernelResultError):
        raise error from None
    if error is None and seconds is None:
        find_leftovers(kernels, clean, play)
    if not _is_index_error(error):
        if error is not None:
            _logger.debug("%s: the trial in Python ended early: %r", kernels.name, error)
        return clean.num_episodes
    # Integers of Python do not overflow; a kernel that hashes means them to. That is found out only
    # now, as it is slow.
    again = play(Trial(), wraps=True).error
    if again is None:
        _logger.debug("%s: with integers of 64 bits, there is no %r", kernels.name, error)
        return clean.num_episodes
    _raise_index_error(kernels, again if _is_index_error(again) else error)


def _is_index_error(error: BaseException | None) -> TypeGuard[IndexError]:
    return isinstance(error, IndexError) and "out of" in str(error)


def _failure(
    kernels: EnvKernels,
    loop: Callable[..., Any],
    params: np.ndarray | None,
    max_episode_steps: int,
    trial: Trial,
    *,
    wraps: bool = False,
    tells: bool = False,
) -> BaseException | None:
    """Run an env in a thread that can be stopped; return what it raised."""
    failures: list[BaseException] = []

    def run() -> None:
        _here.wraps, _here.is_trial, _here.tells = wraps, True, tells
        try:
            _take_steps(kernels, loop, params, max_episode_steps, trial)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="vecenv-jit-trial", daemon=True)
    try:
        thread.start()
        thread.join(_LIMIT_SECONDS if trial.seconds is None else trial.seconds + _LIMIT_SECONDS)
    finally:  # also after Ctrl-C
        for seconds in _STOP_SECONDS:
            if thread.is_alive():
                failures.append(TimeoutError("stopped"))
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(TimeoutError)
                )
                thread.join(seconds)
    return failures[0] if failures else None


def _take_steps(
    kernels: EnvKernels,
    loop: Callable[..., Any],
    params: np.ndarray | None,
    max_episode_steps: int,
    trial: Trial,
) -> None:
    """Reset an env and step it with random actions that its mask allows, or with those given."""
    rng = np.random.default_rng(0)
    batch = _batch_of_one(kernels, params, max_episode_steps)
    given = None if params is None or kernels.sampler is not None else params.tobytes()
    batch.runs["key"] = rng.integers(2**63)
    trial.begin(batch)
    end = time.perf_counter() + (_TRIAL_SECONDS if trial.seconds is None else trial.seconds)
    trial.prepare(batch)
    loop(batch, 0, 1)
    trial.note_reset(batch)
    trial.note(batch)
    repeats = trial.repeats
    num_steps = _NUM_STEPS if trial.seconds is None else sys.maxsize
    for step in range(num_steps if repeats is None else len(repeats)):
        if repeats is None and step >= _MIN_STEPS and time.perf_counter() > end:
            return
        trial.num_episodes = int(batch.runs["num_episodes"][0])
        if trial.num_episodes >= NUM_EPISODES and trial.seconds is not None:
            return
        if kernels.action_mask is not None:
            trial.prepare(batch)
            loop(batch._replace(op=MASK), 0, 1)
            trial.results[-1]["masks"] = batch.masks.copy()
        if repeats is not None:
            batch.actions[0] = repeats[step]
        elif kernels.action_mask is not None:
            batch.actions[0] = sample_actions(kernels.action_space, batch.masks, rng)[0]
        else:
            batch.actions[0] = _sample(kernels.action_space, rng)
        trial.actions.append(batch.actions[0].copy())
        trial.prepare(batch)
        loop(batch._replace(op=STEP), 0, 1)
        trial.note(batch)
        if given is not None and params is not None and params.tobytes() != given:
            _refuse_written(kernels)


def _refuse_written(kernels: EnvKernels) -> NoReturn:
    """Refuse kernels that write parameters, which envs may share."""
    code = getattr(kernels.step, "py_func", kernels.step).__code__
    raise KernelResultError(
        f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}\n{kernels.name}: a kernel "
        "writes `params`, which only a sampler may, as envs share them: keep what changes during "
        "an episode in the state",
        code.co_filename,
        code.co_firstlineno,
    )


def _batch_of_one(kernels: EnvKernels, params: np.ndarray | None, max_episode_steps: int) -> Batch:
    """Return the job of resetting one env, with all its arrays."""
    space, obs_space = kernels.action_space, kernels.observation_space
    obs_shape = obs_space.shape or ()
    num_masked = 0 if kernels.action_mask is None else mask_width(space)
    return Batch(
        op=RESET,
        autoreset_mode=NEXT_STEP,
        max_episode_steps=max_episode_steps,
        states=aligned_zeros((1,), kernels.state_dtype),
        runs=aligned_zeros((1,), RUN_DTYPE),
        params=params,
        env_ids=np.zeros(0, np.int64),
        actions=np.zeros((1, *(space.shape or ())), space.dtype),
        obs=np.zeros((1, *obs_shape), obs_space.dtype),
        rewards32=np.zeros(0, np.float32),
        rewards64=np.zeros(1),
        terminations=np.zeros(1, np.bool_),
        truncations=np.zeros(1, np.bool_),
        final_obs=np.zeros((0, *obs_shape), obs_space.dtype),
        masks=np.ones((1, num_masked), np.bool_),
    )


def _sample(space: Any, rng: np.random.Generator) -> Any:
    """Draw an action; the space's own stream of random numbers is left alone."""
    if isinstance(space, Discrete):
        return space.start + rng.integers(space.n)
    if np.dtype(space.dtype).kind == "f":
        low, high = (np.clip(bound, -1e3, 1e3) for bound in (space.low, space.high))
        return rng.uniform(low, high)
    if hasattr(space, "nvec"):
        return space.start + rng.integers(space.nvec)
    if hasattr(space, "low"):
        low, high = (np.clip(bound.astype(float), -1e6, 1e6) for bound in (space.low, space.high))
        return rng.integers(low.astype(np.int64), high.astype(np.int64), endpoint=True)
    return rng.integers(0, 2, space.shape)


def _raise_index_error(kernels: EnvKernels, error: IndexError) -> NoReturn:
    """Raise KernelIndexError with file, line and values of the index."""
    inside = traceback.walk_tb(error.__traceback__)
    frame, line = [(f, n) for f, n in inside if f.f_code.co_filename != __file__][-1]
    code = frame.f_code
    source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    names = set(re.findall(r"[^\W\d]\w*", source))
    numbers = [
        f"{name} = {value}"
        for name, value in frame.f_locals.items()
        if name in names and isinstance(value, int | np.integer)
    ]
    raise KernelIndexError(
        f"{code.co_filename}:{line}, in {code.co_name}\n"
        f"    {source}\n"
        f"{kernels.name}: {error}{', with ' if numbers else ''}{', '.join(numbers)}. Compiled code "
        "would read or write foreign memory there.\nFound by stepping an env in Python. (dry_run="
        "False leaves that out where an env is made, debug=True runs everything in Python.)",
        code.co_filename,
        line,
    ) from None
