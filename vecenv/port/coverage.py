"""Which lines of kernels have run, and which of their comparisons had only one outcome.

Kernels run as plain Python under a trace. A line is traced until it has run; a comparison is
evaluated until it has been true, false and, if it orders integers, equal. How far it is from a
missing outcome tells `Lockstep` which states to continue from.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vecenv.jit.errors import reached
from vecenv.jit.kernels import ARGUMENTS, EnvKernels

__all__ = ["Coverage", "is_kernel_file", "is_own_file", "line_text", "source_tree"]

_PACKAGE = Path(__file__).parents[1]
_STANDARD = str(Path(inspect.__file__).parent)
_CALLED = {"abs", "bool", "float", "int", "len", "max", "min"}  # may be called once more
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_IMPURE = (ast.NamedExpr, ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.Starred)


def is_own_file(file: str) -> bool:
    """Return whether a file is outside of this package, Python, NumPy, Numba, Gymnasium's core."""
    if file.startswith("<") or any(f"/{one}/" in file for one in ("numpy", "numba")):
        return False
    if "/gymnasium/" in file and "/gymnasium/envs/" not in file:
        return False
    if file.startswith(str(_PACKAGE)):
        return False
    return "site-packages" in file or not file.startswith(_STANDARD)


def is_kernel_file(file: str) -> bool:
    """Return whether kernels may be in a file: the user's own, or bundled ones."""
    return is_own_file(file) or f"{_PACKAGE.name}/jit/envs/" in file


