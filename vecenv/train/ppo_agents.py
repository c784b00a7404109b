"""PPO for games with several agents.

    vecenv train agents:mpe2.simple_spread_v3

Agents of equal spaces are a group; each group has a policy, a rollout and an optimizer of its own.
It is learned by PPO, whose envs are the rows of the group's agents in all games.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, partialmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vecenv import make_vec_agents
from vecenv.agents import AgentRowsVecEnv, AgentsVecEnv
from vecenv.train import ppo
from vecenv.train.options import make_placed
from vecenv.train.ppo import Agent, ppo_loss
from vecenv.train.trainer import Trainer

__all__ = ["Agent", "AgentsPPO", "Options", "load_policy", "main", "ppo_loss"]


@dataclass
class Options(ppo.RolloutOptions):
    """Options of PPO of several agents."""

    env: str = "mpe2.simple_spread_v3"  # what make_vec_agents takes: an id, or a module
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)  # of the game
    policies: Literal["group", "agent"] = "group"  # one for agents of equal spaces, or one for each
    total_steps: int = 300_000  # steps of agents to train for, at most; 0 evaluates only
    num_games: int = 8  # games stepped side by side
    backend: str | None = None  # of the games, see vecenv.make_vec
    num_workers: int | None = None  # processes for the games (async)
    num_epochs: int = 8  # passes over the rollout in an update
    num_minibatches: int = 4  # gradient steps in a pass
    learning_rate: float = 2e-3  # of Adam at the start; it falls linearly to 0
    gamma: float = 0.95  # discount
    eval_episodes: int = 100  # games of the deterministic policies at the end


class AgentsPPO(Trainer):
    """Plays the games and lets each group learn from its rows; see `Trainer`.

    `make_agent(group, options)` makes the agent of a group, whose rows are like envs; `loss` is
    given that agent.

    Attributes:
        agent: `nn.ModuleList` of the agents of the groups, in their order.
        steps: Steps made by agents; those of dead ones do not count.
        learners: By group, PPO whose `envs` are the rows of its agents.
    """

    Options = Options
    make_agent = Agent
    loss = staticmethod(ppo_loss)
    MAY_CHANGE: ClassVar = Trainer.MAY_CHANGE | {"total_steps", "num_workers"}
    STATE = ("agent", "envs", "steps", "num_updates")
    NUM_RECENT: ClassVar = 100

    def __init__(self, options: Any, envs: Any, agent: Any = None) -> None:
        super().__init__(options, envs, agent)
        num_rows = sum(group.num_envs for group in envs.groups.values())
        self.rollout_steps, self.learners = options.num_steps * num_rows, dict[str, ppo.PPO]()
        self.start()
        for (name, group), one in zip(envs.groups.items(), self.agent, strict=True):
            start = partialmethod(ppo.PPO.start, self.obs[name])
            replaced: Any = {"loss": self.loss, "start": start, "collect": lambda learner: None}
            learner = ppo.PPO.replacing(**replaced)
            self.learners[name] = learner(options, group, one)
        self.is_captured = any(one.is_captured for one in self.learners.values())
        if self.is_captured:
            self.capture("collect")

    @classmethod
    def new_agent(cls, envs: AgentsVecEnv, options: Options) -> nn.ModuleList:
        """Make the agents of all groups on the device of the options."""
        made = [cls.make_agent(group, options) for group in envs.groups.values()]
        return nn.ModuleList(made).to(options.device)

    def start(self) -> None:
        """Reset all games, and begin rollouts."""
        self.obs, _ = self.envs.reset(seed=self.options.seed + self.steps)
        for name, learner in self.learners.items():
            learner.rollout.start(self.obs[name])

    @torch.inference_mode()
    def collect(self) -> None:
        """Step all games `num_steps` times."""
        learners = self.learners
        for learner in learners.values():
            learner.begin_rollout()
        for t in range(self.options.num_steps):
            actions = {name: one.act(t) for name, one in learners.items()}
            slots = {name: one.rollout.slot(t) for name, one in learners.items()}
            self.envs.step(actions, out=slots)
        for learner in learners.values():
            learner.end_rollout()

    def update(self) -> dict[str, float]:
        """Collect a rollout and learn from it; return scalars by group."""
        before, scalars, self.episodes = self.steps, dict[str, float](), []
        self.collect()
        for name, learner in self.learners.items():
            learner.steps = before  # at which its learning rate is
            scalars |= {f"{name}/{key}": value for key, value in learner.update().items()}
            self.steps += learner.steps - before
            if returns := learner.episodes:
                scalars[f"{name}/episodic_return"] = sum(returns) / len(returns)
            self.episodes += returns
        self.num_updates += 1
        return scalars

    def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint has, by its name there."""
        found = super().snapshot()
        for group, one in self.learners.items():
            parts = {"optimizer": one.optimizer, "rollout": one.rollout, "memory": one.memory}
            found |= {f"{group}/{k}": part for k, part in parts.items() if part is not None}
        return found

    @classmethod
    def make_envs(cls, options: Options, num_envs: int, *, on_device: bool = False) -> AgentsVecEnv:
        """Make the games; compiled ones where the networks are, if asked."""
        kwargs: Any = dict(options.env_kwargs)
        if options.policies == "agent":
            kwargs["groups"] = str  # each agent a group of its own name
        if options.num_workers is not None:
            kwargs["vector_kwargs"] = {"num_workers": options.num_workers}
        make = partial(make_vec_agents, options.env, **kwargs)
        envs = make_placed(make, options, num_envs, on_device=on_device)
        # One group is an ordinary vector env of its rows; here all goes by group.
        return envs.agents if isinstance(envs, AgentRowsVecEnv) else envs

    @staticmethod
    def player(envs: AgentsVecEnv, agent: Any, options: Options) -> Callable[..., Any]:
        """Return the likeliest actions, by group, as a function of observations by group.

        `envs` are asked for masks, and who has acted: a memory is of an agent's life.
        """
        groups = envs.groups.values()
        players = [ppo.PPO.player(*pair, options) for pair in zip(groups, agent, strict=True)]

        def act(obs: Any, starts: Tensor, *, sample: bool = False) -> dict[str, Any]:
            found = {}
            for group, play in zip(groups, players, strict=True):
                was_dead = torch.as_tensor(~group.valid, device=starts.device)
                begins = starts.repeat_interleave(group.num_agents) | was_dead
                found[group.name] = play(obs[group.name], begins, sample=sample)
            return found

        return act


load_policy, main = AgentsPPO.load_policy, AgentsPPO.main
