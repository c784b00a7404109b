"""Scripts of the CleanRL kind: with one import line changed they do the same."""

import sys
import types
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SCRIPT = Path(__file__).parent / "single_file.py"
IMPORT_LINE = "from gymnasium import vector\n"
CHANGED_LINE = "import vecenv as vector\n"


def load(*, changed):
    """The script as a module."""
    text = SCRIPT.read_text()
    assert text.count(IMPORT_LINE) == 1
    if changed:
        text = text.replace(IMPORT_LINE, CHANGED_LINE)
    module = types.ModuleType(f"script_{changed}")
    sys.modules[module.__name__] = module
    exec(compile(text, str(SCRIPT), "exec"), module.__dict__)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_number_is_the_same(asynchronous):
    agents, episodes = [], []
    for changed in (False, True):
        script = load(changed=changed)
        agent, ended = script.main(2, asynchronous)
        agents.append(agent.state_dict())
        episodes.append(ended)
    assert episodes[0] == episodes[1] and len(episodes[0]) > 30
    for name, tensor in agents[0].items():
        assert torch.equal(tensor, agents[1][name])
