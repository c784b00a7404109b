"""The import rules of the project, read from the syntax trees, and what `import vecenv` loads."""

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import vecenv

ROOT = Path(__file__).parents[1]
NEVER = {"vecenv": {"torch", "buffers"}, "buffers": set()}
FOUNDATION = ("vecenv.core.", "vecenv.files.")  # all that `buffers` imports of `vecenv`
COMPILES_FOR_DEVICES = "vecenv/core/cuda.py"  # alone knows numba-cuda and NVIDIA's packages
LEARN = "vecenv/learn/"  # imports torch; only trainers and, in functions, commands import it
TRAIN = "vecenv/train/"  # imports torch, `vecenv.learn` and, alone in `vecenv`, `buffers`
ON_DEVICES = "vecenv/jit/cuda/"  # imports torch too, in functions
AGENTS_ON_DEVICES = "vecenv/agents/compiled.py"  # and this, which is itself imported in a function
COMMAND = "vecenv/command/"  # imports these, in functions: trains, and plays what was trained
# Installed by an extra or not at all: inside functions of the one module that needs it.
OPTIONAL = {"ray", "matplotlib", "tensorboard", "pygame"}
OPTIONAL |= {"pettingzoo", "stable_baselines3", "tianshou", "torchrl", "tensordict", "minari"}
OPTIONAL |= {"h5py", "pyarrow"}
# Whose names users import from there.
PUBLIC_ROOMS = {"vecenv.adapters", "vecenv.cage", "vecenv.files", "vecenv.jit", "vecenv.jit.random"}
PUBLIC_ROOMS |= {"vecenv.agents", "vecenv.learn", "vecenv.port", "vecenv.train", "vecenv.wrappers"}
PUBLIC_ROOMS |= {"buffers.datasets"}
TRAINERS = {"cage2_defender", "cage4_defender", "dqn", "ppo", "ppo_agents", "r2d2", "sac"}
BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)  # what statements are in
TEST_ONLY = {"jaxtyping", "beartype", "pytest", "hypothesis"}


class Import(NamedTuple):
    module: str  # dotted; relative imports made absolute
    names: tuple[str, ...]  # of `from module import names`
    at_top: bool  # runs when the file is imported
    typing_only: bool  # under `if TYPE_CHECKING:`

    @property
    def root(self):
        return self.module.partition(".")[0]


def files_in(folder):
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py"))


