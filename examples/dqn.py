"""DQN for Box observations, vectors or pictures, and Discrete actions: --env-id CartPole-v1.

Double and dueling networks, rewards over n steps, and prioritized replay are options. Network and
loss are the first half of this file, and are for changing; the second half trains.
"""

import copy
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from buffers import PrioritizedReplayBuffer, SharedReplayBuffer, TransitionWriter
from vecenv import VecEnv, make_vec
from vecenv.learn import (
    Adam,
    EvaluationResult,
    Gradient,
    Run,
    RunError,
    evaluate,
    evaluating,
    gradient_options,
    load_checkpoint,
)


@dataclass
class Options:
    env_id: str = "CartPole-v1"  # registered id, also "module:id"
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)  # of the env
    total_steps: int = 100_000  # env steps to train for, those of a resumed run included
    num_envs: int = 8  # envs stepped side by side
    update_ratio: float = 0.25  # updates per env step made after learning_starts
    learning_starts: int = 1000  # env steps with random actions at the start
    exploration: tuple[float, float] = (1.0, 0.05)  # share of random actions: at first, at last
    exploration_steps: int = 10_000  # env steps in which it falls linearly
    batch_size: int = 128  # transitions per update
    capacity: int = 100_000  # of the replay buffer, in transitions
    frame_stack: int = 0  # observations are stacks of so many frames, stored once each; 0: whole
    storage: Literal["memory", "memmap"] = "memory"  # of replay; memmap: files in the run's folder
    learning_rate: float = 1e-3  # of Adam at the start; it falls linearly to a hundredth
    max_grad_norm: float = 10.0  # longer gradients are shortened to this
    gamma: float = 0.99  # discount
    tau: float = 0.01  # step of the target towards the network in an update, as a fraction
    double: bool = True  # the network picks the next action, the target says what it is worth
    dueling: bool = True  # a value of the observation, and advantages of actions over their mean
    n_step: int = 1  # rewards summed before the value of the next observation
    prioritized: bool = False  # draw transitions by their error after the latest update
    hidden: tuple[int, ...] = (128, 128)  # units of the ReLU layers, after convolutions if any
    seed: int = 1  # the same seed gives the same curve
    backend: str | None = None  # of vecenv.make_vec
    device: str = "cpu"  # of network and replay
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the network's matrix products
    compile: Literal["auto", "on", "off"] = "auto"  # the update; auto: if there are many
    threads: int = 1  # of torch; more is far slower where cores are busy
    eval_every: int = 10_000  # env steps between evaluations; the best policy is kept; 0: none
    eval_episodes: int = 100  # episodes of that policy at the end; half as many on the way
    save: Path = Path("runs/dqn")  # folder of the run: options, metrics, checkpoint, curve
    save_every: int = 0  # env steps between checkpoints; 0: at the end, or when stopped
    resume: bool = False  # go on from the checkpoint in that folder
    overwrite: bool = False  # or delete an earlier run in it
    tensorboard: bool = False  # write scalars for TensorBoard
    profile: bool = False  # report after the training where its time went


BREAKOUT: Any = {"total_steps": 1_000_000, "num_envs": 32, "update_ratio": 0.1, "batch_size": 64}
BREAKOUT |= {"hidden": (128,), "learning_rate": 5e-4, "exploration_steps": 100_000}
BREAKOUT |= {"eval_every": 50_000, "n_step": 3}
BREAKOUT |= {"learning_starts": 5000}
DEFAULTS: Any = {"breakout:Breakout-v0": BREAKOUT}  # of other envs
DEFAULTS["breakout:BreakoutFrames-v0"] = BREAKOUT | {"frame_stack": 4}


# ---- Network and loss ---------------------------------------------------------------------------


class Batch(NamedTuple):
    """Transitions."""

    obs: Tensor  # (B, *obs_shape)
    next_obs: Tensor  # (B, *obs_shape), the one after the last of `n_step` rewards
    actions: Tensor  # int64 (B,), from 0
    rewards: Tensor  # (B,)
    discounts: Tensor  # (B,), of the value of next_obs: 0 where the episode terminated
    importance: Tensor  # (B,), of prioritized sampling, else 1


