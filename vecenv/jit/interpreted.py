"""Kernels as plain Python: for debugging, and for trials before compiled code is called.

Compiled code does not check indices, so a wrong one reads or writes other memory; NumPy checks
them. Compiled integers of less than 64 bits are widened in every operation, NumPy's are not. So
kernels get their records and arrays as `Record` and `WideArray`, which return wide numbers,
constants as wide numbers, and NumPy with functions that return wide numbers.

Trials find indices out of range, wrong results of `step`, and memory that kernels leave unwritten:
the loop clears no memory, so `reset` must set every field and `observe` every entry of `out`. A
trial is played again with other numbers in that memory: results that differ come from memory that
was left unwritten.
"""

from __future__ import annotations

import copy
import functools
import linecache
import logging
import re
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numba import njit

from vecenv.core.compiling import Copies
from vecenv.core.masks import sample_actions
from vecenv.jit.driver import MASK, RESET, STEP, Batch
from vecenv.jit.errors import KernelIndexError, KernelResultError, Place, reads
from vecenv.jit.games import COLUMNS, GameLayout
from vecenv.jit.kernels import EnvKernels, empty_batch

_logger = logging.getLogger("vecenv")
_NUM_STEPS = 64  # steps of a dry run
_MIN_STEPS = 8
NUM_EPISODES = 3  # whole episodes to play
_TRIAL_SECONDS = 0.02  # a dry run with enough steps ends after this time
_LIMIT_SECONDS = 2.0  # any dry run is stopped after this time
_MOST = 12345  # fills memory, where the type has room; few loops are that long
_SHOWN = {
    "obs": "the observation",
    "masks": "the action mask",
    "rewards64": "the reward",
    "terminations": "the termination",
    "truncations": "the truncation",
}
_KERNELS = {"obs": "observe", "masks": "action_mask"}  # kernels that write these
_FOUND = (
    "Found by stepping an env in Python before the first compiled call, on memory filled "
    "differently; dry_run=False leaves that out."
)


# When the trial under way in this thread must end; 0.0 outside of trials. In trials, results are
# checked by `checked_in_trials`, and reads after the end raise TimeoutError.
_end: ContextVar[float] = ContextVar("end", default=0.0)


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
    if (end := _end.get()) and time.perf_counter() > end:
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
            return lambda *args: (checked if _end.get() else copy)(*args)  # noqa: PLW0108  # asked anew
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
            for name in kept.dtype.names:
                record._void[name] = kept[name]
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


# -- trials ------------------------------------------------------------------------------------


@dataclass
class _Trial:
    """What came of a trial of an env."""

    actions: list[np.ndarray] = field(default_factory=list)
    # Step (0 is the reset), name and value of each output.
    results: list[tuple[int, str, np.ndarray]] = field(default_factory=list)
    error: Exception | None = None  # ended the trial early
    num_episodes: int = 0  # that ended


def try_out(
    kernels: EnvKernels,
    loop: Callable[..., Any],
    params: np.ndarray | None,
    max_episode_steps: int,
    seconds: float | None = None,
) -> int:
    """Run one separate env for a few steps in Python, to find mistakes that compiled code hides.

    Kernels that fail in Python or NumPy are left to the compiler, and so are those that take over
    two seconds, with a warning. The loop is from `interpretable`; `params`, (1,) or None, are
    copied. If `seconds` is given, `NUM_EPISODES` whole episodes are played, for at most this long.

    Returns:
        The number of episodes that ended.

    Raises:
        KernelIndexError: An index is out of range; the message names file and line.
        KernelResultError: `step` returns something wrong, or a kernel leaves something unwritten.
    """
    play = functools.partial(_play, kernels, loop, params, max_episode_steps, seconds)
    clean = play()  # the others start with foreign numbers in memory
    error = clean.error
    if isinstance(error, KernelResultError):
        raise error from None
    if error is None and seconds is None:
        _find_leftovers(kernels, clean, play)
    if isinstance(error, IndexError) and "out of" in str(error):
        _raise_index_error(kernels, error)
    if isinstance(error, TimeoutError) and seconds is None:
        _logger.warning(
            "%s: a trial in Python was stopped after %g s; it was at %s\nIf the first compiled "
            "call does not return, look for a loop without an end there.",
            *(kernels.name, _LIMIT_SECONDS, _place_inside(error)[1]),
        )
    if error is not None:
        _logger.debug("%s: the trial in Python ended early: %r", kernels.name, error)
    return clean.num_episodes


