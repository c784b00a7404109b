"""Change one operator, constant, comparison or call at a time, and count what the tests notice.

    python benchmarks/mutants.py --sample 25
    python benchmarks/mutants.py buffers/writer.py --tests tests/buffers/test_writer.py

A *mutant* is a copy of the tree in which one expression of one file is another. The fast tests that
run its line are run on the copy with the compiler off, the shortest first, until one fails, for a
minute in all. A mutant that no test notices *survives*: either a test is missing, or the change has
no effect that a user can see; those are listed in `benchmarks/mutants_same.json` with the reason.

With the compiler off kernels run as Python, which takes no seconds of compiling for each mutant;
tests that take more than 20 s so are left out. `--compiled` leaves it on, for files without kernels
(vecenv/jit/runner.py). Coverage sees the lines that run in the process of the tests; in those
that they start, such as workers, only the functions that are called are noted. The shortest tests
of all are run for what neither has seen.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TEST_S = 20  # a test that takes longer without the compiler is left out
MUTANT_S = 60.0  # of tests, as they take without a change, that are run for a mutant
SAME = ROOT / "benchmarks" / "mutants_same.json"
FAST = "not slow and not learn and not gpu and not cuda and not ray and not snippets and not real"

# The files under the rewrite of workers, buffers and learners, with the folders of their tests.
_ENVS = ("tests/workers", "tests/wrappers", "tests/test_*.py")
_JIT = ("tests/jit", "tests/test_backends.py", "tests/test_sends.py")
TARGETS = {
    "vecenv/core/autoreset.py": _ENVS,
    "vecenv/core/errors.py": _ENVS,
    "vecenv/core/masks.py": _ENVS,
    "vecenv/core/protocol.py": _ENVS,
    "vecenv/workers/chunk.py": (*_ENVS, "tests/timing"),
    "vecenv/workers/pool.py": (*_ENVS, "tests/timing"),
    "vecenv/workers/worker.py": (*_ENVS, "tests/timing"),
    "vecenv/jit/runner.py": _JIT,
    "vecenv/jit/driver.py": _JIT,
    "vecenv/cage/challenge2/rules/dynamics.py": ("tests/cage/challenge2",),
    "buffers/rollout/gae.py": ("tests/buffers",),
    "buffers/replay/table.py": ("tests/buffers",),
    "buffers/replay/priorities.py": ("tests/buffers",),
    "buffers/episodic/draws.py": ("tests/buffers",),
    "buffers/writer.py": ("tests/buffers",),
}

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.BitXor: ast.BitOr,
}  # fmt: skip
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """One change: file, line, enclosing function, and the text before and after."""

    file: str
    line: int
    function: str
    before: str
    after: str
    start: tuple[int, int]
    end: tuple[int, int]

    @property
    def key(self) -> str:
        """Name the change without its line, which moves."""
        return f"{self.file} {self.function}: {self.before} -> {self.after}"


# From a mutant to its tests, the shortest first, their seconds, and those of the longest.
Covering = Callable[[Mutant], tuple[list[str], float, float]]


class Result(NamedTuple):
    """Whether a test noticed a mutant, and which: a test's id, "hang", or "" for none."""

    mutant: Mutant
    noticed_by: str
    num_tests: int
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if mutants survive that are not listed as the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", help="files to change; all of `TARGETS` if none")
    parser.add_argument("--tests", nargs="*", help="files or folders of tests, for all the files")
    parser.add_argument("--sample", type=int, default=25, help="mutants of each file (25); 0: all")
    parser.add_argument("--seed", type=int, default=0, help="which ones are drawn")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that are tried at a time")
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="leave the compiler on: for files without kernels whose tests need it",
    )
    parser.add_argument("--key", help="only mutants whose name contains this text")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    options = parser.parse_args(arguments)
    files = options.files or list(TARGETS)
    for file in files:
        if not (ROOT / file).is_file():
            parser.error(f"{file} is no file of {ROOT}")
        if not options.tests and file not in TARGETS:
            parser.error(f"{file} has no tests in TARGETS: name them with --tests")
    if not options.compiled:
        os.environ["NUMBA_DISABLE_JIT"] = "1"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    _import_what_stays()
    results: list[Result] = []
    of_tests: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for file in files:
        of_tests[tuple(options.tests or TARGETS[file])].append(file)
    for tests, some in of_tests.items():
        covering = run_with_coverage(some, tests)
        for file in some:
            mutants = draw(find_mutants(file), options.sample, options.seed)
            mutants = [mutant for mutant in mutants if (options.key or "") in mutant.key]
            results += try_mutants(mutants, covering, options.jobs)
            print_table(results)
            if options.output:
                write_results(options.output, results)
    return 1 if print_survivors(results) else 0


