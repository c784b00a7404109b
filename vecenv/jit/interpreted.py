"""Kernels as plain Python: for debugging, and for trials that find indices out of range.

Compiled code does not check indices, so a wrong one reads or writes other memory; NumPy checks
them. Compiled integers of less than 64 bits are widened in every operation, NumPy's are not. So
kernels get their records and arrays as `Record` and `WideArray`, which return wide numbers,
constants as wide numbers, and NumPy with functions that return wide numbers.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba import njit

from vecenv.core.compiling import Copies
from vecenv.jit.episodes import Batch
from vecenv.jit.errors import KernelResultError, Place
from vecenv.jit.kernels import EnvKernels

__all__ = ["WideArray", "checked_in_trials", "interpretable", "trial"]


class _Here(threading.local):
    """How kernels run in this thread: `end` is when a trial must end, 0.0 outside of trials."""

    end = 0.0


_here = _Here()


@contextlib.contextmanager
def trial(seconds: float) -> Iterator[None]:
    """Let `checked_in_trials` check results, and reads raise TimeoutError after some seconds."""
    _here.end = time.perf_counter() + seconds
    try:
        yield
    finally:
        _here.end = 0.0


def _widened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose results are another one's as compiled code sees them."""
    return lambda *args, **options: _wide(function(*args, **options))


class WideArray(np.ndarray):
    """View of an array whose elements are as in compiled code: wide numbers, records."""

    def __getitem__(self, key: Any) -> Any:
        return _wide(super().__getitem__(key))

    def __setitem__(self, key: Any, value: Any) -> None:
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

    max = _widened(np.ndarray.max)
    min = _widened(np.ndarray.min)


class Record:
    """Reference to a record whose fields are as in compiled code."""

    __slots__ = ("_void",)

    def __init__(self, void: np.void) -> None:
        object.__setattr__(self, "_void", void)

    def __getattr__(self, name: str) -> Any:
        return _wide(self._void[self._checked(name)])

    def __setattr__(self, name: str, value: Any) -> None:
        dtype = self._void.dtype[self._checked(name)]
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
    if _here.end and time.perf_counter() > _here.end:
        raise TimeoutError("the trial was stopped")
    if isinstance(value, np.ndarray):
        return value.view(WideArray)
    if isinstance(value, np.void):
        return Record(value)
    if isinstance(value, np.floating):
        return np.float64(value)
    if isinstance(value, np.bool_):
        return value.item()
    if isinstance(value, np.integer) and value.itemsize < 8:
        return value.item()  # a Python int goes with int64 and with uint64, as narrow ones do
    return value


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


def interpretable(run_rows: Any, kernels: EnvKernels | None = None) -> Callable[..., Any]:
    """Return the loop over envs as plain Python, with all functions that it calls.

    It takes a `Batch` of plain arrays, the first row and the end of the rows. Results of the `step`
    of `kernels` are checked.
    """
    own_step = None if kernels is None else getattr(kernels.step, "py_func", kernels.step)

    def step_problem(_: str, result: Any, *args: Any) -> str | None:
        if _is_step_result(result):
            return None
        came = "None (this branch ends without `return`)" if result is None else _kind(result)
        if isinstance(result, tuple):
            came = f"({', '.join(map(_kind, result))})"
            if len(result) == 5:
                came = (
                    "five values, as a step of Gymnasium does; `observe` writes the observation, "
                    "and there are no infos,"
                )
        return (
            f"{'' if kernels is None else kernels.name}: kernel step returns {came} here; expected "
            "a tuple (reward, terminated, truncated) of a number and two bools"
        )

    def remake(found: Any, copy: types.FunctionType) -> Any:
        if own_step is not None and getattr(found, "py_func", found) is own_step:
            return _checked(copy, own_step, step_problem)
        if (check := getattr(found, "check_in_trials", None)) is not None:
            checked = _checked(copy, *check)
            return lambda *args: (checked if _here.end else copy)(*args)  # noqa: PLW0108  # asked anew
        return copy

    loop = Copies(remake, convert=_wide_constant, with_plain=True).copy(run_rows)

    def run(batch: Batch, start: int, stop: int) -> int:
        arrays = (
            value.view(WideArray) if isinstance(value, np.ndarray) else value for value in batch
        )
        with np.errstate(all="ignore"):  # compiled code does not warn
            return loop(Batch(*arrays), start, stop)

    return run


