"""Scripts of the CleanRL kind: with one import line changed they do the same."""

import sys
import types
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import vecenv

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


def test_what_an_older_script_must_change_means_the_same_in_both():
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    returns = 'infos["final_info"]["episode"]["r"][infos["_final_info"]]'
    last = 'infos["final_obs"][i]'
    assert f"`for r in {returns}:`" in page
    assert f"`{last}`" in page
    found = []
    for vector in (gym.vector, vecenv):
        makers = [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))] * 3
        mode = vector.AutoresetMode.SAME_STEP
        with closing(vector.SyncVectorEnv(makers, autoreset_mode=mode)) as envs:
            envs.reset(seed=1)
            seen = []
            for step in range(60):
                actions = np.full(3, step // 2 % 2)
                infos = envs.step(actions)[4]
                if "final_info" in infos:
                    ended = np.flatnonzero(infos["_final_info"])
                    seen += [(step, r) for r in eval(returns, {"infos": infos})]
                    seen += [(i, eval(last, {"infos": infos, "i": i}).tolist()) for i in ended]
        found.append(seen)
    assert found[0] == found[1]
    assert len(found[0]) >= 2