def _play(
    kernels: EnvKernels,
    loop: Callable[..., Any],
    params: np.ndarray | None,
    limit: int,
    seconds: float | None,
    fields: Sequence[str] = (),
    repeats: list[np.ndarray] | None = None,
    *,
    fills_out: bool = False,
) -> _Trial:
    """Reset an env and step it with random actions that its mask allows, or with `repeats`.

    See `try_out`; if `seconds` is given, no results are noted. The fields are filled before the
    reset, others are zero; with `fills_out` `out` is filled before each call, else it is zero, and
    a mask True.
    """
    trial, space, rng = _Trial(), copy.deepcopy(kernels.action_space), np.random.default_rng(0)
    space.seed(0)
    batch = empty_batch(kernels, 1)._replace(
        max_episode_steps=limit, params=None if params is None else params.copy()
    )
    given = None if params is None or kernels.sampler else batch.params.tobytes()
    batch.runs["key"] = rng.integers(2**63)
    for name in fields:
        _fill(batch.states[name])

    def call(op: int, step: int) -> None:
        """Do one job on memory that it has to fill; note what it has written."""
        batch.obs[...] = 0
        if fills_out:
            _fill(batch.obs)
        batch.masks[...] = not fills_out
        loop(batch._replace(op=op), 0, 1)
        names = ("masks",) if op == MASK else [name for name in _SHOWN if name != "masks"]
        trial.results += [(step, name, getattr(batch, name)[0].copy()) for name in names]

    _end.set(time.perf_counter() + _LIMIT_SECONDS + (seconds or 0.0))
    try:
        call(RESET, 0)
        end = time.perf_counter() + (_TRIAL_SECONDS if seconds is None else seconds)
        num_steps = _NUM_STEPS if seconds is None else sys.maxsize
        for step in range(1, 1 + (num_steps if repeats is None else len(repeats))):
            if repeats is None and step > _MIN_STEPS and time.perf_counter() > end:
                break
            trial.num_episodes = int(batch.runs["num_episodes"][0])
            if seconds is not None:
                trial.results.clear()
                trial.actions.clear()
                if trial.num_episodes >= NUM_EPISODES:
                    break
            if kernels.action_mask is not None:
                call(MASK, step)
            if repeats is not None:
                batch.actions[0] = repeats[step - 1]
            elif kernels.action_mask is not None:
                batch.actions[0] = sample_actions(space, batch.masks, rng)[0]
            else:
                batch.actions[0] = space.sample()
            trial.actions.append(batch.actions[0].copy())
            call(STEP, step)
            if given is not None and batch.params.tobytes() != given:
                raise KernelResultError.at(
                    Place.of(_author(kernels.step)),
                    f"{kernels.name}: a kernel writes `params`, which only a sampler may, as envs "
                    "share them: keep what changes during an episode in the state",
                )
    except Exception as error:
        trial.error = error
    finally:
        _end.set(0.0)
    return trial


def _place_inside(error: Exception) -> tuple[types.FrameType, Place]:
    """Return the innermost frame of a kernel, and its line, when an error was raised."""
    inside = traceback.walk_tb(error.__traceback__)
    frame, line = [(f, n) for f, n in inside if f.f_code.co_filename != __file__][-1]
    return frame, Place(frame.f_code.co_filename, line, frame.f_code.co_name)


def _raise_index_error(kernels: EnvKernels, error: IndexError) -> None:
    """Raise KernelIndexError with file, line and values of the index.

    Not if a number has more than 64 bits: compiled integers overflow, which hashes rely on.
    """
    frame, place = _place_inside(error)
    names = set(re.findall(r"[^\W\d]\w*", linecache.getline(place.filename, place.lineno)))
    numbers = [
        f"{name} = {value}"
        for name, value in frame.f_locals.items()
        if name in names and isinstance(value, int | np.integer)
    ]
    if any(isinstance(one, int) and abs(one) >= 2**63 for one in frame.f_locals.values()):
        return
    raise KernelIndexError.at(
        place,
        f"{kernels.name}: {error}{', with ' if numbers else ''}{', '.join(numbers)}. Compiled code "
        "would read or write foreign memory there.\nFound by stepping an env in Python. (dry_run="
        "False leaves that out where an env is made, debug=True runs everything in Python.)",
    ) from None


# -- memory that is left unwritten -------------------------------------------------------------


class _Difference(NamedTuple):
    step: int  # 0 for the reset
    name: str  # key of `_SHOWN`; "" if an error was raised
    first: tuple[int, ...] = ()  # index of the first element that differs

    @property
    def moment(self) -> str:
        return f"step {self.step}" if self.step else "the reset"

    def __str__(self) -> str:
        return f"{_SHOWN[self.name]} of {self.moment}" if self.name else "what follows"


