"""Every Python snippet of the documentation runs.

The blocks of a page run in order and share their names, in an empty folder. What a snippet needs
and a reader does not want to see stands before it in an HTML comment that begins with "setup".
Blocks that begin with ">>>" are compared with what they say is printed.
"""

import doctest
import json
import logging
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    for line, code in blocks(page):
        name = str(page.relative_to(ROOT))
        if code.startswith(">>>"):
            check_printed(code, scope, name, line)
        else:
            exec(compile("\n" * line + code, name, "exec"), scope)


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
