"""A Q-learner with a memory: sequences with burn-in, stored states and priorities, as in R2D2.

After S. Kapturowski et al., 2019, without its actors, its rescaled values and its noise:
`vecenv train memory:TMaze-v0 --algo r2d2 --env-kwargs length 10`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from buffers import PrioritizedReplayBuffer, SequenceBatch
from vecenv import VecEnv
from vecenv.train.networks import rectified
from vecenv.train.options import OptionsError
from vecenv.train.replay import Replay, ReplayOptions, TargetAgent

__all__ = ["R2D2", "Agent", "Options", "QNetwork", "load_policy", "main", "r2d2_loss", "td_errors"]


@dataclass
class Options(ReplayOptions):
    """Options of R2D2."""

    num_envs: int = 16  # envs stepped side by side
    update_ratio: float = 1 / 32  # updates per env step after learning_starts
    learning_starts: int = 2000  # env steps with random actions at the start
    exploration: tuple[float, float] = (0.4, 0.01)  # share of random actions in first and last env
    capacity: int = 50_000  # steps in the replay buffer
    batch_size: int = 32  # sequences per update
    sequence_length: int = 24  # steps of a sequence, burn-in included
    burn_in: int = 4  # first steps of a sequence, which only update the state
    hidden: int = 64  # units of encoder and memory
    n_step: int = 5  # rewards summed before the value of an observation
    max_grad_norm: float = 10.0  # larger gradient norms are scaled down to this
    tau: float = 0.01  # fraction by which an update moves the target to the network


class QNetwork(nn.Module):
    """Values of all actions along sequences of observations."""

    def __init__(self, space: Any, num_actions: int, options: Options) -> None:
        super().__init__()
        inputs, size = int(np.prod(space.shape)), options.hidden
        self.encoder = nn.Sequential(nn.Flatten(2), *rectified(inputs, size))
        self.memory, self.body = nn.GRU(size, size, batch_first=True), rectified(size, size)
        self.value, self.advantages = nn.Linear(size, 1), nn.Linear(size, num_actions)

    def forward(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (B, L, A), and states (B, L, H) after each of obs (B, L, ...)."""
        states, _ = self.memory(self.encoder(obs.float()), state[None])
        x = self.body(states)
        advantages = self.advantages(x)
        return self.value(x) + advantages - advantages.mean(2, keepdim=True), states


class Agent(TargetAgent):
    """The network and its target, a slowly following copy."""

    found: tuple[Tensor, Tensor]  # errors (B, L), and states (B, L, H), of the latest `td_errors`

    def __init__(self, envs: Any, options: Options) -> None:
        space, actions = envs.single_observation_space, envs.single_action_space
        is_known = isinstance(space, Box) and len(space.shape) and isinstance(actions, Discrete)
        if not (is_known and actions.start == 0):
            wanted = "Box with an axis, and Discrete from 0; use a wrapper"
            raise OptionsError(f"the spaces are {(space, actions)}, expected {wanted}")
        super().__init__(QNetwork(space, int(actions.n), options))


def td_errors(agent: Agent, batch: SequenceBatch, options: Options) -> Tensor:
    """Return how much values (B, L) exceed those found n steps later; set `agent.found`."""
    first = batch.initial_states["state"]
    obs = torch.cat([batch.obs[:, :1], batch.next_obs], 1)  # of all steps, then after the last
    values, states = agent.network(obs, first)
    with torch.no_grad():
        picks = values[:, 1:].argmax(2, keepdim=True)
        next_values = agent.target(obs, first)[0][:, 1:].gather(2, picks).squeeze(2)
        discounts = options.gamma * (~batch.terminations)
        goals = batch.rewards + discounts * next_values
        for _ in range(options.n_step - 1):  # fewer steps at the end of the sequence
            later = torch.where(batch.mask[:, 1:], goals[:, 1:], next_values[:, :-1])
            later = torch.cat([later, next_values[:, -1:]], 1)
            goals = batch.rewards + discounts * later
    taken = values[:, :-1].gather(2, batch.actions[..., None].long()).squeeze(2)
    errors, states = taken - goals, torch.cat([first[:, None], states[:, :-2]], 1)
    agent.found = errors.detach(), states.detach()
    return errors


def r2d2_loss(
    agent: Agent, batch: SequenceBatch, options: Options
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of sequences, with the weights of their draw, and scalars."""
    errors, weights = td_errors(agent, batch, options), batch.learn_mask * batch.weights[:, None]
    loss = (weights * errors.square()).sum() / batch.learn_mask.sum() / 2
    return loss, {"error": errors.detach()[batch.learn_mask].abs().mean()}


class R2D2(Replay):
    """R2D2; see `Trainer` for what can be replaced. It computes on the CPU, by autograd."""

    Options = Options
    make_agent = Agent
    loss = staticmethod(r2d2_loss)
    STATE = (*Replay.STATE, "state", "is_over")
    BUFFER = PrioritizedReplayBuffer

    def __init__(self, options: Options, envs: Any, agent: Any = None) -> None:
        if not (min(options.exploration) > 0 <= options.burn_in < options.sequence_length):
            told = f"--exploration {options.exploration}, --burn-in {options.burn_in}: expected"
            raise OptionsError(f"{told} shares above 0, and less than --sequence-length")
        super().__init__(options, envs, agent)
        kept: Any = {"extra_columns": {"state": Box(-np.inf, np.inf, (options.hidden,))}}
        spaces = envs.single_observation_space, envs.single_action_space
        self.set_up(*spaces, False, track_episodes=True, **kept)
        # Each env has its own share of random actions.
        self.random_share = np.geomspace(*options.exploration, num=envs.num_envs)
        self.state = torch.zeros(envs.num_envs, options.hidden)  # of the memory

    @torch.no_grad()
    def choose(self, obs: Any) -> np.ndarray:
        """Return the best actions, some replaced by random ones; note the states before."""
        is_early = self.steps < self.options.learning_starts
        is_random = self.rng.random(len(obs)) < np.where(is_early, 1.0, self.random_share)
        random = self.rng.integers(self.envs.single_action_space.n, size=len(obs))
        state = self.state.masked_fill(torch.from_numpy(self.is_over)[:, None], 0.0)
        values, states = self.agent.network(torch.from_numpy(obs)[:, None], state)
        self.noted, self.state = {"state": state.numpy()}, states[:, 0]
        return np.where(is_random, random, values[:, 0].argmax(1).numpy())

    def draw(self) -> SequenceBatch:
        """Return sequences of the buffer."""
        options = self.options
        how: Any = {"burn_in": options.burn_in, "pad": True, "initial_states": "state"}
        return self.buffer.sample_sequences(options.batch_size, options.sequence_length, **how)

    @torch.no_grad()
    def learn(self) -> dict[str, Tensor]:
        """Make an update; give the new errors and states to the buffer."""
        scalars = super().learn()
        errors, states = self.agent.found
        self.buffer.update_sequence_priorities(self.batch, errors, eta=0.9)
        self.buffer.refresh_states(self.batch, state=states)
        return scalars

    @staticmethod
    def player(envs: VecEnv, agent: Agent, options: Options) -> Callable[..., Tensor]:
        """Return the greedy policy as a function of observations and of where episodes begin."""
        state = torch.zeros(envs.num_envs, options.hidden)

        def act(obs: Tensor, starts: Tensor) -> Tensor:
            nonlocal state
            values, states = agent.network(obs[:, None], state.masked_fill(starts[:, None], 0.0))
            state = states[:, 0]
            return values[:, 0].argmax(1)

        return act


load_policy, main = R2D2.load_policy, R2D2.main