def _find_leftovers(kernels: EnvKernels, clean: _Trial, play: Callable[..., _Trial]) -> None:
    """Play a trial again on memory that is filled differently; refuse memory left unwritten.

    A field is refused only if results depend on its old content. Kernels of this package are not
    checked.
    """
    own = [kernels.reset, kernels.observe, kernels.action_mask]
    given = [list(one.values()) if isinstance(one, Mapping) else [one] for one in own]
    authors = [_author(one) for part in given for one in part if one is not None]
    if all((one.__module__ or "").startswith("vecenv.") for one in authors):
        return

    def found(*fields: str, fills_out: bool) -> _Difference | None:
        return _difference(play(fields, clean.actions, fills_out=fills_out), clean)

    columns = COLUMNS if kernels.groups is not None else ()
    fields = [name for name in kernels.state_dtype.names if name not in columns]
    if found(*fields, fills_out=True) is None:
        return
    if (other := found(fills_out=False)) is not None:
        _refuse(
            kernels,
            _writer(kernels, _KERNELS.get(other.name, "step"), other.first)[0],
            f"{other} differs when the same seed and actions are played again: a kernel reads "
            "something besides its arguments, such as a clock, or a global that changes",
        )
    if (other := found(fills_out=True)) is not None:
        _refuse_out(kernels, other)
    for name in fields:
        if (other := found(name, fills_out=False)) is not None:
            part = "all of " if kernels.state_dtype[name].shape else ""
            _refuse(
                kernels,
                _author(kernels.reset),
                f"kernel reset does not set {part}state.{name}, and {other} depends on it: it "
                "would be what the last episode left there. Set every field in `reset`",
            )


def _author(kernel: Any) -> types.FunctionType:
    return getattr(kernel, "py_func", kernel)


def _fill(array: np.ndarray) -> None:
    """Fill with a number that `reset` is unlikely to set."""
    if array.dtype.names:
        for name in array.dtype.names:
            _fill(array[name])
    elif array.dtype.kind in "iu":
        array[...] = min(np.iinfo(array.dtype).max - 7, _MOST)
    else:
        array[...] = True if array.dtype.kind == "b" else _MOST + 0.5


def _difference(trial: _Trial, clean: _Trial) -> _Difference | None:
    """Return the first difference between a trial and the clean one."""
    for (step, name, one), (_, _, other) in zip(trial.results, clean.results, strict=False):
        places = np.argwhere((one != other) & ((one == one) | (other == other)))
        if len(places):
            return _Difference(step, name, tuple(map(int, places[0])))
    if trial.error is None or isinstance(trial.error, TimeoutError):  # this proves nothing
        return None
    return _Difference(len(trial.actions), "")


def _refuse_out(kernels: EnvKernels, found: _Difference) -> None:
    """Refuse a kernel that leaves entries of `out` unwritten."""
    name = _KERNELS.get(found.name, "observe")
    function, index = _writer(kernels, name, found.first)
    out = function.__code__.co_varnames[1 if kernels.groups is None else 2]
    line, hint, last = None, "", None
    for one in reads(function):
        if one.operation.startswith("STORE_FAST"):  # some store two names, or also load
            names = one.name if isinstance(one.name, tuple) else (one.name,)
            if out in names[: 1 if "LOAD" in one.operation else 2]:
                hint = f"; this line makes {out} another array: assign to {out}[:]"
        returns_none = last is not None and (last.operation, last.name) == ("LOAD_CONST", None)
        if one.operation == "RETURN_VALUE" and not returns_none:
            hint = f"; what it returns is not read: write it into {out}"
        if hint:
            line = one.line
            break
        last = one
    _refuse(
        kernels,
        function,
        f"kernel {name} leaves {out}{list(index or (0,))} as it was before, or reads it, after "
        f"{found.moment}{hint}. `{out}` holds anything before: write all of it",
        line,
    )


def _refuse(
    kernels: EnvKernels, function: types.FunctionType, text: str, line: int | None = None
) -> NoReturn:
    place = Place.of(function, line)
    raise KernelResultError.at(place, f"{kernels.name}: {text}.\n{_FOUND}") from None


def _writer(
    kernels: EnvKernels, name: str, index: Any
) -> tuple[types.FunctionType, tuple[int, ...]]:
    """Return the author's function that writes an entry, and the entry's index in its `out`."""
    function: Any = getattr(kernels, name)
    if kernels.groups is None or not index:
        return _author(function), index
    for group, part in GameLayout.of(kernels.groups).groups.items():
        whole, inner = part.masks, (part.mask_width,)
        if name == "observe":
            whole, inner = part.obs, part.obs_shape
        place = index[0]  # in an array for all groups, which is flat
        if len(index) > 1:  # of the only group
            place = int(np.ravel_multi_index(index, (len(part.agents), *inner)))
        if whole.start <= place < whole.stop:
            shape = inner or (1,)
            found = np.unravel_index((place - whole.start) % int(np.prod(shape)), shape)
            index = tuple(map(int, found))
            function = function[group] if isinstance(function, Mapping) else function
            break
    return _author(function), index
