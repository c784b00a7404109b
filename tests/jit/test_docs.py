import re
import sys
from pathlib import Path

import gymnasium as gym

from vecenv.fingerprint import is_jit_off

PAGE = Path(__file__).parents[2] / "docs" / "compiled_envs.md"
BLOCKS = re.compile(r"^(?:```python|<!-- setup)\n(.*?)^(?:```|-->)", re.DOTALL | re.MULTILINE)


def test_the_code_of_the_page_runs():
    blocks = BLOCKS.findall(PAGE.read_text())
    assert len(blocks) >= 6
    scope = {"__name__": "page"}
    try:
        for block in blocks:
            if is_jit_off() and ("KernelCompileError" in block or "KernelIndexError" in block):
                block = "import dataclasses"
            exec(compile(block, str(PAGE), "exec"), scope)
    finally:
        sys.modules.pop("warehouse", None)
        gym.registry.pop("Warehouse-v0", None)
    assert "windy" in scope and "warehouse" in scope
