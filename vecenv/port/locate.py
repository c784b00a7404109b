"""Find the two source lines of a difference: replay the run with kernels as plain Python."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vecenv.jit import random
from vecenv.port.coverage import is_kernel_file, line_text, source_tree
from vecenv.port.lockstep import Difference, call_both
from vecenv.port.sides import RESET, KernelSide, PythonSide
from vecenv.port.tape import Draw

__all__ = ["locate"]

_RETURNED = ("observation", "reward", "terminated", "truncated", "mask")
_SHOWN = 4  # draws shown before and after the first that differs
_COLUMNS = {"reward": "rewards", "terminated": "terminations", "truncated": "truncations"}


class _Trace:
    """Notes which line of the users' code last changed a value, and the draws of kernels.

    Args:
        value: A function of the frame that reads the value; LookupError if it is not visible.
        returning: Code, and index of the value in its returned tuple: the line is then that of the
            returned variable's last change.
        fallback: Whether to report the function where the value is visible, if it never changes.
    """

    def __init__(
        self,
        value: Callable[[types.FrameType], Any] | None = None,
        returning: tuple[types.CodeType, int] | None = None,
        *,
        fallback: bool = False,
    ) -> None:
        self._value, self._returning, self._fallback = value, returning, fallback
        self._last: Any = None
        self._before = ("", 0)  # the line that ran last
        self._changed: dict[str, tuple[Any, int]] = {}  # local variables: value, line
        self.line = ("", 0)
        self.draws: list[Draw] = []

    def run(self, side: Any, action: Any, seed: int | None) -> Any:
        """Call a side under the trace; return its result, or the exception."""
        outer = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            return side(action, seed)
        except Exception as error:
            frames = [frame for frame in _frames(error) if is_kernel_file(frame[0])]
            self.line = frames[-1] if frames else self.line
            raise
        finally:
            sys.settrace(outer)

    def _on_call(self, frame: types.FrameType, event: str, _: Any) -> Any:
        """Follow calls of the users' functions, and the draws that these make."""
        file, caller = frame.f_code.co_filename, frame.f_back
        if file == random.__file__ and caller is not None:
            is_inner = caller.f_code.co_filename == file or not is_kernel_file(
                caller.f_code.co_filename
            )
            return None if is_inner else self._note_draw(frame, caller)
        return self._on_line if is_kernel_file(file) else None

    def _note_draw(self, frame: types.FrameType, caller: types.FrameType) -> Any:
        """Note a draw of kernels when it begins; when it ends, note how many words it took."""
        rng, *given = (
            frame.f_locals[name] for name in frame.f_code.co_varnames[: frame.f_code.co_argcount]
        )
        start, number = int(rng.counter), len(self.draws)
        args = tuple(int(one) for one in given if isinstance(one, int | np.integer))
        place = caller.f_code.co_filename, caller.f_lineno
        self.draws.append(Draw(frame.f_code.co_name, args, 0, *place))

        def on_return(_: types.FrameType, event: str, __: Any) -> Any:
            words = int(rng.counter) - start
            self.draws[number] = self.draws[number]._replace(words=words)
            return on_return

        return on_return

    def _on_line(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        """Read the value before each line: if it changed, the line that ran last changed it."""
        if self._value is not None:
            try:
                value = np.array(self._value(frame))
                if self._fallback and not self.line[0]:  # the function that can write the value
                    self.line = frame.f_code.co_filename, frame.f_code.co_firstlineno
            except (LookupError, AttributeError, TypeError):
                value = self._last
            if self._last is not None and not np.array_equal(value, self._last):
                self.line = self._before
            self._last = value
        if self._returning is not None and frame.f_code is self._returning[0]:
            for name, value in frame.f_locals.items():
                mark = value.tobytes() if isinstance(value, np.ndarray) else repr(value)[:99]
                if self._changed.get(name, (None, 0))[0] != mark:
                    self._changed[name] = (mark, self._before[1])
            if event == "return" and arg is not None:
                self.line = self._returned(frame)
        caller = frame.f_back
        if event == "return" and caller is not None and is_kernel_file(caller.f_code.co_filename):
            frame = caller  # the caller's line continues
        self._before = frame.f_code.co_filename, frame.f_lineno
        return self._on_line

    def _returned(self, frame: types.FrameType) -> tuple[str, int]:
        """Return the line that set the returned element."""
        assert self._returning is not None
        file, number = frame.f_code.co_filename, frame.f_lineno
        for node in ast.walk(source_tree(file)):
            if (
                isinstance(node, ast.Return)
                and node.lineno <= number <= (node.end_lineno or 0)
                and isinstance(node.value, ast.Tuple)
                and self._returning[1] < len(node.value.elts)
            ):
                part = node.value.elts[self._returning[1]]
                if isinstance(part, ast.Name) and part.id in self._changed:
                    return file, self._changed[part.id][1]
                return file, part.lineno
        return file, number


def _frames(error: BaseException) -> list[tuple[str, int]]:
    """Return the (file, line) pairs that an exception has passed, outermost first."""
    found, one = [], error.__traceback__
    while one is not None:
        found.append((one.tb_frame.f_code.co_filename, one.tb_lineno))
        one = one.tb_next
    return found


def _split(what: str) -> tuple[str, str, tuple[int, ...]]:
    """Split "reward of cat" or "field hand[2]" into kind, the rest, and index."""
    name, _, index = what.partition("[")
    kind, _, rest = name.partition(" ")
    return (
        kind,
        rest.removeprefix("of "),
        tuple(map(int, index.rstrip("]").split(","))) if index else (),
    )


def _watch_kernels(side: KernelSide, what: str) -> _Trace:
    """Return the trace that finds the kernels' line which sets this value.

    Fields are read from the state record; observations and masks from `out` in the author's
    function; reward and flags of a single env from the result of `step`.
    """
    kind, name, index = _split(what)
    kernels, state = side.envs.kernels, side.envs.states[0]
    if kind == "field":
        return _Trace(lambda _: state[name][index])
    if side.layout is not None and kind in _COLUMNS:
        agents = [one for group in side.layout.groups.values() for one in group.agents]
        return _Trace(lambda _: state[_COLUMNS[kind]][agents.index(name)])
    if kind in ("observation", "mask"):
        author: Any = kernels.observe if kind == "observation" else kernels.action_mask
        codes = {}
        for one in author.values() if isinstance(author, Mapping) else [author]:
            code = getattr(one, "py_func", one).__code__
            codes[code] = code.co_varnames[1 if side.layout is None else 2]
        return _Trace(lambda frame: frame.f_locals[codes[frame.f_code]][index or 0], fallback=True)
    step: Any = kernels.step
    number = _RETURNED.index(kind) - 1 if kind in _RETURNED else 0
    return _Trace(None, (getattr(step, "py_func", step).__code__, number))


def _watch_python(side: PythonSide, what: str, *, is_reset: bool) -> _Trace:
    """Return the trace that finds the line of the Python env which sets this value."""
    kind, name, index = _split(what)
    if kind == "field":
        return _Trace(lambda _: np.array(side.field(side.paths[name]))[index])
    method = type(side.inner).reset if is_reset else type(side.inner).step
    number = min(_RETURNED.index(kind), 1 if is_reset else 4) if kind in _RETURNED else 0
    return _Trace(None, (method.__code__, number) if hasattr(method, "__code__") else None)


def locate(found: Difference, python: PythonSide, kernels: KernelSide, tolerance: float) -> None:
    """Replay a run to its end; note lines and draws of the difference.

    Args:
        found: The difference; its lines and notes are set.
        python: A new Python env.
        kernels: New kernels, as plain Python.
        tolerance: See `vecenv.port.lockstep.compare`.
    """
    *before, last = found.actions
    seeds = [found.seed, *[None] * len(before)]
    for action, seed in zip(before, seeds, strict=False):
        call_both(python, kernels, action, seed, tolerance, {})
    own = _watch_python(python, found.what, is_reset=last is RESET)
    other = _watch_kernels(kernels, found.what)
    through = own.run, other.run
    again, _ = call_both(python, kernels, last, seeds[-1], tolerance, {}, through=through)
    draws = python.tape.draws, other.draws
    number = _first_apart(*draws)
    lines = own.line, other.line
    if found.what == "draws":  # the line of the extra draw, or of the last draw
        lines = [(d[number:] or d[-1:])[0][3:] if d else ("", 0) for d in draws]
    found.python_line, found.kernel_line = (line_text(*line) for line in lines)
    for k in range(max(0, number - _SHOWN), min(max(map(len, draws)), number + _SHOWN)):
        told = " | ".join(str(side[k]) if k < len(side) else "nothing" for side in draws)
        mark = "  <- the first that differs" if k == number else ""
        found.notes.append(f"draw {k + 1}: {told}{mark}")
    if again is None or again.what != found.what:
        found.notes.append(
            "a fresh env and the kernels as plain Python do not differ here: episodes depend on "
            "earlier ones, or compiled code computes otherwise (integers beyond 64 bits)"
        )


def _first_apart(python: list[Draw], kernels: list[Draw]) -> int:
    """Return the index of the first draw that differs between the sides."""
    for k, (one, other) in enumerate(zip(python, kernels, strict=False)):
        are_integers = one.kind == other.kind == "integers"
        if one.words != other.words or (are_integers and one.args != other.args):
            return k
    return min(len(python), len(kernels))
