"""The code on the documentation page runs."""

import re
from pathlib import Path

import pytest

from vecenv.fingerprint import is_jit_off

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(is_jit_off(), reason="takes too long without compiled code")
def test_the_page_about_cage2_runs(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "cage2.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 7
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/cage2.md", "exec"), scope)
    assert "total" in capsys.readouterr().out
    assert (tmp_path / "scores.json").is_file()
