"""List what a user sees, a line for each test that holds it: `tests/BEHAVIOUR.md`.

    python benchmarks/behaviours.py           # lines without a test, tests without a line
    python benchmarks/behaviours.py --write   # take new tests in; lines whose test is gone stay

A line is the first sentence of a test's docstring, or else its name. Before code is rewritten the
lines are read; afterwards each still has its test, or was moved under "Gone" with the reason. A
test that calls private code says which: `(private: ...)`. What follows is written by hand:

- "goes with" and a test: that test holds the same behaviour by public calls, this one is deleted;
- "goes with its mechanism" and a name: no user sees it, the test is deleted with that code;
- "needs a public test": a public call reaches the behaviour, and no other test holds it yet;
- nothing: the private name is a class, a constant or a helper beside a public call, or the test is
  of code that stays and that no public call shows (machine code, the cache of compiled code).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1] / "tests"
FILE = TESTS / "BEHAVIOUR.md"
# Part of the library -> the folders and files whose tests hold its behaviours.
PARTS = {
    "sync and workers": [
        "workers", "test_actions.py", "test_against_gymnasium.py", "test_autoreset.py",
        "test_backends.py", "test_batches.py", "test_env_state.py", "test_infos.py", "test_make.py",
        "test_masks.py", "test_mistakes.py", "test_protocol.py", "test_sends.py",
        "test_sync.py",
    ],
    "jit": ["jit"],
    "buffers: what they share": ["buffers/core"],
    "buffers: replay": ["buffers/replay"],
    "buffers: rollout": ["buffers/rollout"],
    "buffers: episodic": ["buffers/episodic"],
    "buffers: writer and trajectories": [
        "buffers/test_agent_rows.py", "buffers/test_trajectories.py", "buffers/test_writer.py",
    ],
    "buffers: data sets": ["buffers/datasets"],
    "learn": ["learn"],
    "timing": ["timing"],
    "agents": ["agents"],
    "wrappers": ["wrappers"],
    "port": ["port"],
}  # fmt: skip
PUBLIC = (
    "vecenv", "vecenv.adapters", "vecenv.agents", "vecenv.cage", "vecenv.cage.challenge2",
    "vecenv.cage.challenge4", "vecenv.check", "vecenv.compare", "vecenv.jit", "vecenv.jit.cuda",
    "vecenv.jit.envs", "vecenv.jit.random", "vecenv.learn", "vecenv.port", "vecenv.ray",
    "vecenv.timing", "vecenv.wrappers", "buffers", "buffers.datasets",
)  # fmt: skip
_KINDS = "(private: ", "; goes with `", "; goes with its mechanism: ", "; needs a public test"
_GOES_WITH = re.compile(r"; goes with (?:`(?P<test>[^`]+)`|its mechanism: .+)")
_LINE = re.compile(r"- (?P<claim>.+?) `(?P<test>tests/[^`]+)`(?P<rest>.*)")


class Behaviour(NamedTuple):
    """What a user sees, the test that holds it, and the private names that the test calls."""

    claim: str
    test: str
    private: tuple[str, ...]

    def line(self, rest: str = "") -> str:
        """Return the line of the list, followed by what was written by hand."""
        private = f" (private: {', '.join(self.private)})" if self.private else ""
        return f"- {self.claim} `{self.test}`{private}{rest}"


def main() -> int:
    """Compare the list with the tests, or write it; return 1 if they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write tests/BEHAVIOUR.md")
    options = parser.parse_args()
    found = {part: list(_find(paths)) for part, paths in PARTS.items()}
    tests = {behaviour.test for some in found.values() for behaviour in some}
    listed = _read()
    lost = [line for test, line in listed.items() if test not in tests]
    if options.write:
        FILE.write_text(_page(found, listed, lost))
        print(f"{FILE.relative_to(TESTS.parent)}: {len(tests)} lines, {len(lost)} without a test")
        return 0
    new = sorted(tests - listed.keys())
    for line in lost:
        print(f"no test holds this any more; write one, or move it under Gone: {line}")
    for test in new:
        print(f"not listed yet, python benchmarks/behaviours.py --write: {test}")
    wrong = [*_wrong_targets(listed)]
    print(*wrong, *_counts(found, listed), sep="\n")
    return 1 if lost or new or wrong else 0


