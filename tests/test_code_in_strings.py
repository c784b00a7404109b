"""The programs that tests and benchmarks keep in strings, which no linter reads."""

import ast
import builtins
import contextlib
import importlib
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [path for name in ("tests", "benchmarks") for path in sorted((ROOT / name).rglob("*.py"))]
OURS = ("vecenv", "buffers")


def programs_in(path):
    """Syntax trees of strings in a file that import something; what is filled in is `None`."""
    for node in ast.walk(ast.parse(path.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        values = [part.value if isinstance(part, ast.Constant) else "None" for part in parts]
        code = "".join(value for value in values if isinstance(value, str))
        if "import " in code:
            with contextlib.suppress(SyntaxError):  # of prose, and of parts of programs
                yield ast.parse(textwrap.dedent(code))


def names_in(program):
    """Names that a program reads, and those that it binds in whatever scope or need not bind."""
    read, bound = set(), {*vars(builtins), "__file__"}
    for node in ast.walk(program):
        match node:
            case ast.Set(elts=[ast.Name(id=name)]):  # `{name}`, which `str.format` fills in
                bound.add(name)
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.ImportFrom(module=module, names=[ast.alias(name="*")]):
                found = importlib.import_module(module)
                bound |= set(getattr(found, "__all__", vars(found)))
            case ast.alias(name=name, asname=other):
                bound.add((other or name).split(".")[0])
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.ExceptHandler(name=name) | ast.MatchAs(name=name):
                bound.add(name)
    return read, bound


def imports_in(program):
    """What a program imports from the project, as (module, name or None)."""
    for node in ast.walk(program):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in OURS:
            yield from ((node.module, name.name) for name in node.names if name.name != "*")
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names]
            yield from ((name, None) for name in names if name.split(".")[0] in OURS)


def is_there(module, name):
    """Whether a module of the project has the name, or a folder the module; True if it is None."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        return not str(error.name).startswith(OURS)  # it needs a package that isn't installed
    return name is None or hasattr(found, name) or is_there(f"{module}.{name}", None)


def test_programs_in_strings_import_what_is_there_and_read_what_they_bind():
    """Those of slow tests would otherwise be found late. Programs are also put together, so names
    count that another string of the file binds.
    """
    stale, num_programs = [], 0
    for path in FILES:
        file, unbound, bound = path.relative_to(ROOT), set(), set()
        for program in programs_in(path):
            num_programs += 1
            names = names_in(program)
            unbound, bound = unbound | names[0], bound | names[1]
            imports = [found for found in imports_in(program) if not is_there(*found)]
            stale += [f"{file} imports {name} of {module}" for module, name in imports]
        stale += [f"{file} reads {name}" for name in sorted(unbound - bound)]
    assert stale == []
    assert num_programs > 80
