"""PPO for games with several agents: IPPO, or MAPPO with a central critic.

    vecenv train agents:mpe2.simple_spread_v3
    vecenv train agents:mpe2.simple_spread_v3 --critic central

Agents of equal spaces are a group; each group has a policy, a rollout and an optimizer of its own.
It is learned by PPO, whose envs are the rows of the group's agents in all games.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vecenv import make_vec_agents
from vecenv.agents import AgentGroup, AgentRowsVecEnv, AgentsVecEnv
from vecenv.learn import load_checkpoint, load_weights
from vecenv.train import ppo
from vecenv.train.options import placed
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


class AgentsPPO(Trainer):
    """Plays the games and lets each group learn from its rows; see `Trainer`.

    `make_agent(group, state_size, options)` makes the agent of a group, and `loss` is given that.

    Args:
        options: How.
        envs: The games, the caller's to close; they are reset.
        agent: Not used: each group has one.
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
    MAY_CHANGE: ClassVar = Trainer.MAY_CHANGE | {"total_steps", "eval_episodes", "num_workers"}
    STATE: ClassVar = ("envs", "steps", "num_updates", "game")
    NUM_RECENT: ClassVar = 100

    def __init__(
        self, options: Options, envs: AgentsVecEnv, agent: Any = None, earlier: Any = None
    ) -> None:
        super().__init__(options, envs, agent or {}, earlier)
        self.game: Tensor | None = None
        num_rows = sum(group.num_envs for group in envs.groups.values())
        self.rollout_steps = options.num_steps * num_rows
        obs = self.reset()
        make, size = self.make_agent, 0 if self.game is None else self.game.shape[1]
        learner = ppo.PPO.replacing(
            make_agent=lambda group, options: make(group, size, options), loss=self.loss
        )
        self.learners: dict[str, ppo.PPO] = {
            name: learner(
                options, group, None, (earlier or {}).get(name), obs=obs[name], game=self.game
            )
            for name, group in envs.groups.items()
        }
        self.agent = {name: one.agent for name, one in self.learners.items()}
        self.is_captured = all(one.is_captured for one in self.learners.values())
        if self.is_captured:
            self.capture("collect")

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
        for learner in self.learners.values():
            learner.begin_rollout()
        for t in range(self.options.num_steps):
            actions = {k: learner.act(t) for k, learner in self.learners.items()}
            slots = {k: learner.rollout.slot(t) for k, learner in self.learners.items()}
            self.envs.step(actions, out=slots)
            self.look()
        for learner in self.learners.values():
            learner.end_rollout()

    def update(self) -> dict[str, float]:
        """Collect a rollout and learn from it; return scalars by group."""
        before, scalars, self.episodes = self.steps, dict[str, float](), []
        self.collect()
        for name, learner in self.learners.items():
            self.steps -= learner.steps
            means = learner.improve(before)
            self.steps += learner.steps
            if learner.episodes:
                mean = sum(learner.episodes) / len(learner.episodes)
                scalars[f"{name}/episodic_return"] = mean
            scalars |= {f"{name}/{key}": value for key, value in means.items()}
            self.episodes += learner.episodes
        self.num_updates += 1
        return scalars

    def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint has, by its name there."""
        names = "agent", "optimizer", "rollout", "memory"
        found = super().snapshot()
        for group, learner in self.learners.items():
            parts = {f"{group}/{name}": getattr(learner, name) for name in names}
            found |= {name: part for name, part in parts.items() if part is not None}
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
        workers = {} if options.num_workers is None else {"num_workers": options.num_workers}

        def make(num_games: int = 1, **where: Any) -> Any:
            return make_vec_agents(options.env, num_games, **where, **kwargs)

        envs = make(num_envs, vector_kwargs=workers, **placed(make, options, on_device=on_device))
        # One group is an ordinary vector env of its rows; here all goes by group.
        return envs.agents if isinstance(envs, AgentRowsVecEnv) else envs

    @staticmethod
    def player(
        envs: AgentsVecEnv, agent: Mapping[str, ppo.Agent], options: Options
    ) -> Callable[..., dict[str, Any]]:
        """Return the likeliest actions, by group, as a function of observations by group.

        Args:
            envs: For masks, and for who has acted: a memory is of an agent's life.
            agent: By group.
            options: `masks` and `device`.
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

    @classmethod
    def load_policy(
        cls, options: Options, num_envs: int
    ) -> tuple[AgentsVecEnv, Callable[..., Any]]:
        """Return games and the policies of a run, for `vecenv play`."""
        options = replace(options, device="cpu")
        envs, size = cls.make_envs(options, num_envs), 0
        if options.critic == "central":
            envs.reset()
            size = envs.state()[0].size
        agents = {name: cls.make_agent(group, size, options) for name, group in envs.groups.items()}
        state = load_checkpoint(cls.checkpoint_of(options.save))["state"]
        for name, agent in agents.items():
            load_weights(agent, state[f"{name}/agent"])
        return envs, cls.player(envs, agents, options)


load_policy, main = AgentsPPO.load_policy, AgentsPPO.main