def _wrong_targets(listed: dict[str, str]) -> Iterator[str]:
    """Yield an error for each line that goes with a test which is not listed, or goes itself."""
    for line in listed.values():
        goes = _GOES_WITH.search(line)
        if goes and goes["test"] and goes["test"] not in listed:
            yield f"the test that it goes with is not listed: {line}"
        elif goes and goes["test"] and _GOES_WITH.search(listed[goes["test"]]):
            yield f"the test that it goes with goes itself: {line}"


def _counts(found: dict[str, list[Behaviour]], listed: dict[str, str]) -> Iterator[str]:
    """Yield a line for each part of the library, and one for all."""
    parts = {part: [listed.get(one.test, "") for one in some] for part, some in found.items()}
    parts["all"] = [line for lines in parts.values() for line in lines]
    for part, lines in parts.items():
        private, tests, mechanisms, needs = (sum(kind in line for line in lines) for kind in _KINDS)
        yield (
            f"{part}: {len(lines)} lines, {private} private: {tests} go with a test, "
            f"{mechanisms} go with their mechanism, {needs} need a public test"
        )


def _find(paths: list[str]) -> Iterator[Behaviour]:
    for path in paths:
        target = TESTS / path
        for file in sorted(target.rglob("test_*.py")) if target.is_dir() else [target]:
            yield from _behaviours_of(file)


def _behaviours_of(file: Path) -> Iterator[Behaviour]:
    tree = ast.parse(file.read_text())
    imported = dict(_private_imports(tree))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            claim = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
            claim = re.split(r"(?<=[a-z)\]`\"])\. ", claim + " ")[0].strip().rstrip(".")
            claim = claim or node.name.removeprefix("test_").replace("_", " ")
            names = _global_names(node)
            private = sorted(imported[name] for name in names & imported.keys())
            test = f"tests/{file.relative_to(TESTS)}::{node.name}"
            yield Behaviour(claim[0].upper() + claim[1:] + ".", test, tuple(private))


def _global_names(test: ast.FunctionDef) -> set[str]:
    """Return the names that a test reads, but for its own variables and arguments."""
    names = [inner for inner in ast.walk(test) if isinstance(inner, ast.Name)]
    own = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    own |= {inner.arg for inner in ast.walk(test) if isinstance(inner, ast.arg)}
    return {name.id for name in names} - own


def _private_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that a file of tests takes from modules without public access to them."""
    public = _public_names()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {
            "vecenv",
            "buffers",
        }:
            for alias in node.names:
                if alias.name not in public and f"{node.module}.{alias.name}" not in PUBLIC:
                    yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _public_names() -> set[str]:
    if not _PUBLIC_NAMES:
        for name in PUBLIC:
            try:
                module = importlib.import_module(name)
            except ImportError:  # of an optional package
                continue
            _PUBLIC_NAMES.update(getattr(module, "__all__", ()))
    return _PUBLIC_NAMES


_PUBLIC_NAMES: set[str] = set()


def _read() -> dict[str, str]:
    """Return the lines of the list by their tests, but for those under "Gone"."""
    if not FILE.is_file():
        return {}
    text = FILE.read_text().partition("\n## Gone")[0]
    matches = (_LINE.fullmatch(line) for line in text.splitlines())
    return {match["test"]: match[0] for match in matches if match}


def _page(found: dict[str, list[Behaviour]], listed: dict[str, str], lost: list[str]) -> str:
    gone = FILE.read_text().partition("\n## Gone")[2] if FILE.is_file() else "\n"
    lines = ["# What a user sees", "", *(__doc__ or "").strip().splitlines()[5:]]
    if lost:
        lines += ["", "## Without a test", "", *lost]
    for part, behaviours in found.items():
        lines += ["", f"## {part[0].upper()}{part[1:]} ({len(behaviours)})", ""]
        for behaviour in behaviours:
            before = _LINE.fullmatch(listed.get(behaviour.test, ""))
            rest = re.sub(r"^ \(private: [^)]*\)", "", before["rest"]) if before else ""
            lines.append(behaviour.line(rest))
    return "\n".join(lines) + "\n\n## Gone" + gone


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent))
    sys.exit(main())