def find_mutants(file: str) -> list[Mutant]:
    """Return all mutants of a file, in the order of its lines."""
    source = (ROOT / file).read_text()
    return sorted(_Finder(file, source).find(), key=lambda mutant: (mutant.start, mutant.after))


def draw(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Draw some mutants, at most one of a line as long as there are lines."""
    order = random.Random(seed).sample(list(mutants), len(mutants))
    if count <= 0:
        return order
    seen: set[int] = set()
    first = [m for m in order if m.line not in seen and not seen.add(m.line)]
    return (first + [m for m in order if m not in set(first)])[:count]


class _Finder:
    """Walks the code of a file that runs: not annotations, messages of errors, nor docstrings."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source = file, source
        self.lines = source.splitlines(keepends=True)
        self.function = "module"

    def find(self) -> Iterator[Mutant]:
        for node in ast.parse(self.source).body:
            yield from self._visit(node)

    def _visit(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)):
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return  # `zip(strict=True)` asserts what is so
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            outer = self.function
            self.function = node.name if outer == "module" else f"{outer}.{node.name}"
            if isinstance(node, ast.FunctionDef):
                yield from self._defaults(node)
            for child in node.body:
                yield from self._visit(child)
            self.function = outer
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from self._visit(node.value)
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if self.function == "module" and isinstance(node, (ast.Assign, ast.Expr)):
            return  # names, registries, constants with their units: tests of values say little
        yield from self._changes(node)
        for child in ast.iter_child_nodes(node):
            yield from self._visit(child)

    def _defaults(self, node: ast.FunctionDef) -> Iterator[Mutant]:
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            yield from self._changes(default)

    def _changes(self, node: Any) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare):
            for k, operator in enumerate(node.ops):
                new = ast.Compare(node.left, [*node.ops], node.comparators)
                new.ops[k] = _COMPARED[type(operator)]()
                yield from self._replace(node, new)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from self._replace(node, ast.Pass())
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield from self._replace(node.test, ast.UnaryOp(ast.Not(), node.test))
        elif isinstance(node, ast.Name) and node.id in _CALLED:
            yield from self._replace(node, ast.Name(_CALLED[node.id], ast.Load()))
        elif (new := _other(node)) is not None:
            yield from self._replace(node, new)

    def _replace(self, node: Any, new: ast.AST) -> Iterator[Mutant]:
        after = ast.unparse(ast.fix_missing_locations(new))
        if not isinstance(new, (ast.Pass, ast.AugAssign)):
            after = f"({after})"
        before = ast.get_source_segment(self.source, node) or ""
        if "_logger" in before:
            return
        start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        short = " ".join(before.split())
        yield Mutant(self.file, node.lineno, self.function, short, after, start, end)


def _other(node: Any) -> ast.AST | None:
    """Return another operation or constant, or None for what has no other."""
    match node:
        case ast.BinOp(left=ast.JoinedStr() | ast.List()):
            return None  # text, and lists that are joined
        case ast.BinOp() if type(node.op) in _COMPUTED:
            return ast.BinOp(node.left, _COMPUTED[type(node.op)](), node.right)
        case ast.AugAssign() if type(node.op) in _COMPUTED:
            return ast.AugAssign(node.target, _COMPUTED[type(node.op)](), node.value)
        case ast.BoolOp():
            return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            return node.operand
        case ast.Constant(value=bool()):
            return ast.Constant(not node.value)
        case ast.Constant(value=int() | float() as number):
            return ast.Constant(number + 1)
    return None


def apply(source: str, mutant: Mutant) -> str:
    """Return the changed source, with as many lines, so that the others keep their numbers."""
    lines = source.encode().splitlines(keepends=True)  # columns of `ast` count bytes
    (first, begin), (last, end) = mutant.start, mutant.end
    head, tail = lines[first - 1][:begin], lines[last - 1][end:]
    padding = b"\\\n" * (last - first)
    lines[first - 1 : last] = [head + mutant.after.encode() + padding + tail]
    return b"".join(lines).decode()


