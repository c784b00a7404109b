"""The patches of docs/ppo.md: each applies to examples/ppo.py, is short, and trains."""

import re
import sys
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from vecenv import SyncVectorEnv

pytestmark = [pytest.mark.snippets, pytest.mark.usefixtures("one_torch_thread")]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ppo.md").read_text(encoding="utf-8")
NAMES = "cnn", "auxiliary loss", "distribution"
PATCHES = dict(zip(NAMES, re.findall(r"```diff\n(.*?)```", PAGE, re.S), strict=True))


class Noise(gym.Env):
    """Observations are noise; episodes of ten steps."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert action in self.action_space
        self.steps += 1
        reward = float(self.np_random.random())
        return self.observation_space.sample(), reward, self.steps == 10, False, {}


def patched(patch):
    """The example's source with the hunks of a patch in it."""
    source = (ROOT / "examples" / "ppo.py").read_text(encoding="utf-8")
    for hunk in re.split(r"^@@.*\n", patch, flags=re.M)[1:]:
        lines = hunk.splitlines()
        before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    return source


IMAGE, POSITION = Box(0, 255, (20, 16, 3), np.uint8), Box(-1, 1, (4,), np.float32)
SPACES = {
    "cnn": (IMAGE, Discrete(3)),
    "auxiliary loss": (POSITION, Discrete(2)),
    "distribution": (POSITION, Box(np.float32([-1, 0]), np.float32([3, 5]))),
}


@pytest.mark.parametrize("name", SPACES)
def test_a_change_of_ten_lines_trains(name, monkeypatch):
    patch = PATCHES[name]
    added = [line for line in patch.splitlines() if re.match(r"\+\s*\S", line)]
    assert len(added) <= 10
    ppo = types.ModuleType(f"ppo_with_{name.replace(' ', '_')}")
    monkeypatch.setitem(sys.modules, ppo.__name__, ppo)  # dataclasses look their module up
    exec(compile(patched(patch), ppo.__name__, "exec"), ppo.__dict__)
    envs = SyncVectorEnv([lambda: Noise(*SPACES[name])] * 4)
    torch.manual_seed(1)
    options = ppo.Options(num_envs=4, num_steps=16, total_steps=1000, compile="off")
    trainer = ppo.Trainer(options, envs, ppo.Agent(envs, options))
    before = [parameter.detach().clone() for parameter in trainer.agent.parameters()]
    scalars = [trainer.update() for _ in range(3)][-1]
    pairs = zip(before, trainer.agent.parameters(), strict=True)
    assert not any(old.equal(new) for old, new in pairs), "each parameter is learned"
    assert ("losses/asymmetry" in scalars) == (name == "auxiliary loss")
    result = ppo.evaluate_agent(envs, trainer.agent, options)
    assert len(result.returns) == 100
