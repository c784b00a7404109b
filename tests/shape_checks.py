"""Check the shapes and dtypes in array annotations while the tests run.

The package never imports jaxtyping. A module that wants its annotations checked writes

    from __future__ import annotations

    if TYPE_CHECKING:
        from jaxtyping import Float32

annotates with `Float32[np.ndarray, "envs obs"]`, and is listed in pyproject.toml under
`[tool.vecenv] shape-checked-modules`. An import hook lets those imports happen for the listed
modules and wraps each of their functions in jaxtyping's checker. (jaxtyping's own hook needs the
import at run time, which would cost every user 50 ms and a dependency.)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

CHECKER = "__import__('jaxtyping').jaxtyped(typechecker=__import__('beartype').beartype)"


def install(modules: Iterable[str]) -> None:
    """Check the functions of `modules` (dotted names) from their first import on."""
    modules = frozenset(modules)
    if early := sorted(modules & sys.modules.keys()):
        raise RuntimeError(f"{early} imported before the shape checks; install them earlier")
    sys.meta_path.insert(0, _CheckedFinder(modules))


class _CheckedFinder(MetaPathFinder):
    def __init__(self, modules: frozenset[str]) -> None:
        self.modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        if fullname not in self.modules:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _CheckedLoader(spec.loader.name, spec.loader.path)
        return spec


class _CheckedLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)  # bypasses the bytecode cache

    def source_to_code(self, data: Any, path: Any, **_: Any) -> Any:
        tree = _AddChecks().visit(ast.parse(data, path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _AddChecks(ast.NodeTransformer):
    """Run the jaxtyping imports that are kept for type checkers; decorate every function."""

    def visit_If(self, node: ast.If) -> Any:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            return self.generic_visit(node)
        imports = [statement for statement in node.body if isinstance(statement, ast.ImportFrom)]
        return [node, *(found for found in imports if found.module == "jaxtyping")]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        self.generic_visit(node)
        checker = ast.parse(CHECKER, mode="eval").body
        node.decorator_list.append(ast.copy_location(checker, node))  # innermost: sees the function
        return node