# `sitecustomize` of the processes that tests start: notes the functions of some files that run.
_NOTE_CALLS = """
import os, sys

if os.environ.get("MUTANTS_CALLS"):
    log = os.open(os.environ["MUTANTS_CALLS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    files, seen = os.environ["MUTANTS_FILES"].split(os.pathsep), set()

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename in files and code not in seen:
            seen.add(code)
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
            told = chr(9).join([code.co_filename, str(code.co_firstlineno), test])
            os.write(log, told.encode() + bytes([10]))

    def begin():
        seen.clear()
        sys.setprofile(note)

    os.register_at_fork(after_in_child=begin)
    if sys.flags.safe_path:  # a fresh interpreter for envs
        begin()
"""


class _Listener:
    """Pytest's plugin that keeps how long each test took, and which failed first."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self.num_tests = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        self.num_tests += report.when == "call"
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(f"import of {report.nodeid}")


def _import_what_stays() -> None:
    """Import what no mutant changes, so that forked children have it."""
    import coverage  # noqa: F401  # for the children
    import gymnasium  # noqa: F401  # for the children
    import numba  # noqa: F401  # for the children
    import pytest  # noqa: F401  # for the children
    import torch

    torch.set_num_threads(1)


def _run_tests(
    tree: Path,
    arguments: Sequence[str],
    answer: Any,
) -> None:
    """Run pytest on a tree in this (forked) process; send what the listener heard."""
    import pytest

    os.setpgid(0, 0)  # so that all it starts can be ended with it
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [
        str(tree),
        *(p for p in sys.path if p not in ("", str(ROOT), str(ROOT / "benchmarks"))),
    ]
    if (tree / "sitecustomize.py").exists():  # to note what runs in other processes
        exec(compile(_NOTE_CALLS, "sitecustomize", "exec"), {})
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    listener = _Listener()
    options = ["-q", "-m", FAST, "-p", "no:cacheprovider"]
    pytest.main([*options, *arguments], plugins=[listener])
    answer.send((dict(listener.seconds), listener.failed, listener.num_tests))
    answer.close()
    os._exit(0)


def _in_child(tree: Path, arguments: Sequence[str], timeout: float) -> tuple[Any, ...] | None:
    """Run pytest in a process of its own; return what it heard, or None if it hangs or dies."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_tests, args=(tree, arguments, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(timeout) else None
    except EOFError:
        return None
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        receiver.close()


