"""Every Python snippet of the documentation runs.

The blocks of a page run in order and share their names, in an empty folder. What a snippet needs
and a reader does not want to see stands before it in an HTML comment that begins with "setup".
Blocks that begin with ">>>" are compared with what they say is printed.
"""

import ast
import doctest
import importlib
import json
import logging
import re
from pathlib import Path

import pytest

import buffers
import vecenv.cage
import vecenv.compare
import vecenv.jit
import vecenv.timing
import vecenv.wrappers

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^```python\n(?P<shown>.*?)^```$|^<!-- setup\n(?P<hidden>.*?)^-->$", re.M | re.S
)


def blocks(page):
    """Return (first line, code) of every block of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, found.start(found.lastgroup)), found[found.lastgroup])
        for found in BLOCK.finditer(text)
    ]


WITH_CODE = [page for page in PAGES if blocks(page)]
COMPILING = (
    "agents_learning.md",
    "cage2.md",
    "cage2_network.md",
    "cage4.md",
    "compiled_envs.md",
    "compiled_games.md",
    "migrating.md",
)  # for many seconds
SNIPPETS = [
    pytest.param(page, marks=pytest.mark.slow) if page.name in COMPILING else page
    for page in WITH_CODE
]
OURS = ("vecenv", "buffers")
DESCRIBED = [  # by the API pages: modules, and classes and functions of modules
    name
    for page in (ROOT / "docs" / "api").glob("*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.M)
]


@pytest.mark.snippets
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("page", SNIPPETS, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    for line, code in blocks(page):
        name = str(page.relative_to(ROOT))
        if page.name not in COMPILING:  # what is learned is tested by slow tests alone
            code = re.sub(r"(?m)^for update in range\(\d+\)", "for update in range(2)", code)
        if code.startswith(">>>"):
            check_printed(code, scope, name, line)
        else:
            exec(compile("\n" * line + code, name, "exec"), scope)


def imports(page):
    """Yield (line, module, name) of what the blocks of a page import from this project."""
    for line, code in blocks(page):
        if code.startswith(">>>"):
            code = "".join(example.source for example in doctest.DocTestParser().get_examples(code))
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in OURS:
                for alias in node.names:
                    yield line + node.lineno, node.module, alias.name


def test_what_the_docs_import_is_public():
    """It is in `__all__` of a package that the API pages describe."""
    for page in WITH_CODE:
        for line, module, name in imports(page):
            where = f"{page.name}:{line}: from {module} import {name}"
            assert any(x == module or x.startswith(f"{module}.") for x in DESCRIBED), where
            is_module = any(x.startswith(f"{module}.{name}.") for x in DESCRIBED)
            assert is_module or name in importlib.import_module(module).__all__, where


def test_names_in_the_text_of_the_docs_exist():
    for page in PAGES:
        for path in re.findall(
            r"`((?:vecenv|buffers)(?:\.\w+)+)", page.read_text(encoding="utf-8")
        ):
            found = importlib.import_module(path.split(".")[0])
            for number, name in enumerate(path.split(".")[1:], 2):
                if not hasattr(found, name):
                    importlib.import_module(".".join(path.split(".")[:number]))
                found = getattr(found, name)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    notebook = json.loads((ROOT / "docs" / "first_ten_minutes.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    scope = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        assert cell["outputs"] or cell["execution_count"], "a notebook is committed as it ran"
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), scope)


def check_printed(code, scope, name, line):
    example = doctest.DocTestParser().get_doctest(code, scope, name, name, line)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    printed = []
    runner.run(example, out=printed.append, clear_globs=False)
    assert not runner.failures, "".join(printed)


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchor(title):
    """The anchor of a heading, as Python-Markdown and GitHub make it."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", shown).strip().lower())


def dead_links(page):
    """Links that lead to no file or heading, or from the site (docs/) to what is not on it."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"", without_code(text))
    for link in (one or other for one, other in links):
        if re.match(r"\w+:", link):
            continue  # to elsewhere
        name, _, part = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        is_on_site = page.parent.is_relative_to(ROOT / "docs")
        if not target.exists() or (is_on_site and not target.is_relative_to(ROOT / "docs")):
            yield link
        elif part:
            titles = re.findall(r"^#+ (.*)$", without_code(target.read_text()), flags=re.M)
            if part not in map(anchor, titles):
                yield link


LINKING = [
    *PAGES,
    *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CODE_OF_CONDUCT", "SECURITY")),
    ROOT / "docs" / "first_ten_minutes.ipynb",
]


def test_links_lead_somewhere():
    assert {
        str(page.relative_to(ROOT)): found for page in LINKING if (found := [*dead_links(page)])
    } == {}
    assert anchor("Stepping: `SyncVectorEnv`, Gymnasium's") == "stepping-syncvectorenv-gymnasiums"


def test_files_named_in_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.findall(r"\b(?:vecenv|buffers|tests|benchmarks|examples)/[\w/]*(?:\.\w+)?", text)
    assert len(found) > 40  # the walks
    assert [path for path in found if not (ROOT / path).exists()] == []


def test_the_map_in_contributing_has_every_file_and_folder_of_the_packages():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for package in ("vecenv", "buffers"):
        rows = re.search(rf"^\| `{package}/` \| \|\n(?:\|.*\n)+", text, re.M)[0]
        places = {
            path.name + "/" * path.is_dir()
            for path in (ROOT / package).iterdir()
            if path.name not in ("__init__.py", "__pycache__", "py.typed")
        }
        cells = [row.split("|")[1] for row in rows.splitlines()[1:]]
        assert set(re.findall("`(.+?)`", " ".join(cells))) == places


def test_every_page_is_in_the_navigation():
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.M)
    pages = sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[2:])
    assert sorted(listed) == pages


def test_every_public_name_has_its_place_in_the_api():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^::: ([\w.]+)$", pages, flags=re.M))
    for owner, members in re.findall(
        r"^::: ([\w.]+)\n(?: +.*\n)*? +members: \[(.*)\]", pages, flags=re.M
    ):
        shown |= {f"{owner}.{member}" for member in members.split(", ")}
    packages = [vecenv, vecenv.cage, vecenv.compare, vecenv.jit, vecenv.timing, buffers]
    packages.append(vecenv.wrappers)
    public = {f"{package.__name__}.{name}" for package in packages for name in package.__all__}
    assert public - shown <= {"vecenv.AutoresetMode"}
