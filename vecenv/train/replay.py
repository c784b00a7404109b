"""Replay: the common part of trainers that learn from old transitions, such as SAC and DQN.

Envs are stepped on the CPU; networks and buffer are where `--device` says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from buffers import SharedReplayBuffer, TransitionWriter
from vecenv import VecEnv
from vecenv.learn import Adam, Run
from vecenv.train.options import EnvOptions, RunOptions
from vecenv.train.trainer import Trainer

__all__ = ["Batch", "Replay", "ReplayOptions", "TargetAgent"]


@dataclass
class ReplayOptions(RunOptions, EnvOptions):
    """Options of trainers with a replay buffer."""

    learning_starts: int = 1000  # env steps with random actions at the start
    update_ratio: float = 1.0  # updates per env step after learning_starts
    batch_size: int = 256  # transitions, or sequences, per update
    capacity: int = 1_000_000  # transitions in the replay buffer
    tau: float = 0.005  # fraction by which an update moves targets to networks
    n_step: int = 1  # rewards summed before the value of the next observation


class Batch(NamedTuple):
    """Transitions; for SAC also the noise of its actions, so that the loss itself draws nothing."""

    obs: Tensor  # (B, *obs_shape)
    next_obs: Tensor  # (B, *obs_shape), after the last of `n_step` rewards
    actions: Tensor  # (B, ...), int64 from 0, or float32 from -1 to 1
    rewards: Tensor  # (B,)
    discounts: Tensor  # (B,), factor of the value of next_obs: 0 where the episode terminated
    noise: Any = None  # (B, A), normal, for the actions at obs
    next_noise: Any = None  # (B, A), for the actions at next_obs


class TargetAgent(nn.Module):
    """An agent whose `network` has a slowly following copy, the `target`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.target = network, copy.deepcopy(network).requires_grad_(False)

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """Move the target towards the network."""
        for slow, weight in zip(self.target.parameters(), self.network.parameters(), strict=True):
            slow.lerp_(weight, tau)

    def to_env(self, actions: Any) -> Any:
        """Turn stored actions into those of the env."""
        return actions


class Replay(Trainer):
    """Steps envs, stores transitions, and lets the agent learn from drawn transitions.

    A subclass has `choose(obs)`, which returns the actions (N, ...) to store at observations
    (N, *obs_shape), and a `TargetAgent`. `train` resets the envs.
    """

    LOG_STEPS: ClassVar = 1000
    MAY_CHANGE: ClassVar = Trainer.MAY_CHANGE | {"total_steps"}
    STATE: tuple[str, ...] = (*Trainer.STATE, "buffer", "rng", "obs", "returns")
    AUTORESET: ClassVar = "SameStep"  # after an end, the next observation begins a new episode
    ON_DEVICE: ClassVar = False  # the CPU chooses actions
    BUFFER: ClassVar[Any] = SharedReplayBuffer

    choose: Callable[..., Any]

    def __init__(self, options: Any, envs: VecEnv, agent: Any = None) -> None:
        torch.set_flush_denormal(True)  # numbers below 1e-38 are slow and change nothing
        super().__init__(options, envs, agent)
        self.rng = np.random.default_rng(options.seed)  # draws random actions
        self.returns = np.zeros(envs.num_envs)  # of the current episodes
        self.is_over = np.ones(envs.num_envs, np.bool_)  # the next observation begins one
        self.obs: Any = None  # the latest observations
        self.batch: Any = None
        self.drawn, self.scalars = None, dict[str, Tensor]()
        self.noted = dict[str, Any]()  # further columns of the next transitions
        updates = options.update_ratio * (options.total_steps - options.learning_starts)
        self.total_updates = max(int(updates), 1)  # of the whole training

    def set_up(self, obs_space: Any, action_space: Any, deferred: bool, **given: Any) -> None:
        """Make gradient, optimizer and buffer (with `given`); `deferred` is for the first two."""
        options, own = self.options, [p for p in self.agent.parameters() if p.requires_grad]
        how: Any = {"may_split": options.torch_threads == 1, "deferred": deferred}
        how["num_weights"] = sum(p.numel() for p in own)
        self.gradient = self.make_gradient(self.total_updates, options.batch_size, **how)
        how = {"max_grad_norm": getattr(options, "max_grad_norm", None), "deferred": deferred}
        self.optimizer = Adam(self.gradient.parameters(), lr=options.learning_rate, **how)
        given |= {"num_envs": self.envs.num_envs, "seed": options.seed, "gamma": options.gamma}
        self.buffer: Any = self.BUFFER(options.capacity, obs_space, action_space, **given)
        self.writer = TransitionWriter(self.envs, self.buffer)

    def start(self) -> None:
        """Reset the envs."""
        self.obs, _ = self.envs.reset(seed=self.options.seed + self.steps)
        self.writer.reset(self.obs)
        self.returns[:], self.is_over[:] = 0, True
        if self.envs.has_action_masks:
            print("action masks of the env are ignored: actions may be ones that these forbid")

    def draw(self) -> Any:
        """Return a batch of the buffer, valid until the next call."""
        self.drawn = found = self.buffer.sample(self.options.batch_size, self.drawn)
        return Batch(found.obs, found.next_obs, found.actions, found.rewards, found.discounts)

    def collect(self) -> list[float]:
        """Step all envs; return the returns of ended episodes."""
        with self.timing.phase("policy"):
            actions = self.choose(self.obs)
        result = self.obs, rewards, *flags, _ = self.envs.step(self.agent.to_env(actions))
        self.writer.step(actions, *result, **self.noted)
        self.steps += len(actions)
        self.returns += rewards
        self.is_over = np.logical_or(*flags)
        ended = self.returns[self.is_over].tolist()
        self.returns[self.is_over] = 0
        return ended

    @torch.no_grad()
    def learn(self) -> dict[str, Tensor]:
        """Draw a batch, make a step of Adam, move the targets."""
        with self.timing.phase("sample"):
            self.batch = self.draw()
        with self.timing.phase("gradient"):
            scalars = self.gradient(self.batch)
        with self.timing.phase("optimizer"):
            self.optimizer.step()
            self.agent.follow(self.options.tau)
        return scalars

    def update(self) -> dict[str, Any]:
        """Step all envs; learn as often as `update_ratio` asks for."""
        before = self.steps
        self.episodes = self.collect()
        due = self.options.update_ratio * (self.steps - self.options.learning_starts)
        with self.timing.phase("learner"):
            while self.num_updates < due:
                self.scalars = self.learn()
                self.num_updates += 1
        if before // self.LOG_STEPS < self.steps // self.LOG_STEPS:
            self.check()
        return self.scalars

    def restore(self, run: Run, **given: Any) -> bool:
        """Load the run's checkpoint; return whether envs start, or restart."""
        begins_anew = super().restore(run, later=("buffer",), **given)
        if begins_anew is None:
            return True
        self.writer.reset(self.obs)  # cuts the open episodes of the buffer, which comes only now
        run.restore({"buffer": self.buffer})
        return begins_anew
