"""The rules of size and of compiled files that no linter knows."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = {"vecenv": 500, "buffers": 500, "examples": 400}
MAX_FUNCTION_LINES = 40
MAX_KERNEL_LINES = 80
COMPILED = {"njit", "jit", "vectorize", "guvectorize", "stencil", "cfunc"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files_in(*folders: str) -> list[str]:
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in found)


def decorators(node: Function | ast.ClassDef) -> set[str]:
    """Last part of each decorator's name: `@numba.njit(cache=True)` is `njit`."""
    called = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return {ast.unparse(name).rpartition(".")[2] for name in called}


def functions_in(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(function: Function) -> int:
    """Lines of a function, its docstring and decorators not counted."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring_lines = first.end_lineno - first.lineno + 1 if has_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring_lines


@pytest.mark.parametrize("file", files_in(*MAX_FILE_LINES))
def test_file_is_short(file):
    limit = MAX_FILE_LINES[Path(file).parts[0]]
    assert len((ROOT / file).read_text().splitlines()) <= limit


@pytest.mark.parametrize("file", files_in("vecenv", "buffers"))
def test_functions_are_short(file):
    too_long = {}
    for function in functions_in(ast.parse((ROOT / file).read_text())):
        is_compiled = bool(decorators(function) & COMPILED)
        limit = MAX_KERNEL_LINES if is_compiled else MAX_FUNCTION_LINES
        if length(function) > limit:
            too_long[function.name] = f"{length(function)} lines, at most {limit}"
    assert too_long == {}


@pytest.mark.parametrize("file", files_in("vecenv", "buffers"))
def test_compiled_and_plain_code_are_in_different_files(file):
    """Beside kernels a file may hold constants, what builds them, and NamedTuples; no more."""
    body = ast.parse((ROOT / file).read_text()).body
    functions = [node for node in body if isinstance(node, Function)]
    kernels = [node for node in functions if decorators(node) & COMPILED]
    if not kernels:
        return
    assigned = [ast.walk(node) for node in body if isinstance(node, ast.Assign | ast.AnnAssign)]
    builders = {name.id for nodes in assigned for name in nodes if isinstance(name, ast.Name)}
    plain = [n.name for n in functions if not decorators(n) and n.name not in builders]
    classes = [
        node.name
        for node in body
        if isinstance(node, ast.ClassDef)
        and not any(ast.unparse(base).endswith("NamedTuple") for base in node.bases)
    ]
    assert (plain, classes) == ([], []), f"move these away from {[k.name for k in kernels]}"