def imports_of(file):
    folders = Path(file).parts[:-1]
    pending, found = [(ast.parse((ROOT / file).read_text()), True, False)], []
    while pending:
        node, at_top, typing_only = pending.pop()
        if isinstance(node, ast.Import):
            found += [Import(name.name, (), at_top, typing_only) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = folders[: len(folders) - node.level + 1] if node.level else ()
            module = ".".join((*start, node.module or "")).strip(".")
            names = tuple(name.name for name in node.names)
            found.append(Import(module, names, at_top, typing_only))
        at_top = at_top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_guard = isinstance(node, ast.If) and "'TYPE_CHECKING'" in ast.dump(node.test)
        inside = [child for child in ast.iter_child_nodes(node) if isinstance(child, BLOCKS)]
        pending += [(child, at_top, typing_only or is_guard) for child in inside]
    return found


@functools.cache
def all_imports():
    return {file: imports_of(file) for package in NEVER for file in files_in(package)}


def module_of(file):
    return ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")


def circle_in(edges):
    """A circle of a graph, as text; empty if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return ""


def test_imports_have_no_circles_and_flow_one_way_between_folders():
    """Imports inside functions and for type checkers count, as reading code follows them too.

    A folder is all its modules but `__init__`, which is its front: that may gather names of folders
    below. Modules at the top of a package are each for themselves.
    """
    modules = {module_of(file): file for file in all_imports()}
    rooms = {module: module for module in modules}
    for module, file in modules.items():
        if len(parts := Path(file).parts) > 2 and parts[-1] != "__init__.py":
            rooms[module] = f"{'/'.join(parts[:-1])}/"
    edges, room_edges, why = defaultdict(set), defaultdict(set), {}
    for file, imports in all_imports().items():
        importer = module_of(file)
        for found in imports:
            names = [f"{found.module}.{name}" for name in found.names] or [found.module]
            targets = {name if name in modules else found.module for name in names}
            for target in targets & modules.keys() - {importer}:
                edges[importer].add(target)
                if rooms[importer] != rooms[target]:
                    room_edges[rooms[importer]].add(rooms[target])
                    why[rooms[importer], rooms[target]] = f"{importer} imports {target}"
    assert circle_in(edges) == ""
    circle = circle_in(room_edges)
    assert circle == "", "; ".join(why[pair] for pair in pairwise(circle.split(" -> ")))


def test_packages_keep_apart_and_optional_ones_are_imported_in_functions_of_one_module():
    users = defaultdict(set)
    for file, imports in all_imports().items():
        package = Path(file).parts[0]
        with_torch = LEARN, TRAIN, ON_DEVICES, AGENTS_ON_DEVICES
        allowed = {"torch"} if file.startswith(with_torch) else set()
        allowed |= {"buffers"} if file.startswith(TRAIN) else set()
        assert not {found.root for found in imports} & (NEVER[package] - allowed), file
        if package == "buffers":
            above = {f"{i.module}." for i in imports if i.root == "vecenv"}
            assert all(module.startswith(FOUNDATION) for module in above), file
        learning = [i for i in imports if i.module.startswith(("vecenv.learn", "vecenv.train"))]
        may_learn = file.startswith((LEARN, TRAIN)) or (
            file.startswith(COMMAND) and not any(i.at_top for i in learning)
        )
        assert may_learn or not learning, file
        used = {found.root for found in imports if not found.typing_only}
        assert not used & TEST_ONLY, file
        at_top = {found.root for found in imports if found.at_top and not found.typing_only}
        assert not at_top & OPTIONAL, f"{file} imports them when it is imported"
        for name in used & OPTIONAL:
            users[package, name].add(file)
    assert {name: files for name, files in users.items() if len(files) > 1} == {}


def test_one_module_knows_numba_cuda():
    """It is imported by strings, as type checkers know nothing of it; these count, too."""
    known = re.compile(r"(numba_cuda|numba\.cuda|cuda)(\.\w+)*")
    files, users = [*all_imports(), *files_in("examples"), *files_in("benchmarks")], set()
    for file in files:
        if "cuda" not in (text := (ROOT / file).read_text()):
            continue
        named = {i.module for i in imports_of(file)}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("module"):
                named |= {one.value for one in node.args if isinstance(one, ast.Constant)}
        if any(known.fullmatch(str(name)) for name in named):
            users.add(file)
    assert users == {COMPILES_FOR_DEVICES}


def public_names(package):
    path = ROOT / package.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{package} has no __all__")


def test_examples_and_adapters_use_public_names():
    for file in files_in("examples") + files_in("vecenv/adapters"):
        for found in imports_of(file):
            if found.root in NEVER:
                assert found.module in {found.root, *PUBLIC_ROOMS}, f"{file}: {found.module}"
                modules = TRAINERS if found.module == "vecenv.train" else set()
                assert set(found.names) <= public_names(found.module) | modules, file


def test_cage_lives_on_the_kit_as_a_users_env_would():
    """Of the kit it imports public names only; the rest that it uses is the foundation."""
    rooms = {"vecenv.jit", "vecenv.jit.random", "vecenv.agents"}
    for file in files_in("vecenv/cage"):
        for found in imports_of(file):
            if found.module in rooms:
                assert set(found.names) <= public_names(found.module), file
            elif found.root in NEVER and not found.module.startswith("vecenv.cage"):
                is_policy = (found.module, found.names) == ("vecenv", ("load_policy",))
                assert f"{found.module}.".startswith(FOUNDATION) or is_policy, (file, found.module)


def test_importing_vecenv_loads_neither_optional_packages_nor_a_compiler():
    heavy = OPTIONAL | TEST_ONLY | {"torch", "buffers", "numba", "llvmlite", "multiprocess"}
    script = f"import sys, vecenv; print(sorted({heavy} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert loaded.stderr == ""
    assert loaded.stdout.strip() == "[]"


def test_what_buffers_import_of_vecenv_loads_neither_torch_nor_a_vector_env():
    script = """if True:
        import sys
        import vecenv.core.cuda
        print({"torch", "buffers", "numba_cuda"} & set(sys.modules))
        print(sorted({name.split(".")[1] for name in sys.modules if name.startswith("vecenv.")}))
    """
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.stderr == ""
    assert found.stdout.splitlines() == ["set()", "['core', 'machine', 'timing']"]


def test_packages_are_attributes_that_are_imported_when_asked_for():
    rooms = {room for room in PUBLIC_ROOMS if room.startswith("vecenv.") and room.count(".") == 1}
    script = f"import sys, vecenv; print({rooms} & set(sys.modules));"
    script += "print(vecenv.wrappers.VecWrapper.__name__, {'torch', 'numba'} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.stdout.splitlines() == ["set()", "VecWrapper set()"]
    assert {room.removeprefix("vecenv.") for room in rooms} <= set(dir(vecenv))


def test_a_package_whose_extra_is_missing_is_no_attribute():
    code = """if True:
        import inspect, sys
        sys.modules["torch"] = None
        import vecenv
        assert not hasattr(vecenv, "learn") and hasattr(vecenv, "wrappers")
        try:
            vecenv.learn
        except AttributeError as error:
            assert "needs torch" in str(error), error
    """
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
