"""The other libraries' side of docs/migrating.md, where they are installed.

Ours is run by tests/test_docs.py.
"""

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
BLOCK = re.compile(r"^```python title=\"before: (\w+)\"\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = BLOCK.findall(PAGE.read_text())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "code"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_the_code_before_runs(library, code):
    pytest.importorskip(library)
    importlib.import_module(library)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
