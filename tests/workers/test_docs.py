import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "asynchronous.md"


def test_the_code_of_the_page_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    scope = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)
    assert scope["true_state"].shape == (3, 52)
    assert [half.num_envs for half in scope["halves"]] == [4, 4]