def checked_in_trials(author: Any, problem: Callable[..., str | None]) -> Any:
    """Return a compiled function equal to a user's, whose results are checked in trials.

    In a trial it raises KernelResultError if there is a problem, with the line of `author`.

    Args:
        author: Compiled function.
        problem: Called with the name of `author`, its result and its arguments; returns a
            description of the problem, or None.
    """

    def call(*args):
        return author(*args)

    compiled: Any = njit(call)
    compiled.check_in_trials = (getattr(author, "py_func", author), problem)
    return compiled


def _checked(
    call: Callable[..., Any], author: types.FunctionType, problem: Callable[..., str | None]
) -> Callable[..., Any]:
    """Return a function that raises KernelResultError for results with a problem.

    To find the line that returned such a result, it calls `author` again under a profile.
    """

    def checked(*args: Any) -> Any:
        records = [arg for arg in args[:3] if isinstance(arg, Record)]  # parameters do not change
        before = [record._void.copy() for record in records]
        result = call(*args)
        text = problem(author.__name__, result, *args)
        if text is None:
            return result
        for record, kept in zip(records, before, strict=True):
            for field in kept.dtype.names:
                record._void[field] = kept[field]
        lines = [author.__code__.co_firstlineno]

        def note(frame: types.FrameType, event: str, _: Any) -> None:
            if event == "return" and frame.f_code is author.__code__:
                lines.append(frame.f_lineno)

        outer = sys.getprofile()
        sys.setprofile(note)
        try:
            call(*args)
        finally:
            sys.setprofile(outer)
        raise KernelResultError.at(Place.of(author, lines[-1]), text)

    return checked


def _kind(value: Any) -> str:
    return "array" if isinstance(value, np.ndarray) else type(value).__name__.lstrip("_").lower()


def _is_step_result(result: Any) -> bool:
    """Return whether compiled code reads a result of `step` as the author meant it."""
    if not isinstance(result, tuple) or len(result) != 3:
        return False
    reward, *flags = (
        one[()] if isinstance(one, np.ndarray) and one.ndim == 0 else one for one in result
    )
    is_flag = [isinstance(one, bool | np.bool_) for one in flags]
    are_whole = all(isinstance(one, bool | np.bool_ | int | np.integer) for one in flags)
    if isinstance(reward, bool | np.bool_):
        return all(is_flag)
    return are_whole and isinstance(reward, int | float | np.number)


def _wide_constant(value: Any) -> Any:
    """Return a global, a closed-over value or an attribute of NumPy as compiled code sees it."""
    if value is np:
        return _NUMPY
    if value is np.ndenumerate:
        return lambda array: ((index, array[index]) for index, _ in np.ndenumerate(array))
    if isinstance(value, type):
        return _WIDE_TYPES.get(value, value)
    is_function = callable(value) and (getattr(value, "__module__", "") or "numpy") == "numpy"
    return _widened(value) if is_function else _wide(value)


class _WideNumpy(types.ModuleType):
    """NumPy as compiled code sees it."""

    def __getattr__(self, name: str) -> Any:
        found = _wide_constant(getattr(np, name))
        setattr(self, name, found)
        return found


def _wide_type(narrow: type[np.integer]) -> type:
    """Return a stand-in for an integer type: called, it converts but returns a wide number."""
    bounds = np.iinfo(narrow)

    def make(_: type, value: Any = 0) -> int:
        wrapped = (int(value) - bounds.min) % (bounds.max - bounds.min + 1)
        return int(wrapped + bounds.min)

    return type(narrow.__name__, (narrow,), {"__new__": make})


_NUMPY = _WideNumpy("numpy")
_WIDE_TYPES = {
    narrow: _wide_type(narrow)
    for narrow in (np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32)
}
