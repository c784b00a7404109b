"""Double and dueling DQN for Discrete actions: `vecenv train CartPole-v1 --algo dqn`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn

from vecenv import VecEnv
from vecenv.core.spaces import leaf_by_leaf
from vecenv.train.networks import Encoders, rectified
from vecenv.train.options import GradientOptions, OptionsError
from vecenv.train.replay import Batch, Replay, ReplayOptions, TargetAgent
from vecenv.train.trainer import Trainer

__all__ = ["DQN", "Agent", "Options", "QNetwork", "dqn_loss", "load_policy", "main"]


@dataclass
class Options(GradientOptions, ReplayOptions):
    """Options of DQN."""

    update_ratio: float = 0.25  # updates per env step after learning_starts
    exploration: tuple[float, float] = (1.0, 0.05)  # share of random actions: at first, at last
    exploration_steps: int = 10_000  # env steps in which it falls linearly
    batch_size: int = 128  # transitions per update
    capacity: int = 100_000  # transitions in the replay buffer
    frame_stack: int = 0  # frames per observation, each stored once; 0: store whole ones
    max_grad_norm: float = 10.0  # larger gradient norms are scaled down to this
    tau: float = 0.01  # fraction by which an update moves the target to the network
    hidden: tuple[int, ...] = (128, 128)  # units of the ReLU layers, after convolutions if any


class QNetwork(nn.Module):
    """Values of all actions from one value of obs and advantages: (B, *obs_shape) to (B, A)."""

    def __init__(self, space: Any, num_actions: int, options: Options) -> None:
        super().__init__()
        self.encoders = Encoders(space)
        widths = self.encoders.num_features, *options.hidden
        self.body = rectified(*widths)
        self.advantages, self.value = nn.Linear(widths[-1], num_actions), nn.Linear(widths[-1], 1)

    def forward(self, obs: Tensor) -> Tensor:
        """Return values float32 (B, A)."""
        x = self.body(self.encoders(obs))
        advantages = self.advantages(x).float()
        return advantages - advantages.mean(1, keepdim=True) + self.value(x).float()


class Agent(TargetAgent):
    """The network and its target, a slowly following copy."""

    def __init__(self, envs: VecEnv, options: Options) -> None:
        space = envs.single_action_space
        if not isinstance(space, Discrete):
            raise OptionsError(f"actions are {space}, expected Discrete; use a wrapper")
        super().__init__(QNetwork(envs.single_observation_space, int(space.n), options))
        self.start = int(space.start)

    def to_env(self, actions: Any) -> Any:
        """Turn actions, counted from 0, into those of the env."""
        return actions + self.start

    @torch.no_grad()
    def act(self, obs: Tensor) -> Tensor:
        """Return the best actions (B,) at obs (B, *obs_shape)."""
        return self.network(obs).argmax(1)

    def errors(self, batch: Batch) -> Tensor:
        """Return how much the values (B,) of the taken actions exceed their targets, a step later.

        The network chooses the next action, the target network gives its value.
        """
        with torch.no_grad():
            picks = self.network(batch.next_obs).argmax(1, keepdim=True)
            next_values = self.target(batch.next_obs).gather(1, picks).squeeze(1)
            goals = batch.rewards + batch.discounts * next_values
        return self.network(batch.obs).gather(1, batch.actions[:, None]).squeeze(1) - goals


def dqn_loss(agent: Agent, batch: Batch, options: Options) -> tuple[Tensor, dict[str, Tensor]]:
    """Return half the mean square of the errors, and scalars."""
    errors = agent.errors(batch)
    return errors.square().mean() / 2, {"error": errors.abs().mean()}


class DQN(Replay):
    """DQN; see `Trainer` for what can be replaced."""

    Options = Options
    make_agent = Agent
    loss = staticmethod(dqn_loss)
    MAY_CHANGE: ClassVar = Trainer.MAY_CHANGE  # but the steps, over which the learning rate falls

    def __init__(self, options: Options, envs: Any, agent: Any = None) -> None:
        super().__init__(options, envs, agent)
        space, obs_space = Discrete(envs.single_action_space.n), envs.single_observation_space
        # Each picture is stored once, and so is each frame of a stack.
        stores_next = obs_space.shape is None or len(obs_space.shape) == 1
        kept: Any = {"frame_stack": options.frame_stack or None, "store_next": stores_next}
        self.set_up(obs_space, space, False, n_step=options.n_step, device=options.device, **kept)

    def choose(self, obs: Any) -> np.ndarray:
        """Return the best actions, some replaced by random ones."""
        options, count = self.options, self.envs.num_envs
        random = self.rng.integers(self.envs.single_action_space.n, size=count)
        if self.steps < options.learning_starts:
            return random
        share = np.interp(self.steps, (0, max(options.exploration_steps, 1)), options.exploration)
        is_random = self.rng.random(count) < share
        x = leaf_by_leaf(lambda part: torch.from_numpy(part).to(options.device), obs)
        return np.where(is_random, random, self.agent.act(x).cpu().numpy())

    def learn(self) -> dict[str, Tensor]:
        """Make an update; the learning rate falls to a hundredth over the training."""
        left = 1 - 0.99 * min(self.num_updates / self.total_updates, 1.0)
        self.optimizer.set_lr(self.options.learning_rate * left)
        return super().learn()

    @staticmethod
    def player(envs: VecEnv, agent: Agent, options: Options) -> Callable[..., Tensor]:
        """Return a function from observations to the best actions; a `report` gets all values."""

        def act(obs: Tensor, report: dict[str, Any] | None = None) -> Tensor:
            if report is not None:  # for `vecenv play --html`, which shows it beside the action
                report["action_values"] = agent.network(obs).numpy()
            return agent.to_env(agent.act(obs))

        return act


load_policy, main = DQN.load_policy, DQN.main
