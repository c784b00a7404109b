"""Find what a Python env depends on besides its state, its actions and its seed."""

from __future__ import annotations

import datetime
import functools
import io
import os
import random as python_random
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from vecenv.port.coverage import is_own_file
from vecenv.port.lockstep import Actions, compare
from vecenv.port.sides import RESET, PythonSide, Seen
from vecenv.port.tape import find_generators

__all__ = ["Hidden", "find_hidden"]

_TIMES = ("time", "perf_counter", "monotonic", "process_time")
_CALLS: dict[Any, tuple[str, str]] = {
    **{getattr(time, name): ("wall-clock time", f"time.{name}") for name in _TIMES},
    **{getattr(time, f"{x}_ns"): ("wall-clock time", f"time.{x}_ns") for x in _TIMES},
    **{io.open: ("I/O", "open"), os.open: ("I/O", "os.open"), input: ("I/O", "input")},
    os.urandom: ("entropy of the system", "os.urandom"),
}
_GLOBALS = ("random, Python's own generator", "numpy.random, the global generator")
_NUM_STEPS = 300
_SECONDS = 3.0


class Hidden(NamedTuple):
    """Something that the results of an env may depend on.

    Attributes:
        kind: "global randomness", "wall-clock time", "I/O", "entropy of the system", "unknown",
            "earlier episodes", or "seed" (a generator that `reset(seed=...)` does not seed).
        what: The function that is called, or the value that differs.
        line: File and line number, "" if unknown.
        is_fatal: Whether an env with this can't be compared.
    """

    kind: str
    what: str
    line: str
    is_fatal: bool

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}{self.line and f' at {self.line}'}"


def _global_states() -> tuple[Any, Any]:
    """Return the states of the generators behind `random` and `numpy.random`."""
    state: Any = np.random.get_state()  # noqa: NPY002  # what is looked for
    return python_random.getstate(), (state[1].tobytes(), *state[2:])


class _Watch:
    """Notes calls of clocks, files and system entropy, and lines that use global generators.

    Attributes:
        found: The findings; the key tells equal findings apart.
        is_tracing: Whether to look for the lines that use global generators, which is slow.
    """

    def __init__(self) -> None:
        self.found: dict[Any, Hidden] = {}
        self.is_tracing = False
        self._states = _global_states()
        self._line = ""

    def run(self, function: Callable[..., Seen], *args: Any) -> Seen:
        """Call a function while watching it."""
        self._states = _global_states()
        is_tracing = self.is_tracing and any(not one.line for one in self.found.values())
        trace, profile = sys.gettrace(), sys.getprofile()
        sys.settrace(self._on_line if is_tracing else trace)
        sys.setprofile(self._on_call)
        try:
            return function(*args)
        finally:
            if profile is None or callable(profile):
                sys.setprofile(profile)
            else:  # cProfile's, before Python 3.12
                profile.enable()
            sys.settrace(trace)
            self._look()

    def _on_line(self, frame: types.FrameType, event: str, _: Any) -> Any:
        if not is_own_file(frame.f_code.co_filename):
            return None
        self._look()
        self._line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return self._on_line

    def _look(self) -> None:
        """Note which global generators have changed since the last look."""
        states = _global_states()
        for name, old, new in zip(_GLOBALS, self._states, states, strict=True):
            if old != new and (name not in self.found or not self.found[name].line):
                self.found[name] = Hidden("global randomness", name, self._line, True)
        self._states = states

    def _on_call(self, frame: types.FrameType, event: str, called: Any) -> None:
        """Note a call of a built-in function by a line of the env, not by a library."""
        if event != "c_call" or not is_own_file(frame.f_code.co_filename):
            return
        owner = getattr(called, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, datetime.date):
            told = "wall-clock time", f"datetime.{called.__name__}"
        else:
            told = _CALLS.get(called) if isinstance(called, types.BuiltinFunctionType) else None
        if told is not None:
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self.found.setdefault((told, line), Hidden(*told, line, False))


def _first_apart(one: list[Seen], other: list[Seen]) -> str:
    """Return where two plays first differ, "" if nowhere."""
    for step, (left, right) in enumerate(zip(one, other, strict=True)):
        if (found := compare(left, right, 0.0, {})) is not None:
            return f"{found.what} in call {step} ({found.python}, then {found.kernels})"
    return ""


def find_hidden(make: Callable[[], Any], space: Any, paths: Any) -> list[Hidden]:
    """Play an env several times; return what its results depend on besides seed and actions.

    Args:
        make: Makes the Python env.
        space: Its action space in the kernels.
        paths: Paths of its state, see `PythonSide`.
    """
    side, watch = PythonSide(make, paths), _Watch()
    draw = Actions(space, np.random.default_rng(0))
    draw.begin("masked")
    seen = [watch.run(side, RESET, 7)]
    actions: list[Any] = [RESET]
    end = time.perf_counter() + _SECONDS
    while len(actions) < _NUM_STEPS and time.perf_counter() < end:
        actions.append(RESET if side.is_over(seen[-1]) else draw(seen[-1], side.obs))
        seen.append(watch.run(side, actions[-1]))
    watch.is_tracing = any(not one.line for one in watch.found.values())
    fresh = PythonSide(make, paths)
    call = functools.partial(watch.run, fresh) if watch.is_tracing else fresh
    plays = [[call(one, None if k else 7) for k, one in enumerate(actions)] for _ in range(2)]
    found = list(watch.found.values())
    if what := _first_apart(seen, plays[0]):
        found = [one._replace(is_fatal=True) for one in found]
        if not found:
            told = f"two runs under the same draws differ: {what}"
            found = [Hidden("unknown", told, "", True)]
    elif what := _first_apart(seen, plays[1]):
        told = f"`reset` keeps something of them, as {what} shows"
        found.append(Hidden("earlier episodes", told, "", False))
    fresh.env.close()
    side.env.close()
    return found + _unseeded(make)


def _unseeded(make: Callable[[], Any]) -> list[Hidden]:
    """Return the generators that `reset(seed=...)` does not seed."""
    states: list[dict[str, str]] = []
    for _ in range(2):
        env = make()
        env.reset(seed=11)
        states.append({path: _state_of(one) for path, one, _ in find_generators(env)})
        env.close()
    told = "{} is not seeded by reset(seed=...)"
    paths = [path for path, state in states[0].items() if states[1].get(path) != state]
    return [Hidden("seed", told.format(path), "", False) for path in paths]


def _state_of(generator: Any) -> str:
    """Return a text that is equal for generators whose next draws are equal."""
    if isinstance(generator, python_random.Random):
        return repr(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return generator.randint(2**31, size=4).tolist().__repr__()
    return repr(generator.bit_generator.state)
