"""PPO for games with several agents: IPPO, or MAPPO with a central critic.

    vecenv train agents:mpe2.simple_spread_v3
    vecenv train agents:mpe2.simple_spread_v3 --critic central

Agents of equal spaces are a group; each group has a policy, a rollout and an optimizer of its own.
It is learned by PPO, whose envs are the rows of the group's agents in all games.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vecenv import make_vec_agents
from vecenv.agents import AgentGroup, AgentRowsVecEnv, AgentsVecEnv
from vecenv.train import ppo
from vecenv.train.options import make_placed
from vecenv.train.ppo import ppo_loss
from vecenv.train.trainer import Trainer

__all__ = ["Agent", "AgentsPPO", "Options", "load_policy", "main", "ppo_loss"]


@dataclass
class Options(ppo.RolloutOptions):
    """Options of PPO of several agents."""

    env: str = "mpe2.simple_spread_v3"  # what make_vec_agents takes: an id, or a module
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)  # of the game
    critic: Literal["own", "central"] = "own"  # sees what its agent does, or the game's state, too
    policies: Literal["group", "agent"] = "group"  # one for agents of equal spaces, or one for each
    indicator: bool = False  # tell a group's policy which of its agents it acts for
    total_steps: int = 300_000  # steps of agents to train for, at most; 0 evaluates only
    num_games: int = 8  # games stepped side by side
    backend: str | None = None  # of the games, see vecenv.make_vec
    num_workers: int | None = None  # processes for the games (async)
    num_epochs: int = 8  # passes over the rollout in an update
    num_minibatches: int = 4  # gradient steps in a pass
    learning_rate: float = 2e-3  # of Adam at the start; it falls linearly to 0
    gamma: float = 0.95  # discount
    eval_episodes: int = 100  # games of the deterministic policies at the end
    save: Path = Path("runs_agents")  # folder for checkpoints, learning curve and scalars


class Agent(ppo.Agent):
    """Actor and critic that the agents of a group share.

    Args:
        group: Its single spaces count, and how many agents it has.
        state_size: Numbers of the game's state, which a central critic sees; 0 for none.
        options: Those of `vecenv.train.ppo.Agent`, and `indicator`.

    Raises:
        OptionsError: A space is not supported.
    """

    def __init__(self, group: AgentGroup, state_size: int, options: Options) -> None:
        num_agents = group.num_agents if options.indicator else 0
        super().__init__(group, options, num_agents=num_agents, state_size=state_size)


class Team(dict[str, Any]):
    """Agents by group."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each agent, by group."""
        return {name: agent.state_dict() for name, agent in self.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Bring each agent into its state."""
        for name, agent in self.items():
            agent.load_state_dict(states[name])


class AgentsPPO(Trainer):
    """Plays the games and lets each group learn from its rows; see `Trainer`.

    `make_agent(group, state_size, options)` makes the agent of a group, and `loss` is given that.

    Args:
        options: How.
        envs: The games, the caller's to close; they are reset.
        agent: By group; None makes them.
        earlier: How gradients were computed, by group, in the run that goes on.

    Attributes:
        agent: Agents by group.
        steps: Steps made by agents; those of dead ones do not count.
        learners: By group, PPO whose `envs` are the rows of its agents.
        game: States of the games, float32 (G, S), for a central critic; else None.
    """

    Options = Options
    make_agent = Agent
    loss = staticmethod(ppo_loss)
    MAY_CHANGE: ClassVar = Trainer.MAY_CHANGE | {"total_steps", "num_workers"}
    STATE: ClassVar = ("agent", "envs", "steps", "num_updates", "game")
    NUM_RECENT: ClassVar = 100

    def __init__(self, options: Any, envs: Any, agent: Any = None, earlier: Any = None) -> None:
        super().__init__(options, envs, agent, earlier)
        num_rows = sum(group.num_envs for group in envs.groups.values())
        self.rollout_steps, self.game = options.num_steps * num_rows, None
        obs, own = self.reset(), {"loss": self.loss, "game": self.game}
        learner = ppo.PPO.replacing(reset=lambda one: obs[one.envs.name], **own)
        self.learners: dict[str, ppo.PPO] = {
            name: learner(options, group, self.agent[name], (earlier or {}).get(name))
            for name, group in envs.groups.items()
        }
        self.is_captured = all(one.is_captured for one in self.learners.values())
        if self.is_captured:
            self.capture("collect")

    @classmethod
    def new_agent(cls, envs: AgentsVecEnv, options: Options) -> Team:
        """Make the agents of all groups on the device of the options."""
        size = 0
        if options.critic == "central":
            envs.reset()
            size = envs.state()[0].size
        made = {k: cls.make_agent(group, size, options) for k, group in envs.groups.items()}
        return Team({name: agent.to(options.device) for name, agent in made.items()})

    def reset(self) -> dict[str, Any]:
        """Reset all games; return observations by group."""
        obs, _ = self.envs.reset(seed=self.options.seed + self.steps)
        self.look()
        return obs

    def start(self) -> None:
        """Reset all games, and begin rollouts."""
        obs = self.reset()
        for name, learner in self.learners.items():
            learner.rollout.start(obs[name])

    def look(self) -> None:
        """Take note of the games' states for a central critic, in memory that stays."""
        if self.options.critic == "central":
            found = torch.as_tensor(self.envs.state()).flatten(1).float().to(self.options.device)
            self.game = found.clone() if self.game is None else self.game.copy_(found)

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
            self.look()
        for learner in learners.values():
            learner.end_rollout()

    def update(self) -> dict[str, float]:
        """Collect a rollout and learn from it; return scalars by group."""
        before, scalars, self.episodes = self.steps, dict[str, float](), []
        self.collect()
        for name, learner in self.learners.items():
            self.steps -= learner.steps
            means = learner.improve(before)
            self.steps += learner.steps
            if returns := learner.episodes:
                scalars[f"{name}/episodic_return"] = sum(returns) / len(returns)
            scalars |= {f"{name}/{key}": value for key, value in means.items()}
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

    def describe(self) -> dict[str, Any]:
        """Return how gradients are computed, by group."""
        return {name: learner.gradient.describe() for name, learner in self.learners.items()}

    @classmethod
    def make_envs(cls, options: Options, num_envs: int, *, on_device: bool = False) -> AgentsVecEnv:
        """Make the games; compiled ones where the networks are, if asked."""
        kwargs: Any = dict(options.env_kwargs)
        if options.policies == "agent":
            kwargs["groups"] = str  # each agent a group of its own name
        if options.critic == "central":
            kwargs["central_state"] = True
        if options.num_workers is not None:
            kwargs["vector_kwargs"] = {"num_workers": options.num_workers}

        def make(num_games: int, **where: Any) -> Any:
            return make_vec_agents(options.env, num_games, **where, **kwargs)

        envs = make_placed(make, options, num_envs, on_device=on_device)
        # One group is an ordinary vector env of its rows; here all goes by group.
        return envs.agents if isinstance(envs, AgentRowsVecEnv) else envs

    @staticmethod
    def player(
        envs: AgentsVecEnv, agent: Mapping[str, ppo.Agent], options: Options
    ) -> Callable[..., dict[str, Any]]:
        """Return the likeliest actions, by group, as a function of observations by group.

        `envs` are asked for masks, and who has acted: a memory is of an agent's life.
        """
        groups = envs.groups
        players = {k: ppo.PPO.player(groups[k], one, options) for k, one in agent.items()}

        def act(obs: Any, starts: Tensor, *, sample: bool = False) -> dict[str, Any]:
            found = {}
            for name, play in players.items():
                was_dead = torch.as_tensor(~groups[name].valid, device=starts.device)
                begins = starts.repeat_interleave(groups[name].num_agents) | was_dead
                found[name] = play(obs[name], begins, sample=sample)
            return found

        return act


load_policy, main = AgentsPPO.load_policy, AgentsPPO.main