@functools.cache
def source_tree(file: str) -> ast.Module:
    """Return the syntax tree of a file, empty if there is no source of Python alone."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a cell of a notebook with its commands, or a page
        return ast.Module([], [])


def line_text(file: str, line: int) -> str:
    """Return "file:line: source", with the shortest clear file name; "" without a file."""
    if not file:
        return ""
    return f"{_short(file)}:{line}: {linecache.getline(file, line).strip()}"


def _short(file: str) -> str:
    path = Path(file)
    is_here = path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if is_here else Path(*path.parts[-3:]))


class _Comparison:
    """A comparison in the source, with the outcomes that it has not had.

    Attributes:
        text: Its source.
        file, line: Its place.
        missing: True, False, and "equal", as far as they have not been seen.
    """

    def __init__(self, node: ast.expr, file: str) -> None:
        self.text, self.file, self.line = ast.unparse(node), file, node.lineno
        self.missing: set[bool | str] = {True, False}
        parts = [node]
        if isinstance(node, ast.Compare):
            parts = [node.left, node.comparators[0]]
            if isinstance(node.ops[0], _ORDERS):
                self.missing.add("equal")
        self._whole = _compiled(node, file)
        self._parts = [_compiled(part, file) for part in parts]

    def weigh(self, frame: types.FrameType) -> dict[bool | str, float]:
        """Evaluate it; return the distance from each missing outcome, 0 for one that it has."""
        names = frame.f_globals, frame.f_locals
        try:
            outcome = bool(eval(self._whole, *names))
            values = [float(value := eval(part, *names)) for part in self._parts]
        except Exception:  # the comparison was not reached: `k < n and hand[k] == 3`
            return {}
        apart = abs(values[0] - values[1]) if len(values) == 2 else 1.0
        if "equal" in self.missing and not isinstance(value, int | np.integer):
            self.missing.discard("equal")  # floats are hardly ever equal
        found: dict[bool | str, float] = {}
        for goal in self.missing:
            is_met = apart == 0.0 if goal == "equal" else goal is outcome
            found[goal] = 0.0 if is_met else max(apart, 1e-9)
        return found


class Goal(NamedTuple):
    """An outcome that a comparison has not had."""

    comparison: _Comparison
    outcome: bool | str


def _compiled(node: ast.expr, file: str) -> types.CodeType:
    return compile(ast.Expression(node), file, "eval")


def _comparisons(code: types.CodeType) -> Iterator[ast.expr]:
    """Yield the conditions of a function that can be evaluated without effects."""
    for function in ast.walk(source_tree(code.co_filename)):
        if not isinstance(function, ast.FunctionDef | ast.Lambda):
            continue
        first = min([function.lineno, *(x.lineno for x in getattr(function, "decorator_list", ()))])
        if first != code.co_firstlineno or getattr(function, "name", "<lambda>") != code.co_name:
            continue
        for node in ast.walk(function):
            is_test = isinstance(node, ast.If | ast.While | ast.IfExp)
            for one in (node.test,) if is_test else (node,):
                is_name = is_test and isinstance(one, ast.Name | ast.Attribute | ast.Subscript)
                is_pair = isinstance(one, ast.Compare) and len(one.ops) == 1
                if (
                    isinstance(one, ast.expr)
                    and (is_name or (is_pair and not is_test))
                    and _is_pure(one)
                ):
                    yield one


def _is_pure(node: ast.AST) -> bool:
    """Return whether an expression can be evaluated once more."""
    for one in ast.walk(node):
        if isinstance(one, _IMPURE):
            return False
        name = one.func if isinstance(one, ast.Call) else None
        if name is not None and not (isinstance(name, ast.Name) and name.id in _CALLED):
            return False
    return True


def _lines(code: types.CodeType) -> set[int]:
    """Return the lines of a function without its head."""
    found = {line for _, _, line in code.co_lines() if line is not None}
    return {line for line in found if line > code.co_firstlineno} or found


class Coverage:
    """Traces kernels as plain Python.

    Args:
        kernels: The kernels.

    Attributes:
        is_new: Whether the latest call ran a line, or had an outcome, for the first time.
        near: Distances of the latest call from outcomes that are missing.
    """

    def __init__(self, kernels: EnvKernels) -> None:
        self.is_new = False
        self.near: dict[Goal, float] = {}
        self._unseen: dict[types.CodeType, set[int]] = {}
        self._open: dict[types.CodeType, dict[int, list[_Comparison]]] = {}
        self._seeing: set[types.CodeType] = set()  # functions that write observations
        for name in ("observe", *ARGUMENTS):
            author = getattr(kernels, name)
            for one in author.values() if isinstance(author, Mapping) else [author]:
                self._add(one)
            self._seeing = self._seeing or set(self._unseen)
        self._traces = {code: self._trace_of(code) for code in self._unseen}
        self.num_lines = sum(map(len, self._unseen.values()))

    @property
    def is_complete(self) -> bool:
        """Whether all lines ran, and all comparisons had all outcomes."""
        return not self._traces

    @property
    def has_seen_observations(self) -> bool:
        """Whether there is nothing new in functions that write observations."""
        return not self._seeing & self._traces.keys()

    def _add(self, kernel: Any) -> None:
        for function in reached(kernel) if kernel is not None else ():
            code = function.__code__
            if code in self._unseen or not is_kernel_file(code.co_filename):
                continue
            self._unseen[code], found = _lines(code), self._open.setdefault(code, {})
            for node in _comparisons(code):
                found.setdefault(node.lineno, []).append(_Comparison(node, code.co_filename))

    def _trace_of(self, code: types.CodeType) -> Callable[..., Any]:
        """Return the trace of a function."""
        unseen, comparisons = self._unseen[code], self._open[code]

        def on_line(frame: types.FrameType, event: str, _: Any) -> Any:
            if event == "line":
                line = frame.f_lineno
                if line in unseen:
                    unseen.discard(line)
                    self.is_new = True
                if line in comparisons:
                    self._weigh(frame, comparisons, line)
            return on_line

        return on_line

    def _weigh(
        self, frame: types.FrameType, found: dict[int, list[_Comparison]], line: int
    ) -> None:
        """Note the outcomes of a line's comparisons, or the distances from them."""
        for one in found[line]:
            for outcome, distance in one.weigh(frame).items():
                goal = Goal(one, outcome)
                if distance == 0.0:
                    one.missing.discard(outcome)
                    self.near.pop(goal, None)
                    self.is_new = True
                else:
                    self.near[goal] = min(distance, self.near.get(goal, distance))
        found[line] = [one for one in found[line] if one.missing]
        if not found[line]:
            del found[line]

    def _on_call(self, frame: types.FrameType, event: str, _: Any) -> Any:
        return self._traces.get(frame.f_code)

    def run(self, side: Any, action: Any, seed: int | None) -> Any:
        """Call kernels that run as plain Python; return their results."""
        self.is_new, self.near = False, {}
        if not self._traces:
            return side(action, seed)
        outer = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            return side(action, seed)
        finally:
            sys.settrace(outer)
            if self.is_new:
                for code in [x for x in self._traces if not self._unseen[x] and not self._open[x]]:
                    del self._traces[code]

    def lines_not_run(self) -> dict[str, list[int]]:
        """Return the lines that never ran, by file."""
        found: dict[str, set[int]] = {}
        for code, lines in self._unseen.items():
            found.setdefault(_short(code.co_filename), set()).update(lines)
        return {file: sorted(lines) for file, lines in found.items() if lines}

    def outcomes_not_seen(self) -> list[str]:
        """Return the comparisons that ran and were always, or never, true."""
        told = {True: "never true", False: "always true"}
        found = [
            f"{_short(one.file)}:{one.line}: {one.text} was {told[outcome]}"
            for code, comparisons in self._open.items()
            for line, some in comparisons.items()
            for one in some
            for outcome in (True, False)
            if outcome in one.missing and line not in self._unseen[code]
        ]
        return list(dict.fromkeys(found))
