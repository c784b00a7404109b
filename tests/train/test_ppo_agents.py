"""vecenv.train.ppo_agents: games whose agents die, and unequal spaces."""

import sys
import types

import numpy as np
import pytest
import torch
from agents.games import Game
from gymnasium.spaces import Box, Discrete

from vecenv import load_policy
from vecenv.learn import load_checkpoint
from vecenv.train import ppo_agents as ppo

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SMALL = {"num_games": 3, "num_steps": 16, "num_epochs": 2, "num_minibatches": 2, "compile": "off"}


class Dying(Game):
    """Agents draw their observations, earn what they chose, and die one by one."""

    num_acted = 0
    possible_agents = [f"unit_{k}" for k in range(3)]
    _spaces = dict.fromkeys(possible_agents, (Box(-1, 1, (3,), np.float32), Discrete(4, start=2)))

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.time = list(self.possible_agents), 0
        self.draw()
        return {agent: self.observe(agent) for agent in self.agents}, {}

    def draw(self):
        self.seen = self.rng.uniform(-1, 1, (2, 3)).astype(np.float32)

    def observe(self, agent):
        return self.seen[0] * (1 + self.possible_agents.index(agent)) / 5

    def step(self, actions):
        acted = list(self.agents)
        assert set(actions) == set(acted)
        Dying.num_acted += len(acted)
        self.time += 1
        self.draw()
        rewards = {agent: self.reward(agent, actions[agent]) for agent in acted}
        dies = [agent for agent in acted if self.rng.random() < 0.2]
        cut = dict.fromkeys(acted, self.time == 7)
        ends = {agent: not cut[agent] and agent in dies for agent in acted}
        self.agents = [agent for agent in acted if not ends[agent] and not cut[agent]]
        observations = {agent: self.observe(agent) for agent in acted}
        return observations, rewards, ends, cut, {}

    def reward(self, agent, action):
        assert action in self.action_space(agent)
        return float(action) * (1 + self.possible_agents.index(agent)) + float(self.seen[1, 0])


def test_steps_of_dead_agents_are_not_learned_from(as_module):
    """Rows that count, and their returns: tests/buffers/rollout/test_agent_rows.py."""
    trainer = make_trainer(env=as_module(Dying), num_games=5, num_steps=40)
    Dying.num_acted = 0
    trainer.collect()
    trainer.compute_advantages()
    rollout = trainer.rollout
    assert Dying.num_acted == rollout.num_valid < 5 * 3 * 40 - 100, "many are dead"
    (batch,) = rollout.minibatches(1, fixed=True)
    assert batch.weights.sum() == rollout.num_valid
    scalars = trainer.gradient(batch)
    kept = batch.weights > 0
    own = batch._replace(**{name: column[kept] for name, column in batch._asdict().items() if
                            torch.is_tensor(column)})  # fmt: skip
    torch.testing.assert_close(scalars["loss"], trainer.gradient(own)["loss"])


class Uneven(Dying):
    """The last agent sees more and has fewer choices."""

    _spaces = dict.fromkeys(Dying.possible_agents, (Box(-1, 1, (3,), np.float32), Discrete(4)))
    _spaces["unit_2"] = Box(-1, 1, (5,), np.float32), Discrete(2)

    def observe(self, agent):
        return np.resize(self.seen[0], 5 if agent == "unit_2" else 3)


@pytest.fixture
def as_module(monkeypatch):
    """A module of games, as `--env` names it."""

    def make(game):
        module = types.ModuleType("a_game")
        module.parallel_env = game
        monkeypatch.setitem(sys.modules, "a_game", module)
        return "a_game"

    return make


def make_trainer(**changes):
    options = ppo.Options(**{"backend": "sync", **SMALL, **changes})
    torch.manual_seed(options.seed)
    envs = ppo.AgentsPPO.make_envs(options, options.num_games, on_device=True)
    return ppo.AgentsPPO(options, envs)


def test_agents_of_unequal_spaces_are_padded_and_learn_side_by_side(as_module, tmp_path):
    changes = {"total_steps": 300, "eval_episodes": 3, "save": tmp_path, "indicator": True}
    options = ppo.Options(env=as_module(Uneven), backend="sync", **{**SMALL, **changes})
    assert len(ppo.main(options).returns) == 3
    state = load_checkpoint(tmp_path / "checkpoint" / "last.pt")["state"]
    assert 150 < state["steps"] <= 300
    policy = load_policy(tmp_path)
    assert policy.observation_space.shape == (5 + 3,)
    assert policy(np.zeros((6, 8), np.float32), np.ones((6, 4))).shape == (6,)
