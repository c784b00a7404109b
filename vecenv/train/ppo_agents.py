"""PPO for games with several agents: `vecenv train agents:mpe2.simple_spread_v3`.

All agents share one policy. The rows of a vector env are the agents of all games, and PPO treats
rows as envs. Unequal spaces are padded to be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vecenv import EnvCreationError, make_vec_agents
from vecenv.agents import AgentsVecEnv
from vecenv.train import ppo
from vecenv.train.options import OptionsError, make_placed
from vecenv.train.ppo import Agent, ppo_loss

__all__ = ["Agent", "AgentsPPO", "Options", "load_policy", "main", "ppo_loss"]


@dataclass
class Options(ppo.RolloutOptions):
    """Options of PPO of several agents."""

    env: str = "mpe2.simple_spread_v3"  # what make_vec_agents takes: an id, or a module
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)  # of the game
    indicator: bool = False  # tell the policy which agent it acts for; unequal ones are told apart
    total_steps: int = 300_000  # steps of agents to train for, at most; 0 evaluates only
    num_games: int = 8  # games stepped side by side
    backend: str | None = None  # of the games, see vecenv.make_vec
    num_workers: int | None = None  # processes for the games (async)
    num_epochs: int = 8  # passes over the rollout in an update
    num_minibatches: int = 4  # gradient steps in a pass
    learning_rate: float = 2e-3  # Adam's at the start; it falls linearly to 0
    gamma: float = 0.95  # discount


class AgentsPPO(ppo.PPO):
    """PPO with agents of games as envs; steps of dead agents do not count."""

    Options = Options

    @classmethod
    def make_envs(cls, options: Options, num_envs: int, *, on_device: bool = False) -> Any:
        """Make the games for training as rows of agents; compiled ones where the networks are."""
        kwargs: Any = {**options.env_kwargs, "agent_indicator": options.indicator}
        if options.num_workers is not None:
            kwargs["vector_kwargs"] = {"num_workers": options.num_workers}
        make = partial(make_vec_agents, options.env, **kwargs)
        envs = make_placed(make, options, num_envs, on_device=on_device)
        if isinstance(envs, AgentsVecEnv):  # several groups
            envs.close()
            try:
                envs = make_placed(partial(make, pad=True), options, num_envs, on_device=on_device)
            except (ValueError, EnvCreationError) as error:
                raise OptionsError(f"agents have unequal spaces: {error}") from None
        return envs if on_device else envs.agents

    @classmethod
    def new_agent(cls, envs: Any, options: Options) -> Any:
        """Make the agent for the rows, on the device of the options."""
        (group,) = envs.groups.values()
        return super().new_agent(group, options)

    @staticmethod
    def player(envs: Any, agent: Any, options: Any) -> Callable[..., Any]:
        """Return a function from observations by group to the likeliest actions by group.

        `envs` say which agents acted: a memory lasts for an agent's life. A `Policy` gets rows.
        """
        if not isinstance(envs, AgentsVecEnv):
            return ppo.PPO.player(envs, agent, options)
        (group,) = envs.groups.values()
        play = ppo.PPO.player(group, agent, options)

        def act(obs: Any, starts: Tensor, *, sample: bool = False) -> dict[str, Any]:
            was_dead = torch.as_tensor(~group.valid, device=starts.device)
            begins = starts.repeat_interleave(group.num_agents) | was_dead
            return {group.name: play(obs[group.name], begins, sample=sample)}

        return act


load_policy, main = AgentsPPO.load_policy, AgentsPPO.main
