"""Memory that kernels leave unwritten, found by runs that differ in what was in it before.

`reset` must set every field and `observe` every entry of `out`: the loop clears neither. A trial of
an env is played again with other numbers in that memory. Whatever comes out differently was left
unwritten.
"""

from __future__ import annotations

import dis
import linecache
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vecenv.jit.episodes import Batch
from vecenv.jit.failures import KernelResultError
from vecenv.jit.games import COLUMNS, GameLayout
from vecenv.jit.kernels import EnvKernels

__all__ = ["Trial", "find_leftovers"]

_MOST = 12345  # what memory is filled with, in types that have room for it; few loops are that long
_SHOWN = {
    "obs": "the observation",
    "masks": "the action mask",
    "rewards": "the reward",
    "terminations": "the termination",
    "truncations": "the truncation",
}
_FOUND = (
    "Found by stepping an env in Python before the first compiled call, on memory filled "
    "differently; dry_run=False leaves that out."
)


@dataclass
class Trial:
    """What a trial of an env begins with, and what came of it.

    Attributes:
        fields: Fields of the state record that are filled before the first reset; others are zero.
        fills_out: Whether `out` is filled before each call; else it is zero, a mask True.
        repeats: Actions to take; None to draw them.
        actions: Those taken.
        results: What came out by name, arrays, of the reset and of each step.
        unset: Fields that the first reset left as they were filled, with the first such element.
        error: What ended it early, or None.
        seconds: How long whole episodes are played; None for a few steps. Then nothing is noted.
        num_episodes: How many have ended.
    """

    fields: Sequence[str] = ()
    fills_out: bool = False
    repeats: list[np.ndarray] | None = None
    actions: list[np.ndarray] = field(default_factory=list)
    results: list[dict[str, np.ndarray]] = field(default_factory=list)
    unset: dict[str, str] | None = None
    error: BaseException | None = None
    seconds: float | None = None
    num_episodes: int = 0

    def prepare(self, batch: Batch) -> None:
        """Fill what the next call has to write."""
        _fill(batch.obs, 1 if self.fills_out else 0)
        batch.masks[...] = not self.fills_out

    def begin(self, batch: Batch) -> None:
        """Fill the state record."""
        for name in self.fields:
            _fill(batch.states[name], 1)

    def note_reset(self, batch: Batch) -> None:
        """Note which fields the first reset has left."""
        places = ((name, _untouched(batch.states[0][name], name)) for name in self.fields)
        self.unset = {name: place for name, place in places if place is not None}

    def note(self, batch: Batch) -> None:
        """Note what a reset or a step has written; masks are noted after it."""
        if self.seconds is not None:
            self.results = [{}]
            self.actions.clear()
            return
        found = {
            "obs": batch.obs,
            "rewards": batch.rewards64,
            "terminations": batch.terminations,
            "truncations": batch.truncations,
        }
        self.results.append({name: array.copy() for name, array in found.items()})


class _Difference(NamedTuple):
    step: int  # 0: the reset
    name: str  # in `_SHOWN`, or "" if an error was raised
    first: tuple[int, ...]  # index of the first that differs
    num: int  # that differ
    size: int


def find_leftovers(kernels: EnvKernels, clean: Trial, play: Callable[[Trial], Trial]) -> None:
    """Play a trial again on memory that is filled differently; refuse what it leaves unwritten.

    A field is refused only if what comes out depends on what was in it. Kernels of this package are
    not looked at.

    Args:
        kernels: The kind of env.
        clean: A trial that began with zeros.
        play: Plays another one.

    Raises:
        KernelResultError: A kernel leaves something unwritten; names it, the file and the line.
    """
    own = [_functions(kernels, name) for name in ("reset", "observe", "action_mask")]
    if all((one.__module__ or "").startswith("vecenv.") for functions in own for one in functions):
        return
    columns = COLUMNS if kernels.groups is not None else ()
    fields = [name for name in kernels.state_dtype.names if name not in columns]
    both = play(Trial(fields, True, clean.actions))
    if _difference(both, clean) is None:
        return
    found = _difference(play(Trial((), False, clean.actions)), clean)
    if found is not None:
        _refuse_other_sources(kernels, found)
    found = _difference(play(Trial((), True, clean.actions)), clean)
    if found is not None:
        _refuse_out(kernels, found)
    unset = both.unset
    if unset is None:  # the reset did not come to its end: it may have left any field
        unset = dict(zip(fields, fields, strict=True))
    for name, place in unset.items():
        found = _difference(play(Trial([name], False, clean.actions)), clean)
        if found is not None:
            _refuse_reset(kernels, place, found)


def _functions(kernels: EnvKernels, name: str) -> list[types.FunctionType]:
    """Return the author's functions of this name, one or one for each group."""
    given = getattr(kernels, name)
    several = list(given.values()) if isinstance(given, Mapping) else [given]
    return [getattr(one, "py_func", one) for one in several if one is not None]


def _fill(array: np.ndarray, value: int) -> None:
    """Fill with a number that `reset` hardly sets, if `value` is not 0."""
    if array.dtype.names:
        for name in array.dtype.names:
            _fill(array[name], value)
    elif value and array.dtype.kind in "iu":
        array[...] = min(np.iinfo(array.dtype).max - 7, _MOST)
    else:
        array[...] = value and (True if array.dtype.kind == "b" else _MOST + 0.5)


