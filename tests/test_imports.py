"""The import rules of the project, read from the syntax trees, and what `import vecenv` loads."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
NEVER = {"vecenv": {"torch", "buffers"}, "buffers": {"vecenv"}}
# Installed by an extra or not at all: inside functions of the one module that needs it.
OPTIONAL = {"ray", "matplotlib", "tensorboard", "pygame"}
OPTIONAL |= {"stable_baselines3", "tianshou", "torchrl", "tensordict", "minari"}
# Whose names users import from there.
PUBLIC_ROOMS = {"vecenv.adapters", "vecenv.cage", "vecenv.files", "vecenv.jit", "vecenv.jit.random"}
TEST_ONLY = {"jaxtyping", "beartype", "pytest", "hypothesis"}
# Imports flow from later rows to earlier ones, and within a row only as WITHIN_ROW says: ray
# spreads any backend, cage is a compiled environment. Modules not named here are not ordered.
ROWS = (
    {"core"},
    {"sync", "workers", "jit", "cage", "ray"},
    {"make", "check", "compare", "adapters", "cli"},
)
WITHIN_ROW = {
    "ray": {"sync", "workers", "jit", "cage"},
    "cage": {"jit"},
    "workers": {"jit", "sync"},
    "compare": {"make"},
    "cli": ROWS[2],
}
WORKERS_ORDER = ("layout", "arena", "worker", "env")


class Import(NamedTuple):
    module: str  # dotted; relative imports made absolute
    names: tuple[str, ...]  # of `from module import names`
    at_top: bool  # runs when the file is imported
    typing_only: bool  # under `if TYPE_CHECKING:`


def files_in(folder: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py"))


def imports_of(file: str) -> Iterator[Import]:
    folders = Path(file).parts[:-1]
    pending = [(ast.parse((ROOT / file).read_text()), True, False)]
    while pending:
        node, at_top, typing_only = pending.pop()
        if isinstance(node, ast.Import):
            yield from (Import(name.name, (), at_top, typing_only) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = folders[: len(folders) - node.level + 1] if node.level else ()
            module = ".".join((*start, node.module or "")).strip(".")
            yield Import(module, tuple(name.name for name in node.names), at_top, typing_only)
        at_top = at_top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_guard = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        pending += [(c, at_top, typing_only or is_guard) for c in ast.iter_child_nodes(node)]


def roots_of(file: str, *, at_top: bool = False, with_typing: bool = True) -> set[str]:
    return {
        found.module.partition(".")[0]
        for found in imports_of(file)
        if (found.at_top or not at_top) and (with_typing or not found.typing_only)
    }


def rooms_of(file: str, depth: int) -> set[str]:
    """The modules or folders of vecenv, `depth` dots down, that a file imports from."""
    modules = set()
    for found in imports_of(file):
        for module in (found.module, *(f"{found.module}.{name}" for name in found.names)):
            parts = module.split(".")
            if parts[0] == "vecenv" and len(parts) > depth and not found.typing_only:
                modules.add(parts[depth])
    return modules


@pytest.mark.parametrize("file", files_in("vecenv") + files_in("buffers"))
def test_packages_keep_apart(file):
    assert not roots_of(file) & NEVER[Path(file).parts[0]]
    assert not roots_of(file, with_typing=False) & TEST_ONLY


@pytest.mark.parametrize("package", ["vecenv", "buffers"])
def test_optional_packages_are_imported_inside_functions_of_one_module(package):
    users = defaultdict(set)
    for file in files_in(package):
        at_top = roots_of(file, at_top=True, with_typing=False) & OPTIONAL
        assert not at_top, f"{file} imports {at_top} when it is imported"
        for name in roots_of(file, with_typing=False) & OPTIONAL:
            users[name].add(file)
    assert {name: files for name, files in users.items() if len(files) > 1} == {}


@pytest.mark.parametrize("file", files_in("vecenv"))
def test_imports_flow_one_way(file):
    room = Path(file).with_suffix("").parts[1]
    row = next((i for i, names in enumerate(ROWS) if room in names), None)
    if row is None:
        return
    later = set().union(*ROWS[row:]) - {room} - WITHIN_ROW.get(room, set())
    assert not rooms_of(file, 1) & later


@pytest.mark.parametrize("name", WORKERS_ORDER)
def test_workers_imports_flow_one_way(name):
    file = f"vecenv/workers/{name}.py"
    if (ROOT / file).exists():
        later = set(WORKERS_ORDER[WORKERS_ORDER.index(name) + 1 :])
        assert not rooms_of(file, 2) & later


def public_names(package: str) -> set[str]:
    path = ROOT / package.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{package}/__init__.py has no __all__")


@pytest.mark.parametrize("file", files_in("examples") + files_in("vecenv/adapters"))
def test_examples_and_adapters_use_public_names(file):
    for found in imports_of(file):
        package = found.module.partition(".")[0]
        if package in NEVER:
            assert found.module in {package, *PUBLIC_ROOMS}, f"{found.module} is not public"
            assert set(found.names) <= public_names(found.module)


def test_importing_vecenv_loads_neither_optional_packages_nor_a_compiler():
    heavy = OPTIONAL | TEST_ONLY | {"torch", "buffers", "numba", "llvmlite", "multiprocess"}
    script = f"import sys, vecenv; print(sorted({heavy} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert loaded.stderr == ""
    assert loaded.stdout.strip() == "[]"


def test_both_packages_put_signals_off_alike():
    """Neither may import the other; what is mended in one is mended in both."""
    texts = [
        (ROOT / folder / "interrupts.py").read_text() for folder in ("vecenv/core", "buffers/core")
    ]
    first, second = (text.partition("from __future__")[2] for text in texts)
    assert first == second != ""