class Pictures(nn.Module):
    """Convolutions over pictures, channels first or last, whichever axis is shorter.

    Those of Mnih et al., "Human-level control through deep reinforcement learning", 2015; for
    boards of less than 36 cells one of 3 x 3, as in MinAtar.
    """

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.is_last, self.scale = space.shape[2] < space.shape[0], 1.0
        if space.dtype == np.uint8:
            self.scale = 1 / 255
        channels = space.shape[2 if self.is_last else 0]
        layers: list[Any] = [(channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
        if sorted(space.shape)[1] < 36:
            layers = [(channels, 16, 3, 1)]
        convolutions = [(nn.Conv2d(*layer), nn.ReLU()) for layer in layers]
        self.layers = nn.Sequential(*(part for pair in convolutions for part in pair), nn.Flatten())
        with torch.no_grad():
            self.num_outputs = self(torch.zeros(1, *space.shape)).shape[1]

    def forward(self, obs: Tensor) -> Tensor:
        x = obs.float() * self.scale
        return self.layers(x.permute(0, 3, 1, 2) if self.is_last else x)


class QNetwork(nn.Module):
    """Values of all actions: (B, *obs_shape) to (B, A)."""

    def __init__(self, space: Box, num_actions: int, options: Options) -> None:
        super().__init__()
        self.encoder: Any = Pictures(space) if len(space.shape) == 3 else nn.Flatten()
        widths = getattr(self.encoder, "num_outputs", math.prod(space.shape)), *options.hidden
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
        self.body = nn.Sequential(*(part for pair in layers for part in pair))
        self.advantages = nn.Linear(widths[-1], num_actions)
        self.value = nn.Linear(widths[-1], 1) if options.dueling else None

    def forward(self, obs: Tensor) -> Tensor:
        x = self.body(self.encoder(obs.float()))
        values = self.advantages(x).float()
        if self.value is not None:
            values = values - values.mean(1, keepdim=True) + self.value(x).float()
        return values


class Agent(nn.Module):
    """The network and its slow copy, the target."""

    def __init__(self, space: Box, num_actions: int, options: Options) -> None:
        super().__init__()
        self.network, self.is_double = QNetwork(space, num_actions, options), options.double
        self.target = copy.deepcopy(self.network).requires_grad_(False)

    @torch.no_grad()
    def act(self, obs: Tensor) -> Tensor:
        """Return the best actions (B,) at obs (B, *obs_shape)."""
        return self.network(obs).argmax(1)

    def errors(self, batch: Batch) -> Tensor:
        """Return what values of the actions taken (B,) are above those found a step later."""
        with torch.no_grad():
            next_values = self.target(batch.next_obs)
            picks = self.network(batch.next_obs) if self.is_double else next_values
            next_values = next_values.gather(1, picks.argmax(1, keepdim=True)).squeeze(1)
            goals = batch.rewards + batch.discounts * next_values
        return self.network(batch.obs).gather(1, batch.actions[:, None]).squeeze(1) - goals


def dqn_loss(agent: Agent, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean square of the errors, and scalars."""
    errors = agent.errors(batch)
    return (batch.importance * errors.square()).mean() / 2, {"error": errors.abs().mean()}


# ---- Training -----------------------------------------------------------------------------------


class Trainer:
    """Steps the envs and lets the agent learn."""

    def __init__(
        self, options: Options, envs: VecEnv, earlier: Any = None, log: Any = None
    ) -> None:
        self.options, self.envs, self.timing = options, envs, envs.timing
        obs_space: Any = envs.single_observation_space
        space = envs.single_action_space
        is_known = isinstance(obs_space, Box) and len(obs_space.shape) > 0
        is_known = is_known and not (len(obs_space.shape) == 3 and sorted(obs_space.shape)[1] < 3)
        if not (is_known and isinstance(space, Discrete)):
            found = f"{options.env_id} has the spaces {(obs_space, space)}"
            wanted = "(Box, Discrete), no number alone, pictures of 3 x 3 at least; use a wrapper"
            raise SystemExit(f"{found}, expected {wanted}")
        self.num_actions, self.first_action = int(space.n), int(space.start)
        self.agent = Agent(obs_space, self.num_actions, options).to(options.device)
        num_updates = int(options.update_ratio * (options.total_steps - options.learning_starts))
        how = gradient_options(
            options.compile,
            num_calls=num_updates,
            num_rows=options.batch_size,
            num_weights=sum(p.numel() for p in self.agent.parameters() if p.requires_grad),
            may_split=options.threads == 1,  # else torch's own do it
            earlier=earlier,
        )
        self.gradient = Gradient(
            self.agent,
            dqn_loss,
            **how,
            dtype=options.dtype,
            log=log,
        )
        clip, weights = options.max_grad_norm, self.gradient.parameters()
        self.optimizer = Adam(weights, lr=options.learning_rate, max_grad_norm=clip)
        self.schedule = LinearLR(self.optimizer, 1.0, 0.01, max(num_updates, 1))
        buffer: Any = PrioritizedReplayBuffer if options.prioritized else SharedReplayBuffer
        settings: Any = {"num_envs": options.num_envs, "n_step": options.n_step}
        settings |= {"gamma": options.gamma, "seed": options.seed, "device": options.device}
        settings["store_next"] = len(obs_space.shape) == 1  # pictures are stored once
        settings["frame_stack"] = options.frame_stack or None  # and each of a stack
        if options.storage == "memmap":
            settings |= {"storage": "memmap", "folder": options.save / REPLAY, "store_next": True}
        self.buffer = buffer(options.capacity, obs_space, space, **settings)
        self.drawn = self.buffer.new_batch(options.batch_size)
        self.ones = torch.ones(options.batch_size, device=options.device)
        self.writer = TransitionWriter(envs, self.buffer)
        self.rng = np.random.default_rng(options.seed)  # of random actions
        self.returns = np.zeros(envs.num_envs)  # of the open episodes
        self.steps = self.num_updates = 0

    def start(self) -> None:
        """Reset the envs."""
        self.obs, _ = self.envs.reset(seed=self.options.seed + self.steps)
        self.writer.reset(self.obs)
        self.returns[:] = 0
        if self.envs.has_action_masks:
            print("dqn ignores the env's action masks: it may take actions that these forbid")

    def choose(self, obs: np.ndarray) -> np.ndarray:
        """Return the best actions, some of them replaced by random ones."""
        options, count = self.options, len(obs)
        random = self.rng.integers(self.num_actions, size=count) + self.first_action
        if self.steps < options.learning_starts:
            return random
        progress = min(self.steps / max(options.exploration_steps, 1), 1.0)
        first, last = options.exploration
        is_random = self.rng.random(count) < first + (last - first) * progress
        best = self.agent.act(torch.from_numpy(obs).to(options.device)).cpu().numpy()
        return np.where(is_random, random, best + self.first_action)

    def collect(self) -> list[float]:
        """Step all envs; return the returns of ended episodes."""
        with self.timing.phase("policy"):
            actions = self.choose(self.obs)
        result = self.obs, rewards, terminations, truncations, _ = self.envs.step(actions)
        self.writer.step(actions, *result)
        self.steps += len(actions)
        self.returns += rewards
        is_over = terminations | truncations
        found = self.returns[is_over].tolist()
        self.returns[is_over] = 0
        return found

    def draw(self) -> Batch:
        """Return transitions of the buffer, valid until the next call."""
        drawn = self.buffer.sample(self.options.batch_size, self.drawn)
        importance = drawn.weights if self.options.prioritized else self.ones
        actions = drawn.actions.long() - self.first_action
        columns = drawn.obs, drawn.next_obs, actions, drawn.rewards, drawn.discounts
        return Batch(*columns, importance)

    @torch.no_grad()
    def learn(self) -> dict[str, Tensor]:
        """Draw a batch, make a step of Adam, and move the target."""
        agent, options = self.agent, self.options
        with self.timing.phase("sample"):
            batch = self.draw()
        with self.timing.phase("gradient"):
            scalars = self.gradient(batch)
        with self.timing.phase("optimizer"):
            self.optimizer.step()
            self.schedule.step()
            pairs = zip(agent.target.parameters(), agent.network.parameters(), strict=True)
            for target, weight in pairs:
                target.lerp_(weight, options.tau)
        if options.prioritized:
            errors = agent.errors(batch).abs()
            self.buffer.update_priorities(self.drawn.indices, errors + 1e-6)
        self.num_updates += 1
        return scalars

    def run(self, run: Run) -> None:
        """Train until the steps are made, or until a signal."""
        options, scalars = self.options, dict[str, Any]()
        self.restore(run)
        with run.progress(options.env_id, self.steps, options.total_steps) as progress:
            while self.steps < options.total_steps and not run.should_stop:
                before = self.steps
                returns = self.collect()
                run.add_episodes(self.steps, returns)
                due = options.update_ratio * (self.steps - options.learning_starts)
                while self.num_updates < due:
                    scalars = self.learn()
                if before // 1000 < self.steps // 1000:
                    recent, speed = run.recent_return(), progress.speed(self.steps)
                    run.log(self.steps, {"return": recent, "steps_per_second": speed, **scalars})
                    progress.show(self.steps, f"return {recent:.1f}, {speed:.0f} steps/s")
                if (every := options.eval_every) and before // every < self.steps // every:
                    self.save(run, self.evaluate(max(options.eval_episodes // 2, 1)).mean)
                elif run.is_due(self.steps):
                    self.save(run)
            progress.show(self.steps)
        self.save(run)

    def evaluate(self, episodes: int, seed: int = 2_000_000) -> EvaluationResult:
        """Play the greedy policy in envs of its own."""
        options = self.options
        settings: Any = {"device": options.device, "backend": options.backend, "seed": seed}
        settings |= options.env_kwargs

        def act(obs: Tensor) -> Tensor:
            return self.agent.act(obs) + self.first_action

        return evaluate(act, options.env_id, episodes, **settings)

    def save(self, run: Run, score: float | None = None) -> None:
        run.write_json("gradient", self.gradient.describe())
        run.save({name: getattr(self, name) for name in (*PARTS, *NUMBERS)}, score=score)

    def restore(self, run: Run) -> None:
        """Go on where the run's checkpoint was made, or begin."""
        others = {name: getattr(self, name) for name in PARTS if name != "buffer"}
        if (state := run.restore(others)) is None:
            return self.start()
        vars(self).update({name: state[name] for name in NUMBERS})
        begins_anew = bool(run.not_restored)
        self.writer.reset(self.obs)  # cuts the open episodes of the buffer, which comes only now
        run.restore({"buffer": self.buffer})
        if begins_anew:
            self.start()


def load_policy(options: Options, num_envs: int) -> tuple[VecEnv, Callable[[Tensor], Tensor]]:
    """Return envs and the policy of a run, the best one that was evaluated, for `vecenv play`."""
    given: Any = {"backend": options.backend, **options.env_kwargs}
    envs = make_vec(options.env_id, num_envs, **given)
    space: Any = envs.single_action_space
    agent = Agent(cast("Box", envs.single_observation_space), int(space.n), options)
    best = options.save / "checkpoint" / "best.pt"
    file = best if best.exists() else best.with_name("last.pt")
    agent.load_state_dict(load_checkpoint(file)["state"]["agent"])

    def act(obs: Tensor, report: dict[str, Any] | None = None) -> Tensor:
        if report is not None:  # what `vecenv play --html` shows beside the action
            report["action_values"] = agent.network(obs).numpy()
        return agent.act(obs) + int(space.start)

    return envs, act


REPLAY = "replay"  # folder of the replay buffer in that of the run
PARTS = "agent", "optimizer", "schedule", "buffer", "rng", "envs"
NUMBERS = "steps", "num_updates", "obs", "returns"


def stopped_note(run: Run) -> str:
    """Say how to go on with a run that a signal has stopped."""
    return f"; go on with {run.resume_command}" if run.should_stop else ""


def main(options: Options) -> EvaluationResult:
    """Train, save, evaluate and report; return the evaluation."""
    if options.frame_stack and options.storage == "memmap":
        raise SystemExit("--frame-stack is for --storage memory: files hold whole observations")
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)  # numbers below 1e-38 take long and change nothing
    torch.empty(2**23 - 2**10)  # freed at once, which makes glibc keep memory freed later
    torch.manual_seed(options.seed)
    kept = "save_every", "tensorboard", "overwrite"
    settings: Any = {name: getattr(options, name) for name in kept}
    settings["may_change"] = *kept, "profile"
    title = f"{options.env_id}, seed {options.seed}"
    if options.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit(f"--device {options.device}: torch finds no such device; leave it out")
    try:
        with Run(options.save, options, options.resume, **settings) as run:
            earlier = run.read_json("gradient") if options.resume else None
            given: Any = {"backend": options.backend, **options.env_kwargs}
            envs = make_vec(options.env_id, options.num_envs, autoreset_mode="SameStep", **given)
            if not options.resume:  # of a run that is overwritten
                shutil.rmtree(options.save / REPLAY, ignore_errors=True)
            trainer = Trainer(options, envs, earlier, log=print)
            if options.profile:
                envs.timing.enable()
            trainer.run(run)
            if options.profile and envs.timing.total_ns:
                print(envs.timing.report())
            trainer.buffer.close()
            envs.close()
            made = f"{trainer.steps} of {options.total_steps} steps, {trainer.num_updates} updates"
            print(f"{title}: {made}, {run.seconds:.0f} s{stopped_note(run)}")
            run.draw_curve(title)
    except (RunError, FloatingPointError) as error:
        raise SystemExit(str(error)) from None
    best = options.save / "checkpoint" / "best.pt"
    if best.exists():  # DQN forgets: the last policy may be a bad one
        trainer.agent.load_state_dict(load_checkpoint(best)["state"]["agent"])
    with evaluating(f"{options.eval_episodes} episodes"):
        result = trainer.evaluate(options.eval_episodes, seed=1_000_000)
    run.write_json("evaluation", {"mean": result.mean, "ci95": result.ci95})
    print(result)
    return result


if __name__ == "__main__":
    env_id = tyro.cli(Options, description=__doc__).env_id
    main(tyro.cli(Options, default=Options(env_id, **DEFAULTS.get(env_id, {}))))
