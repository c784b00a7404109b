"""Replay: what trainers share that learn from transitions of earlier policies, as SAC and DQN do.

```
envs --- step ---> TransitionWriter ---> replay buffer --- sample ---> batch ---> loss ---> agent
  ^                                            ^------- priorities -------------------------- |
  +------------------------------ choose(obs) <------------------------------------------------+
```
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from buffers import PrioritizedReplayBuffer, SharedReplayBuffer, TransitionWriter
from vecenv import VecEnv
from vecenv.core.batches import leaf_by_leaf
from vecenv.learn import Run
from vecenv.train.options import EnvOptions, GradientOptions, RunOptions, is_on_device
from vecenv.train.trainer import Trainer, title_of

__all__ = ["Batch", "Replay", "ReplayOptions", "TargetAgent"]


@dataclass
class ReplayOptions(RunOptions, GradientOptions, EnvOptions):
    """Options of trainers with a replay buffer."""

    learning_starts: int = 1000  # env steps with random actions at the start
    update_ratio: float = 1.0  # updates per env step made after these
    batch_size: int = 256  # transitions per update
    capacity: int = 1_000_000  # of the replay buffer, in transitions
    storage: Literal["memory", "memmap"] = "memory"  # of replay; memmap: files in the run's folder
    tau: float = 0.005  # step of the targets towards the networks in an update, as a fraction
    n_step: int = 1  # rewards summed before the value of the next observation
    prioritized: bool = False  # draw transitions by their error after the latest update


class Batch(NamedTuple):
    """Transitions; of SAC also the noise that actions are drawn with: the loss is a function."""

    obs: Tensor  # (B, *obs_shape)
    next_obs: Tensor  # (B, *obs_shape), the one after the last of `n_step` rewards
    actions: Tensor  # (B, ...), int64 from 0, or float32 from -1 to 1
    rewards: Tensor  # (B,)
    discounts: Tensor  # (B,), of the value of next_obs: 0 where the episode terminated
    importance: Tensor  # (B,), of prioritized sampling, else 1
    noise: Any = None  # (B, A), normal, for the actions at obs
    next_noise: Any = None  # (B, A), for those at next_obs


class TargetAgent(nn.Module):
    """An agent whose network has a slow copy, the target; `FOLLOWS` are their names."""

    FOLLOWS: ClassVar = ("network", "target")

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__()
        if network is not None:
            self.network, self.target = network, copy.deepcopy(network).requires_grad_(False)

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """Move the target towards the network."""
        weights, slow_ones = (getattr(self, name).parameters() for name in self.FOLLOWS)
        for slow, weight in zip(slow_ones, weights, strict=True):
            slow.lerp_(weight, tau)


class Replay(Trainer):
    """Steps envs, stores transitions, and lets the agent learn from those that are drawn.

    A subclass gives `optimizer` and `choose(obs)`, the actions (N, ...) to store at observations
    (N, *obs_shape), and an agent with two methods more: `follow(tau)`, which moves the targets, and
    `errors(batch)`, (B,) or (K, B) of a batch. `train` resets the envs.
    """

    RETURN: ClassVar = "return"
    SPEED: ClassVar = "steps_per_second"
    LOG_STEPS: ClassVar = 1000
    KEEPS_BEST: ClassVar = False  # evaluations tell, if there are any
    MAY_CHANGE: ClassVar = Trainer.MAY_CHANGE | {"total_steps"}
    STATE: tuple[str, ...] = (*Trainer.STATE, "buffer", "rng", "obs", "returns")
    AUTORESET: ClassVar = "SameStep"  # the next observation of an end is that of a new episode

    choose: Callable[..., Any]
    to_env: Callable[..., Any] = staticmethod(lambda actions: actions)  # of those stored

    def __init__(self, options: Any, envs: VecEnv, agent: Any = None) -> None:
        torch.set_flush_denormal(True)  # numbers below 1e-38 take long and change nothing
        super().__init__(options, envs, agent)
        self.is_on_device, self.obs = is_on_device(envs), None
        self.rng = np.random.default_rng(options.seed)  # of random actions
        self.returns = np.zeros(envs.num_envs)  # of the open episodes
        self.scalars = dict[str, Tensor]()  # of the latest gradient
        self.noted = dict[str, Any]()  # further columns of the next transitions

    def make_buffer(self, obs_space: Any, action_space: Any, **given: Any) -> None:
        """Make the buffer and its writer; `given` as of the buffer's class."""
        options = self.options
        kind: Any = PrioritizedReplayBuffer if options.prioritized else SharedReplayBuffer
        given |= {"num_envs": self.envs.num_envs, "seed": options.seed}
        self.buffer = kind(options.capacity, obs_space, action_space, **given)
        self.writer = TransitionWriter(self.envs, self.buffer)

    def set_up(self, obs_space: Any, action_space: Any, is_captured: bool, **given: Any) -> None:
        """Make gradient and buffer; updates that are captured as CUDA graphs wait for nothing."""
        options, device = self.options, self.options.device
        steps, size = options.total_steps - options.learning_starts, options.batch_size
        self.total_updates = int(options.update_ratio * steps)  # of the whole training
        how: Any = {"may_split": options.torch_threads == 1, "deferred": is_captured}
        how["num_weights"] = sum(p.numel() for p in self.agent.parameters() if p.requires_grad)
        self.gradient = self.make_gradient(self.total_updates, size, **how)
        given |= {"n_step": options.n_step, "gamma": options.gamma, "device": device}
        if options.storage == "memmap":
            folder = options.save / "replay"
            if not options.resume:  # that of a run that is overwritten
                shutil.rmtree(folder, ignore_errors=True)
            given |= {"storage": "memmap", "folder": folder, "store_next": True}
        self.make_buffer(obs_space, action_space, **given)
        self.drawn, self.ones = self.buffer.new_batch(size), torch.ones(size, device=device)

    def start(self) -> None:
        """Reset the envs."""
        self.obs, _ = self.envs.reset(seed=self.options.seed + self.steps)
        self.writer.reset(self.obs)
        self.returns[:] = 0

    def draw(self) -> Batch:
        """Return transitions of the buffer, valid until the next call."""
        found = self.buffer.sample(self.options.batch_size, self.drawn)
        importance = found.weights if self.options.prioritized else self.ones
        columns = found.obs, found.next_obs, found.actions, found.rewards, found.discounts
        return Batch(*columns, importance)

    def collect(self) -> list[float]:
        """Step all envs; return the returns of ended episodes."""
        with self.timing.phase("policy"):
            actions = self.choose(self.obs)
        result = self.obs, rewards, *flags, _ = self.envs.step(self.to_env(actions))
        self.writer.step(actions, *result, **self.noted)
        self.steps += len(actions)
        return self.note_returns(rewards, flags)

    def note_returns(self, rewards: Any, flags: Any, ids: Any = ...) -> list[float]:
        """Add rewards (N,) of the envs `ids`; return the returns of the episodes that are over."""
        if self.is_on_device:  # whose rewards nobody waits for
            return []
        self.is_over = np.logical_or(*flags)
        self.returns[ids] += rewards
        ended = np.flatnonzero(self.is_over) if ids is ... else ids[self.is_over]
        found = self.returns[ended].tolist()
        self.returns[ended] = 0
        return found

    def num_due(self, before: int) -> int:
        """Return how many updates are due; `before` is the steps before the last `collect`."""
        due = self.options.update_ratio * (self.steps - self.options.learning_starts)
        return max(0, math.ceil(due - self.num_updates))

    @torch.no_grad()
    def learn(self) -> dict[str, Tensor]:
        """Draw a batch, make a step of Adam, and move the targets."""
        options = self.options
        with self.timing.phase("sample"):
            batch = self.draw()
        with self.timing.phase("gradient"):
            scalars = self.gradient(batch)
        with self.timing.phase("optimizer"):
            self.optimizer.step()
            self.agent.follow(options.tau)
        if options.prioritized:
            errors = self.agent.errors(batch).abs().view(-1, options.batch_size).mean(0)
            self.buffer.update_priorities(self.drawn.indices, errors + 1e-6)
        return scalars

    def update(self) -> dict[str, Any]:
        """Step all envs, and learn as often as is due."""
        before = self.steps
        self.episodes = self.collect()
        with self.timing.phase("learner"):
            for _ in range(self.num_due(before)):
                self.scalars = self.learn()
                self.num_updates += 1
        if before // self.LOG_STEPS < self.steps // self.LOG_STEPS:
            self.check()
            self.episodes += self.ended()
        return self.scalars

    def ended(self) -> list[float]:
        """Return the returns of ended episodes that `collect` has not waited for."""
        return []

    def finish(self, run: Run) -> None:
        """Close the buffer, and say how far the training came."""
        self.buffer.close()
        made = f"{self.steps} of {self.options.total_steps} steps, {self.num_updates} updates"
        print(f"{title_of(self.options)}: {made}, {run.seconds:.0f} s")

    def restore(self, run: Run, **given: Any) -> bool:
        """Go on where the run's checkpoint was made; return whether envs begin, or begin anew."""
        begins_anew = super().restore(run, later=("buffer",), **given)
        if begins_anew is None:
            return True
        if self.is_on_device:
            self.obs = leaf_by_leaf(lambda part: part.to(self.options.device), self.obs)
        self.writer.reset(self.obs)  # cuts the open episodes of the buffer, which comes only now
        run.restore({"buffer": self.buffer})
        return begins_anew or "envs" not in self.STATE
