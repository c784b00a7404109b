import re
from pathlib import Path

from vecenv.fingerprint import is_jit_off

PAGE = Path(__file__).parents[2] / "docs" / "compiled_envs.md"


def test_the_code_of_the_page_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 6
    scope = {"__name__": "page"}
    for block in blocks:
        if is_jit_off() and "KernelCompileError" in block:
            block = "import dataclasses"
        exec(compile(block, str(PAGE), "exec"), scope)
    assert "windy" in scope
