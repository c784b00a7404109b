"""vecenv.train.ppo_agents: gradients with agents that die, masks, resuming, a solved toy."""

import sys
import types

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from vecenv import load_policy
from vecenv.learn import load_checkpoint
from vecenv.train import ppo_agents as ppo

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SMALL = {"num_games": 3, "num_steps": 16, "num_epochs": 2, "num_minibatches": 2, "compile": "off"}


class Game:
    """Agents draw their observations, earn what they chose, and die one by one."""

    spaces = Box(-1, 1, (3,), np.float32), Discrete(4, start=2)

    def __init__(self, num_agents=3, mortal=True, truncates=True):
        self.possible_agents = [f"unit_{k}" for k in range(num_agents)]
        self.mortal, self.truncates = mortal, truncates

    def observation_space(self, agent):
        return self.spaces[0]

    def action_space(self, agent):
        return self.spaces[1]

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
        self.time += 1
        self.draw()
        rewards = {agent: self.reward(agent, actions[agent]) for agent in acted}
        dies = [agent for agent in acted if self.mortal and self.rng.random() < 0.2]
        is_late = self.time == 7
        cut = dict.fromkeys(acted, is_late and self.truncates)
        ends = {agent: not cut[agent] and (is_late or agent in dies) for agent in acted}
        self.agents = [agent for agent in acted if not ends[agent] and not cut[agent]]
        observations = {agent: self.observe(agent) for agent in acted}
        return observations, rewards, ends, cut, {}

    def reward(self, agent, action):
        assert action in self.action_space(agent)
        return float(action) * (1 + self.possible_agents.index(agent)) + float(self.seen[1, 0])

    def close(self):
        pass


class Uneven(Game):
    """The last agent sees more and has fewer choices."""

    def observation_space(self, agent):
        return Box(-1, 1, (5 if agent == "unit_2" else 3,), np.float32)

    def action_space(self, agent):
        return Discrete(2) if agent == "unit_2" else Discrete(4)

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


def make_trainer(game, **changes):
    options = ppo.Options(**{"env": "a_game", "backend": "sync", **SMALL, **changes})
    torch.manual_seed(options.seed)
    envs = ppo.AgentsPPO.make_envs(options, options.num_games, on_device=True)
    return ppo.AgentsPPO(options, envs)


def lives(factory, trainer, learner):
    """Yield what each agent saw, did and earned in a life, played again without any vector env.

    Yields:
        obs (L + 1, ...), actions, rewards (L,), terminated.
    """
    rollout, num_agents = learner.rollout, learner.envs.group.num_agents
    for number in range(trainer.options.num_games):
        game = factory()
        obs, _ = game.reset(seed=trainer.options.seed + number)
        open_lives = {}
        resets_next = False
        for t in range(trainer.options.num_steps):
            if resets_next:
                obs, _ = game.reset()
                resets_next = False
                continue
            rows = {agent: number * num_agents + game.possible_agents.index(agent) for agent in obs}
            actions = {agent: int(rollout.actions[t, rows[agent]]) for agent in game.agents}
            for agent, action in actions.items():
                life = open_lives.setdefault(agent, ([obs[agent]], [], []))
                life[1].append(action)
            sent = {agent: action + 2 for agent, action in actions.items()}
            obs, rewards, ends, cuts, _ = game.step(sent)
            for agent in actions:
                seen, _, earned = open_lives[agent]
                seen.append(obs[agent])
                earned.append(rewards[agent])
                if ends[agent] or cuts[agent]:
                    yield *open_lives.pop(agent), ends[agent]
            resets_next = not game.agents
        for life in open_lives.values():
            yield *life, False


def living_rows(trainer, learner):
    """All steps of living agents, with advantages and returns by hand, one life after the other."""
    agent, options = learner.agent, trainer.options
    columns = {name: [] for name in ("obs", "actions", "advantages", "returns")}
    for obs, actions, rewards, terminated in lives(Game, trainer, learner):
        seen = torch.from_numpy(np.stack(obs))
        values = agent.value(agent.features(seen)).detach().double().tolist()
        values[-1] *= not terminated
        advantage, advantages = 0.0, []
        for t in reversed(range(len(rewards))):
            delta = rewards[t] + options.gamma * values[t + 1] - values[t]
            advantage = delta + options.gamma * options.gae_lambda * advantage
            advantages.insert(0, advantage)
        columns["obs"].append(seen[:-1])
        columns["actions"].append(torch.tensor(actions))
        columns["advantages"].append(torch.tensor(advantages))
        columns["returns"].append(torch.tensor(advantages) + torch.tensor(values[:-1]))
    return {name: torch.cat(parts) for name, parts in columns.items()}


def test_gradients_are_those_of_the_living_alone(as_module):
    env = as_module(Game)
    trainer = make_trainer(Game, env=env, num_epochs=0, num_games=5, num_steps=40)
    learner, options = trainer, trainer.options
    agent = learner.agent
    with torch.no_grad():  # so that policy and values depend on what they see
        for parameter in agent.parameters():
            parameter.add_(torch.randn_like(parameter) / 3)
    trainer.collect()
    learner.compute_advantages()
    (batch,) = learner.rollout.minibatches(1, fixed=True)
    scalars = learner.gradient(batch)
    found = [parameter.grad.clone() for parameter in agent.parameters()]

    rows = living_rows(trainer, learner)
    count = len(rows["actions"])
    assert count == learner.rollout.num_valid < 5 * 3 * 40 - 100, "many are dead"
    features = agent.features(rows["obs"])
    policy = agent.policy(features)
    log_probs = policy.log_prob(rows["actions"][:, None])
    values = agent.value(features)
    ratio = (log_probs - log_probs.detach()).exp()
    squares = (values - rows["returns"].float()).square()
    loss = options.value_weight * squares / 2 - ratio * rows["advantages"].float()
    loss = (loss - options.entropy_weight * policy.entropy()).mean()
    expected = torch.autograd.grad(loss, list(agent.parameters()))
    torch.testing.assert_close(scalars["loss"], loss.detach(), rtol=1e-4, atol=1e-5)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-3, atol=1e-5)


def test_agents_of_unequal_spaces_are_padded_and_learn_side_by_side(as_module, tmp_path):
    changes = {"total_steps": 300, "eval_episodes": 3, "save": tmp_path, "indicator": True}
    options = ppo.Options(env=as_module(Uneven), backend="sync", **{**SMALL, **changes})
    assert len(ppo.main(options).returns) == 3
    state = load_checkpoint(tmp_path / "checkpoint" / "last.pt")["state"]
    assert 150 < state["steps"] <= 300
    policy = load_policy(tmp_path)
    assert policy.observation_space.shape == (5 + 3,)
    assert policy(np.zeros((6, 8), np.float32), np.ones((6, 4))).shape == (6,)
