"""Replay: what trainers share that learn from transitions of earlier policies, as SAC and DQN do.

```
envs --- step ---> TransitionWriter ---> replay buffer --- sample ---> batch ---> loss ---> agent
  ^                                            ^------- priorities -------------------------- |
  +------------------------------ choose(obs) <------------------------------------------------+
```
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from buffers import PrioritizedReplayBuffer, SharedReplayBuffer, TransitionWriter
from vecenv import VecEnv
from vecenv.learn import Gradient, Run, gradient_options
from vecenv.train.envs import make_envs
from vecenv.train.options import EnvOptions, GradientOptions, RunOptions
from vecenv.train.trainer import Trainer, title_of

__all__ = ["Batch", "Replay", "ReplayOptions"]

FOLDER = "replay"  # of the replay buffer in that of the run


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
    profile: bool = False  # report after the training where its time went


class Batch(NamedTuple):
    """Transitions."""

    obs: Tensor  # (B, *obs_shape)
    next_obs: Tensor  # (B, *obs_shape), the one after the last of `n_step` rewards
    actions: Tensor  # (B, ...), int64 from 0, or float32 from -1 to 1
    rewards: Tensor  # (B,)
    discounts: Tensor  # (B,), of the value of next_obs: 0 where the episode terminated
    importance: Tensor  # (B,), of prioritized sampling, else 1


class Replay(Trainer):
    """Steps envs, stores transitions, and lets the agent learn from those that are drawn.

    A subclass gives `choose`, `draw` and `optimizer`, and an agent with two methods more:
    `follow(tau)`, which moves the targets, and `priorities(batch)`, the errors (B,) of a batch.

    Args:
        options: How.
        envs: The caller's to close; `train` resets them.
        agent: On the device of the options; None makes one.
        earlier: How gradients were computed in the run that goes on.
    """

    LOG_STEPS: ClassVar = 1000  # env steps between two lines of the log
    PARTS: ClassVar = ("agent", "optimizer", "buffer", "rng", "envs")  # what has a state
    NUMBERS: ClassVar = ("steps", "num_updates", "obs", "returns")  # and what is one

    optimizer: Any
    gradient: Any = None

    def __init__(self, options: Any, envs: VecEnv, agent: Any = None, earlier: Any = None) -> None:
        super().__init__(options, envs, agent, earlier)
        self.timing = envs.timing
        self.rng = np.random.default_rng(options.seed)  # of random actions
        self.returns = np.zeros(envs.num_envs)  # of the open episodes
        self.obs: Any = None

    @property
    def total_updates(self) -> int:
        """Updates of the whole training."""
        options = self.options
        return int(options.update_ratio * (options.total_steps - options.learning_starts))

    def make_gradient(self, **given: Any) -> Gradient:
        """Return the gradient of the loss; `given` as of `Gradient`."""
        options = self.options
        how = gradient_options(
            options.compile,
            num_calls=self.total_updates,
            num_rows=options.batch_size,
            num_weights=sum(p.numel() for p in self.agent.parameters() if p.requires_grad),
            may_split=options.torch_threads == 1,  # else torch's own do it
            earlier=self.earlier,
        )
        loss = partial(self.loss, options=options)
        return Gradient(self.agent, loss, **how, dtype=options.dtype, log=print, **given)

    def make_buffer(self, obs_space: Any, action_space: Any, **given: Any) -> None:
        """Make the buffer, what is drawn from it, and the writer; `given` as of the buffer."""
        options = self.options
        kind: Any = PrioritizedReplayBuffer if options.prioritized else SharedReplayBuffer
        settings: Any = {"num_envs": options.num_envs, "n_step": options.n_step}
        settings |= {"gamma": options.gamma, "seed": options.seed, "device": options.device}
        settings |= given
        if options.storage == "memmap":
            settings |= {"storage": "memmap", "folder": options.save / FOLDER, "store_next": True}
        self.buffer = kind(options.capacity, obs_space, action_space, **settings)
        self.drawn = self.buffer.new_batch(options.batch_size)
        self.ones = torch.ones(options.batch_size, device=options.device)
        self.writer = TransitionWriter(self.envs, self.buffer)

    @staticmethod
    def make_envs(options: Any, num_envs: int, *, on_device: bool = False) -> VecEnv:
        """Make envs to train in, whose next observation is that of a new episode; or to play in."""
        given: Any = {"autoreset_mode": "SameStep"} if on_device else {}
        return make_envs(options, num_envs, on_device=on_device, **given)

    def start(self) -> None:
        """Reset the envs."""
        self.obs, _ = self.envs.reset(seed=self.options.seed + self.steps)
        self.writer.reset(self.obs)
        self.returns[:] = 0

    def choose(self, obs: Any) -> Any:
        """Return the actions (N, ...) to take at observations (N, *obs_shape)."""
        raise NotImplementedError

    def draw(self) -> Any:
        """Return transitions of the buffer, valid until the next call."""
        raise NotImplementedError

    def collect(self) -> list[float]:
        """Step all envs; return the returns of ended episodes."""
        with self.timing.phase("policy"):
            actions = self.choose(self.obs)
        result = self.obs, rewards, terminations, truncations, _ = self.envs.step(actions)
        self.writer.step(actions, *result)
        self.steps += len(actions)
        return self.note_returns(rewards, terminations | truncations)

    def note_returns(self, rewards: Any, is_over: Any, ids: Any = ...) -> list[float]:
        """Add rewards (N,) of the envs `ids`; return the returns of the episodes that are over."""
        self.returns[ids] += rewards
        ended = np.flatnonzero(is_over) if ids is ... else ids[is_over]
        found = self.returns[ended].tolist()
        self.returns[ended] = 0
        return found

    def num_due(self, before: int) -> int:
        """Return how many updates are due, `before` being the steps made before the last ones."""
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
            self.buffer.update_priorities(self.drawn.indices, self.agent.priorities(batch) + 1e-6)
        return scalars

    def train(self, run: Run) -> None:
        """Train until the steps are made, or until a signal."""
        options, scalars, every = self.options, dict[str, Any](), self.LOG_STEPS
        self.restore(run)
        with run.progress(title_of(options), self.steps, options.total_steps) as progress:
            while self.steps < options.total_steps and not run.should_stop:
                before = self.steps
                returns = self.collect()
                run.add_episodes(self.steps, returns)
                with self.timing.phase("learner"):
                    for _ in range(self.num_due(before)):
                        scalars = self.learn()
                        self.num_updates += 1
                if before // every < self.steps // every:
                    self.check()
                    run.add_episodes(self.steps, self.ended())
                    recent, speed = run.recent_return(), progress.speed(self.steps)
                    run.log(self.steps, {"return": recent, "steps_per_second": speed, **scalars})
                    progress.show(self.steps, f"return {recent:.1f}, {speed:.0f} steps/s")
                self.save_if_due(run, before)
            progress.show(self.steps)
        self.save(run)

    def save_if_due(self, run: Run, before: int) -> None:
        """Save from time to time."""
        if run.is_due(self.steps):
            self.save(run)

    def check(self) -> None:
        """Raise what was found on the device since the last time, for which nobody has waited."""
        if self.gradient is not None:
            self.gradient.check()

    def ended(self) -> list[float]:
        """Return the returns of ended episodes that `collect` has not waited for."""
        return []

    def finish(self, run: Run) -> None:
        """Close the buffer, and say how far the training came."""
        self.buffer.close()
        made = f"{self.steps} of {self.options.total_steps} steps, {self.num_updates} updates"
        note = f"; go on with {run.resume_command}" if run.should_stop else ""
        print(f"{title_of(self.options)}: {made}, {run.seconds:.0f} s{note}")

    def save(self, run: Run, score: float | None = None) -> None:
        """Write a checkpoint."""
        self.check()
        if self.gradient is not None:
            run.write_json("gradient", self.gradient.describe())
        run.save({name: getattr(self, name) for name in (*self.PARTS, *self.NUMBERS)}, score=score)

    def restore(self, run: Run) -> None:
        """Go on where the run's checkpoint was made, or begin."""
        others = {name: getattr(self, name) for name in self.PARTS if name != "buffer"}
        if (state := run.restore(others)) is None:
            return self.start()
        vars(self).update({name: state[name] for name in self.NUMBERS})
        if torch.is_tensor(self.obs):
            self.obs = self.obs.to(self.options.device)
        begins_anew = bool(run.not_restored) or "envs" not in self.PARTS
        self.writer.reset(self.obs)  # cuts the open episodes of the buffer, which comes only now
        run.restore({"buffer": self.buffer})
        return self.start() if begins_anew else None

    @classmethod
    def begin(cls, options: Any) -> None:
        """Remove the replay buffer of a run that is overwritten, and prepare torch."""
        torch.set_flush_denormal(True)  # numbers below 1e-38 take long and change nothing
        torch.empty(2**23 - 2**10)  # freed at once, which makes glibc keep memory freed later
        if not options.resume:
            shutil.rmtree(options.save / FOLDER, ignore_errors=True)
