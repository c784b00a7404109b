import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
LIBRARIES = {
    "stable-baselines3": "stable_baselines3",
    "TorchRL": "torchrl",
    "Tianshou": "tianshou",
    "RLlib": "gymnasium",
}
# A title names what a block needs; tests/test_docs.py runs those without.
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def has_rllib():
    try:
        importlib.import_module("ray.rllib")
    except ImportError:
        return False
    return True


def sections():
    parts = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_section_with_code_is_run():
    assert {name for name, text in sections().items() if BLOCK.search(text)} == set(LIBRARIES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LIBRARIES)
def test_the_code_of_the_page_runs(name):
    pytest.importorskip(LIBRARIES[name])
    scope = {"__name__": "page"}
    for title, block in BLOCK.findall(sections()[name]):
        if "ray" in title and not has_rllib():  # `ray` alone lacks what it needs
            continue
        exec(compile(block, str(PAGE), "exec"), scope)
    if name == "RLlib":
        assert scope["make_env"]({"num_envs": 3}).num_envs == 3
        assert not hasattr(scope["make_env"]({}), "num_envs")