def _copy_tree(target: Path) -> Path:
    for name in ("vecenv", "buffers", "tests", "examples", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("runs"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, target / name)
    return target


def run_with_coverage(files: Sequence[str], tests: Sequence[str]) -> Covering:
    """Run the tests once; return a function from a mutant to the tests that run its line.

    Args:
        files: Those that will be changed.
        tests: Files and folders of tests; patterns are allowed.

    Raises:
        SystemExit: The tests do not come to their end.
    """
    import coverage

    found = [str(path.relative_to(ROOT)) for name in tests for path in sorted(ROOT.glob(name))]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = _copy_tree(Path(folder))
        config, database = tree / "coverage.ini", tree / "coverage.db"
        include = "".join(f"    {tree / file}\n" for file in files)
        config.write_text(f"[run]\ndata_file = {database}\ninclude =\n{include}")
        options = ["--cov", f"--cov-config={config}", "--cov-context=test", "--cov-report="]
        print(f"running {' '.join(tests)}", flush=True)
        begin = time.perf_counter()
        limit = (f"--timeout={TEST_S}", "--timeout-method=signal")
        calls = tree / "calls.txt"
        (tree / "sitecustomize.py").write_text(_NOTE_CALLS)
        os.environ["MUTANTS_CALLS"] = str(calls)
        os.environ["MUTANTS_FILES"] = os.pathsep.join(str(tree / file) for file in files)
        heard = _in_child(tree, [*options, *limit, *found], timeout=3600)
        del os.environ["MUTANTS_CALLS"], os.environ["MUTANTS_FILES"]
        if heard is None:
            raise SystemExit(f"the tests {' '.join(tests)} did not come to their end")
        seconds, failed, _ = heard
        print(f"  {len(seconds)} tests in {time.perf_counter() - begin:.0f} s", flush=True)
        for name in failed:
            print(f"  fails without a change, left out: {name}")
        data = coverage.CoverageData(str(database))
        data.read()
        contexts = {file: data.contexts_by_lineno(str(tree / file)) for file in files}
        elsewhere: dict[tuple[str, int], set[str]] = defaultdict(set)
        for line in calls.read_text().splitlines() if calls.exists() else ():
            path, number, test = line.split("\t")
            elsewhere[str(Path(path).relative_to(tree)), int(number)].add(test)
    first_lines = {file: _first_lines((ROOT / file).read_text()) for file in files}
    usable = {name for name in seconds if name not in failed}

    def covering(mutant: Mutant) -> tuple[list[str], float, float]:
        on_line = contexts[mutant.file].get(mutant.line, [])
        names = {name.rpartition("|")[0] for name in on_line if name}
        names |= elsewhere[mutant.file, first_lines[mutant.file].get(mutant.line, 0)]
        names &= usable
        order = sorted(names or usable, key=seconds.__getitem__)
        until = itertools.accumulate(seconds[name] for name in order)
        chosen = [name for name, total in zip(order, until, strict=True) if total <= MUTANT_S]
        chosen = chosen or order[:1]
        return chosen, sum(seconds[name] for name in chosen), seconds[chosen[-1]]

    return covering


def _first_lines(source: str) -> dict[int, int]:
    """Return for each line in a function the first line of the innermost one, decorators too."""
    found = {}
    for node in ast.walk(ast.parse(source)):  # outer functions first
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
            found.update(dict.fromkeys(range(first, (node.end_lineno or first) + 1), first))
    return found


def try_mutants(mutants: Sequence[Mutant], covering: Covering, jobs: int) -> list[Result]:
    """Run the tests of each mutant; return the results in the order of the mutants."""
    from concurrent.futures import ThreadPoolExecutor

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees = [_copy_tree(Path(folder) / str(k)) for k in range(jobs)]

        def run(mutant: Mutant) -> Result:
            tree = trees.pop()
            target = tree / mutant.file
            source = target.read_text()
            target.write_text(apply(source, mutant))
            names, seconds, longest = covering(mutant)
            begin = time.perf_counter()
            try:
                limit = f"--timeout={20 + 10 * longest:.0f}"  # of a test; it ends the process
                heard = _in_child(tree, ["-x", limit, *names], timeout=60 + 5 * seconds)
            finally:
                target.write_text(source)
                trees.append(tree)
            took = time.perf_counter() - begin
            noticed = "hang or death" if heard is None else next(iter(heard[1]), "")
            result = Result(mutant, noticed, 0 if heard is None else heard[2], took)
            mark = "found" if noticed else "SURVIVED"
            print(
                f"  {mark:8} {took:5.1f} s line {mutant.line} {mutant.key[len(mutant.file) :]}",
                flush=True,
            )
            return result

        return list(pool.map(run, mutants))


def read_same() -> dict[str, str]:
    """Return why each listed mutant can't be noticed, by its key."""
    return json.loads(SAME.read_text()) if SAME.is_file() else {}


def print_table(results: Sequence[Result]) -> None:
    """Print a row for each file: mutants, found, the same, and the share that was found."""
    same = read_same()
    rows: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        rows[result.mutant.file].append(result)
    print(f"\n| {'file':42} | mutants | same | found | share |\n|:{'-' * 43}|---:|---:|---:|---:|")
    for file, some in [*rows.items(), ("all", list(results))]:
        num_same = sum(not r.noticed_by and r.mutant.key in same for r in some)
        num_found = sum(bool(r.noticed_by) for r in some)
        share = num_found / max(len(some) - num_same, 1)
        print(f"| {file:42} | {len(some)} | {num_same} | {num_found} | {share:.0%} |")
    print(flush=True)


def print_survivors(results: Sequence[Result]) -> int:
    """Print the survivors that are not listed as the same; return how many."""
    same = read_same()
    left = [r for r in results if not r.noticed_by and r.mutant.key not in same]
    for result in left:
        print(f"survived: {result.mutant.file}:{result.mutant.line} {result.mutant.key}")
    return len(left)


def write_results(path: Path, results: Sequence[Result]) -> None:
    """Write the results as JSON: what was changed, and which test noticed it."""
    rows = [
        {"change": r.mutant.key, "line": r.mutant.line, "noticed_by": r.noticed_by} for r in results
    ]
    path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    sys.exit(main())
