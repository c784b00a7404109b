"""Trials: one env is stepped in plain Python before compiled code is called.

They find indices out of range, wrong results of `step`, and memory that kernels leave unwritten:
the loop clears no memory, so `reset` must set every field and `observe` every entry of `out`. A
trial is played again with other numbers in that memory: results that differ come from memory that
was left unwritten.
"""

from __future__ import annotations

import copy
import linecache
import logging
import re
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np

from vecenv.core.masks import sample_actions
from vecenv.jit import interpreted
from vecenv.jit.episodes import MASK, RESET, STEP, Batch
from vecenv.jit.errors import KernelIndexError, KernelResultError, Place, reads
from vecenv.jit.games import COLUMNS, GameLayout
from vecenv.jit.kernels import EnvKernels, empty_batch

__all__ = ["Trial", "try_out"]

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


@dataclass
class Trial:
    """A trial of an env, and what came of it.

    Attributes:
        fields: Fields of the state record that are filled before the first reset; others are zero.
        fills_out: Whether `out` is filled before each call; otherwise it is zero, and a mask True.
        repeats: Actions to take; None to draw actions.
        actions: The actions taken.
        results: Step (0 is the reset), name and value of each output.
        error: The error that ended the trial early, or None.
        num_episodes: Number of episodes that ended.
    """

    fields: tuple[str, ...] = ()
    fills_out: bool = False
    repeats: list[np.ndarray] | None = None
    actions: list[np.ndarray] = field(default_factory=list)
    results: list[tuple[int, str, np.ndarray]] = field(default_factory=list)
    error: Exception | None = None
    num_episodes: int = 0

    def play(
        self,
        kernels: EnvKernels,
        loop: Callable[..., Any],
        params: np.ndarray | None,
        limit: int,
        seconds: float | None,
    ) -> None:
        """Reset an env and step it with random actions that its mask allows, or with `repeats`.

        See `try_out`; if `seconds` is given, no results are noted.
        """
        space, rng = copy.deepcopy(kernels.action_space), np.random.default_rng(0)
        space.seed(0)
        batch = empty_batch(kernels, 1)._replace(
            max_episode_steps=limit, params=None if params is None else params.copy()
        )
        given = None if params is None or kernels.sampler else batch.params.tobytes()
        batch.runs["key"] = rng.integers(2**63)
        for name in self.fields:
            _fill(batch.states[name])
        self._call(loop, batch, RESET, 0)
        end = time.perf_counter() + (_TRIAL_SECONDS if seconds is None else seconds)
        num_steps = _NUM_STEPS if seconds is None else sys.maxsize
        for step in range(1, 1 + (num_steps if self.repeats is None else len(self.repeats))):
            if self.repeats is None and step > _MIN_STEPS and time.perf_counter() > end:
                return
            self.num_episodes = int(batch.runs["num_episodes"][0])
            if seconds is not None:
                self.results.clear()
                self.actions.clear()
                if self.num_episodes >= NUM_EPISODES:
                    return
            if kernels.action_mask is not None:
                self._call(loop, batch, MASK, step)
            if self.repeats is not None:
                batch.actions[0] = self.repeats[step - 1]
            elif kernels.action_mask is not None:
                batch.actions[0] = sample_actions(space, batch.masks, rng)[0]
            else:
                batch.actions[0] = space.sample()
            self.actions.append(batch.actions[0].copy())
            self._call(loop, batch, STEP, step)
            if given is not None and batch.params.tobytes() != given:
                _refuse(
                    kernels,
                    _author(kernels.step),
                    "a kernel writes `params`, which only a sampler may, as envs share them: keep "
                    "what changes during an episode in the state",
                    found="",
                )

    def _call(self, loop: Callable[..., Any], batch: Batch, op: int, step: int) -> None:
        """Do one job on memory that it has to fill; note what it has written."""
        if self.fills_out:
            _fill(batch.obs)
        else:
            batch.obs[...] = 0
        batch.masks[...] = not self.fills_out
        loop(batch._replace(op=op), 0, 1)
        names = ("masks",) if op == MASK else [name for name in _SHOWN if name != "masks"]
        self.results += [(step, name, getattr(batch, name)[0].copy()) for name in names]


def try_out(
    kernels: EnvKernels,
    loop: Callable[..., Any],
    params: np.ndarray | None,
    max_episode_steps: int,
    seconds: float | None = None,
) -> int:
    """Run one separate env for a few steps in Python, to find mistakes that compiled code hides.

    Kernels that fail in Python or NumPy, or take over two seconds, are left to the compiler.

    Args:
        kernels: The kind of env.
        loop: Its loop, from `interpretable`.
        params: (1,) parameter record, which is copied, or None.
        max_episode_steps: Limit of an episode; NO_LIMIT for none.
        seconds: Play `NUM_EPISODES` whole episodes, for at most this long, instead of a few steps.

    Returns:
        The number of episodes that ended.

    Raises:
        KernelIndexError: An index is out of range; the message names file and line.
        KernelResultError: `step` returns something wrong, or a kernel leaves something unwritten.
    """

    def play(trial: Trial) -> Trial:
        try:
            with interpreted.trial(_LIMIT_SECONDS + (seconds or 0.0)):
                trial.play(kernels, loop, params, max_episode_steps, seconds)
        except Exception as error:
            trial.error = error
        return trial

    clean = play(Trial())  # the others start with foreign numbers in memory
    error = clean.error
    if isinstance(error, KernelResultError):
        raise error from None
    if error is None and seconds is None:
        _find_leftovers(kernels, clean, play)
    if isinstance(error, IndexError) and "out of" in str(error):
        _raise_index_error(kernels, error)
    if error is not None:
        _logger.debug("%s: the trial in Python ended early: %r", kernels.name, error)
    return clean.num_episodes


def _raise_index_error(kernels: EnvKernels, error: IndexError) -> None:
    """Raise KernelIndexError with file, line and values of the index.

    Not if a number has more than 64 bits: compiled integers overflow, which hashes rely on.
    """
    inside = traceback.walk_tb(error.__traceback__)
    frame, line = [(f, n) for f, n in inside if f.f_code.co_filename != interpreted.__file__][-1]
    place = Place(frame.f_code.co_filename, line, frame.f_code.co_name)
    names = set(re.findall(r"[^\W\d]\w*", linecache.getline(place.filename, line)))
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


def _find_leftovers(kernels: EnvKernels, clean: Trial, play: Callable[[Trial], Trial]) -> None:
    """Play a trial again on memory that is filled differently; refuse memory left unwritten.

    A field is refused only if results depend on its old content. Kernels of this package are not
    checked.

    Raises:
        KernelResultError: A kernel leaves memory unwritten; the message names it, file and line.
    """
    own = [kernels.reset, kernels.observe, kernels.action_mask]
    given = [list(one.values()) if isinstance(one, Mapping) else [one] for one in own]
    authors = [_author(one) for part in given for one in part if one is not None]
    if all((one.__module__ or "").startswith("vecenv.") for one in authors):
        return

    def found(*fields: str, fills_out: bool) -> _Difference | None:
        return _difference(play(Trial(fields, fills_out, clean.actions)), clean)

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


def _difference(trial: Trial, clean: Trial) -> _Difference | None:
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
    kernels: EnvKernels,
    function: types.FunctionType,
    text: str,
    line: int | None = None,
    found: str = f".\n{_FOUND}",
) -> NoReturn:
    place = Place.of(function, line)
    raise KernelResultError.at(place, f"{kernels.name}: {text}{found}") from None


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