def _untouched(found: Any, path: str) -> str | None:
    """Return the path of the first element that is still what it was filled with, or None."""
    names = found.dtype.names
    array = np.asarray(found)
    if names:
        for index in np.ndindex(array.shape):
            for name in names:
                place = _untouched(array[index][name], f"{path}{_text(index)}.{name}")
                if place is not None:
                    return place
        return None
    filled = np.empty_like(array)
    _fill(filled, 1)
    places = np.argwhere(array == filled)
    return path + _text(tuple(places[0])) if len(places) else None


def _difference(trial: Trial, clean: Trial) -> _Difference | None:
    """Return where a trial first went otherwise than the clean one."""
    for step, (came, expected) in enumerate(zip(trial.results, clean.results, strict=False)):
        for name in _SHOWN:
            if name in came and came[name].tobytes() != expected[name].tobytes():
                one, other = came[name][0], expected[name][0]
                places = np.argwhere((one != other) & ((one == one) | (other == other)))
                if len(places):
                    index = tuple(map(int, places[0]))
                    return _Difference(step, name, index, len(places), int(np.size(one)))
    if trial.error is None or isinstance(trial.error, TimeoutError):  # it has proved nothing
        return None
    return _Difference(len(trial.results), "", (), 1, 1)


def _refuse_other_sources(kernels: EnvKernels, found: _Difference) -> None:
    """Refuse kernels that give other results for equal memory, seeds and actions."""
    name = {"obs": "observe", "masks": "action_mask"}.get(found.name, "step")
    function, _ = _writer(kernels, name, found.first)
    what = _SHOWN.get(found.name, "what follows")
    _raise(
        kernels,
        function,
        function.__code__.co_firstlineno,
        f"{what} of {_moment(found.step)} differs when the same seed and actions are played again: "
        "a kernel reads something besides its arguments, such as a clock, or a global that changes",
    )


def _refuse_out(kernels: EnvKernels, found: _Difference) -> None:
    """Refuse a kernel that leaves entries of `out` unwritten."""
    name = "action_mask" if found.name == "masks" else "observe"
    function, index = _writer(kernels, name, found.first)
    code = function.__code__
    out = code.co_varnames[1 if kernels.groups is None else 2]
    line, hint = code.co_firstlineno, ""
    for number, word in _suspects(code, out):
        line = number
        hint = {
            "rebinds": f"; this line makes {out} another array: assign to {out}[:]",
            "returns": f"; what it returns is not read: write it into {out}",
        }[word]
        break
    place = f"{out}{_text(index or (0,))}"
    more = f" (and {found.num - 1} of {found.size} entries more)" if found.num > 1 else ""
    _raise(
        kernels,
        function,
        line,
        f"kernel {name} leaves {place}{more} as it was before, or reads it, after "
        f"{_moment(found.step)}{hint}. `{out}` holds anything before: write all of it",
    )


def _refuse_reset(kernels: EnvKernels, place: str, found: _Difference) -> None:
    """Refuse a reset that leaves a field on which something depends."""
    function = getattr(kernels.reset, "py_func", kernels.reset)
    what = f"{_SHOWN[found.name]} of {_moment(found.step)}" if found.name else "what follows"
    _raise(
        kernels,
        function,
        function.__code__.co_firstlineno,
        f"kernel reset does not set state.{place}, and {what} depends on it: it would be what the "
        "last episode left there. Set every field in `reset`",
    )


def _raise(kernels: EnvKernels, function: types.FunctionType, line: int, text: str) -> None:
    filename = function.__code__.co_filename
    source = linecache.getline(filename, line, function.__globals__).strip()
    raise KernelResultError(
        f"{filename}:{line}, in {function.__name__}\n    {source}\n{kernels.name}: {text}.\n"
        f"{_FOUND}",
        filename,
        line,
    ) from None


def _writer(
    kernels: EnvKernels, name: str, index: tuple[int, ...]
) -> tuple[types.FunctionType, tuple[int, ...]]:
    """Return the author's function that writes an entry, and the index in its `out`."""
    function = getattr(kernels, name)
    if kernels.groups is not None:
        layout = GameLayout.of(kernels.groups)
        for group, part in layout.groups.items():
            mine = part.obs if name == "observe" else part.masks
            if not layout.is_flat and name == "observe":
                index = index[1:]  # after the agent's
            elif mine.start <= index[0] < mine.stop:
                size = (mine.stop - mine.start) // len(part.agents)
                shape = (part.obs_shape or (1,)) if name == "observe" else (size,)
                offset = (index[0] - mine.start) % size
                index = tuple(map(int, np.unravel_index(offset, shape)))
            else:
                continue
            function = function[group] if isinstance(function, Mapping) else function
            break
    return getattr(function, "py_func", function), index


def _suspects(code: types.CodeType, out: str) -> Iterator[tuple[int, str]]:
    """Yield lines that give the name of `out` to something else, or return something."""
    line, last = code.co_firstlineno, None
    for one in dis.get_instructions(code):
        line = (one.positions and one.positions.lineno) or line
        if one.opname.startswith("STORE_FAST"):  # some store two names, or load the second
            names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            if out in names[: 1 if "LOAD" in one.opname else 2]:
                yield line, "rebinds"
        if one.opname == "RETURN_VALUE" and not (
            last is not None and last.opname == "LOAD_CONST" and last.argval is None
        ):
            yield line, "returns"
        last = one


def _text(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]" if index else ""


def _moment(step: int) -> str:
    return "the reset" if step == 0 else f"step {step}"
