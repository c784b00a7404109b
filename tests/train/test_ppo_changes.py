"""The changes of PPO in docs/ppo.md: each trains."""

import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from vecenv import SyncVectorEnv
from vecenv.learn import evaluate
from vecenv.train import ppo

pytestmark = [pytest.mark.snippets, pytest.mark.usefixtures("one_torch_thread")]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ppo.md").read_text(encoding="utf-8")
CHANGES = re.findall(r"```python\n(.*?)```", PAGE.split("## Change it")[1], re.S)
TRAINERS = {"cnn": "OwnCnn", "auxiliary loss": "Mirrored", "distribution": "OwnDistribution"}


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


IMAGE, POSITION = Box(0, 255, (20, 16, 3), np.uint8), Box(-1, 1, (4,), np.float32)
SPACES = {
    "cnn": (IMAGE, Discrete(3)),
    "auxiliary loss": (POSITION, Discrete(2)),
    "distribution": (POSITION, Box(np.float32([-1, 0]), np.float32([3, 5]))),
}


@pytest.mark.parametrize("name", SPACES)
def test_a_change_of_a_few_lines_trains(name):
    names = {}
    for code in CHANGES:
        exec(code, names)
    trainer_type = names[TRAINERS[name]]
    envs = SyncVectorEnv([lambda: Noise(*SPACES[name])] * 4)
    torch.manual_seed(1)
    options = ppo.Options(num_envs=4, num_steps=16, total_steps=1000, compile="off")
    trainer = trainer_type(options, envs)
    before = [parameter.detach().clone() for parameter in trainer.agent.parameters()]
    scalars = [trainer.update() for _ in range(3)][-1]
    pairs = zip(before, trainer.agent.parameters(), strict=True)
    assert not any(old.equal(new) for old, new in pairs), "each parameter is learned"
    assert ("losses/asymmetry" in scalars) == (name == "auxiliary loss")
    act = trainer.player(envs, trainer.agent, options)
    assert len(evaluate(act, envs, 20).returns) == 20
