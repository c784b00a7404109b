"""Learn from recorded data alone, by cloning and by TD3+BC: --env-id Pendulum-v1.

    python examples/offline.py

Without --data the example makes its data set itself: all that SAC sees while it learns to
control the env, from random actions to good ones. Cloning imitates the bad with the good; TD3+BC
learns from the rewards which actions are better. Networks and losses are the first half of this
file, and are for changing; the second half trains.
"""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import tyro
from gymnasium.spaces import Box
from rich.progress import Progress
from torch import Tensor, nn

from buffers import EpisodicReplayBuffer, SharedReplayBuffer
from buffers.datasets import (
    DatasetError,
    EpisodeDataset,
    from_buffer,
    from_hdf5,
    from_minari,
    to_hdf5,
)
from vecenv import make_vec
from vecenv.learn import Adam, EvaluationResult, Gradient, evaluate, evaluating, gradient_options
from vecenv.train import sac


@dataclass
class Options:
    env_id: str = "Pendulum-v1"  # registered id, also "module:id"
    algorithms: tuple[Literal["bc", "td3bc"], ...] = ("bc", "td3bc")  # one after the other
    data: str | None = None  # a D4RL-like .hdf5 file, or the id of a Minari data set; None: make it
    data_steps: int = 8000  # env steps of the data set that is made
    write: Path | None = None  # .hdf5 file to write that data set to
    num_updates: int = 5000  # gradient steps
    batch_size: int = 256  # transitions per update
    learning_rate: float = 1e-3  # of Adam, for all networks
    gamma: float = 0.99  # discount
    tau: float = 0.005  # step of the targets towards the critics in an update, as a fraction
    alpha: float = 40.0  # of TD3+BC: weight of the values beside imitation; 2.5 in its paper
    hidden: tuple[int, ...] = (128, 128)  # units of the ReLU layers of each network
    seed: int = 1  # of data, networks and draws
    backend: str | None = None  # of vecenv.make_vec
    compile: Literal["auto", "on", "off"] = "auto"  # the update; auto: if there are many
    threads: int = 1  # of torch; more is far slower where cores are busy
    eval_episodes: int = 100  # episodes of each policy at the end
    save: Path = Path("runs/offline")  # folder for results.json and the policies


# ---- Networks and losses ------------------------------------------------------------------------


class Batch(NamedTuple):
    """Transitions, and the noise on the actions that targets are asked about (TD3)."""

    obs: Tensor  # (B, *obs_shape)
    next_obs: Tensor  # (B, *obs_shape)
    actions: Tensor  # (B, A), from -1 to 1
    rewards: Tensor  # (B,)
    discounts: Tensor  # (B,), of the value of next_obs: 0 where the episode terminated
    noise: Tensor  # (B, A), from -0.5 to 0.5


def mlp(*widths: int) -> nn.Sequential:
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths[:-1])]
    parts = [part for pair in layers for part in pair]
    return nn.Sequential(nn.Flatten(), *parts, nn.Linear(widths[-2], widths[-1]))


class Agent(nn.Module):
    """A deterministic actor, two critics and their targets."""

    mean: Tensor  # of the observations in the data set, and their spread
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, num_actions: int, options: Options) -> None:
        super().__init__()
        widths = mean.numel(), *options.hidden
        self.actor = mlp(*widths, num_actions)
        self.critics = sac.Critics(2, widths[0] + num_actions, *options.hidden, 1)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def scaled(self, obs: Tensor) -> Tensor:
        return (obs - self.mean) / self.std

    def act(self, obs: Tensor) -> Tensor:
        """Return actions (B, A) from -1 to 1 for scaled obs."""
        return self.actor(obs).float().tanh()


Loss = Callable[[Agent, Batch], tuple[Tensor, dict[str, Tensor]]]


def bc_loss(agent: Agent, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Imitate the recorded actions."""
    loss = (agent.act(batch.obs) - batch.actions).square().sum(-1).mean()
    return loss, {"actor_loss": loss}


def td3bc_loss(agent: Agent, batch: Batch, alpha: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Do what the critics like, and stay near the recorded actions.

    S. Fujimoto and S. Gu, "A Minimalist Approach to Offline Reinforcement Learning", NeurIPS 2021
    (arXiv 2106.06860). The actor is updated as often as the critics, and has no target of its own.
    """
    with torch.no_grad():
        actions = (agent.act(batch.next_obs) + batch.noise).clamp(-1, 1)
        goal = batch.rewards + batch.discounts * agent.targets(batch.next_obs, actions).amin(0)
    critic_loss = (agent.critics(batch.obs, batch.actions) - goal).square().sum(0).mean()
    chosen = agent.act(batch.obs)
    values = agent.critics(batch.obs, chosen, frozen=True)[0]
    errors = (chosen - batch.actions).square().sum(-1)
    actor_loss = errors.mean() - alpha * values.mean() / values.detach().abs().mean()
    return critic_loss + actor_loss, {"critic_loss": critic_loss, "actor_loss": actor_loss}


# ---- Data ---------------------------------------------------------------------------------------


def record(options: Options) -> EpisodeDataset:
    """Let SAC learn, and return all that it saw, with actions as the env takes them."""
    folder = options.save / "behaviour"
    learning = sac.Options(
        env_id=options.env_id, total_steps=options.data_steps, capacity=options.data_steps,
        seed=options.seed, backend=options.backend, compile=options.compile, save=folder,
    )  # fmt: skip
    envs = make_vec(options.env_id, 1, backend=options.backend, autoreset_mode="SameStep")
    trainer = sac.SAC(learning, envs)
    trainer.start()
    with Progress(refresh_per_second=4) as progress:
        task = progress.add_task("making the data set by SAC", total=options.data_steps)
        while trainer.steps < options.data_steps:
            trainer.collect()
            if trainer.steps > learning.learning_starts:
                trainer.learn()
            progress.update(task, completed=trainer.steps)
    spaces = envs.single_observation_space, envs.single_action_space
    envs.close()
    episodes = EpisodicReplayBuffer(options.data_steps, *spaces)
    for episode in from_buffer(trainer.buffer, check_bounds=False):  # actions are from -1 to 1
        episode["actions"] = sac.to_env(episode["actions"], envs.single_action_space)
        episodes.add_episode(episode)
    return from_buffer(episodes)


def check_file(path: Path) -> None:
    """End the program if this file can't be written, before the data are made for minutes."""
    if find_spec("h5py") is None:
        raise SystemExit("--write needs h5py: pip install 'vecenv[datasets]'")
    if path.exists() or not path.parent.is_dir():
        found = "it is there already" if path.exists() else f"there is no folder {path.parent}"
        raise SystemExit(f"--write {path}: {found}; choose another name")


def open_data(options: Options) -> EpisodeDataset:
    if options.data is None:
        return record(options)
    envs = make_vec(options.env_id, 1, backend=options.backend)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    envs.close()
    if options.data.endswith((".hdf5", ".h5")):
        return from_hdf5(options.data, obs_space, action_space)
    return from_minari(options.data, observation_space=obs_space, action_space=action_space)


# ---- Training -----------------------------------------------------------------------------------


class Trainer:
    """Lets an agent learn from a buffer that nothing is added to."""

    def __init__(self, buffer: SharedReplayBuffer, algorithm: str, options: Options) -> None:
        torch.manual_seed(options.seed)
        self.buffer, self.options = buffer, options
        self.space = cast("Any", buffer.action_space)
        obs = buffer.rows()["obs"][: len(buffer)].double()
        mean, std = obs.mean(0).float(), obs.std(0).float() + 1e-3
        self.low, self.high = map(torch.from_numpy, (self.space.low, self.space.high))
        self.agent = Agent(mean, std, len(self.space.low), options)
        if algorithm == "bc":
            self.agent.critics.requires_grad_(False)
        losses: dict[str, Loss] = {
            "bc": bc_loss,
            "td3bc": lambda agent, batch: td3bc_loss(agent, batch, options.alpha),
        }
        how = gradient_options(
            options.compile, num_calls=options.num_updates, num_rows=options.batch_size
        )
        self.gradient = Gradient(self.agent, losses[algorithm], compile=how["compile"])
        self.optimizer = Adam(self.gradient.parameters(), lr=options.learning_rate)
        self.drawn = buffer.new_batch(options.batch_size)
        self.generator = torch.Generator().manual_seed(options.seed)

    def draw(self) -> Batch:
        drawn, scaled = self.buffer.sample(self.options.batch_size, self.drawn), self.agent.scaled
        unit = 2 * (drawn.actions.float() - self.low) / (self.high - self.low) - 1
        noise = 0.2 * torch.randn(unit.shape, generator=self.generator)
        obs = scaled(drawn.obs.float()), scaled(drawn.next_obs.float())
        return Batch(*obs, unit, drawn.rewards, drawn.discounts, noise.clamp(-0.5, 0.5))

    @torch.no_grad()
    def learn(self) -> dict[str, Tensor]:
        """Draw a batch, make a step of Adam, and move the targets."""
        agent = self.agent
        scalars = self.gradient(self.draw())
        self.optimizer.step()
        for target, weight in zip(
            agent.targets.parameters(), agent.critics.parameters(), strict=True
        ):
            target.lerp_(weight, self.options.tau)
        return scalars

    @torch.no_grad()
    def act(self, obs: Tensor) -> np.ndarray:
        """Return actions as the env takes them for obs (B, *obs_shape)."""
        actions = self.agent.act(self.agent.scaled(obs.float()))
        return sac.to_env(actions.numpy().astype(self.space.dtype), self.space)


def train(algorithm: str, buffer: SharedReplayBuffer, options: Options) -> EvaluationResult:
    """Learn, save the policy, and evaluate it."""
    trainer, begin = Trainer(buffer, algorithm, options), perf_counter()
    scalars: dict[str, Tensor] = {}
    with Progress(refresh_per_second=4) as progress:
        for _ in progress.track(range(options.num_updates), description=algorithm):
            scalars = trainer.learn()
    if not all(map(torch.isfinite, scalars.values())):
        raise SystemExit(f"{algorithm} diverged: {scalars}; try a lower --learning-rate")
    torch.save(trainer.agent.state_dict(), options.save / f"{algorithm}.pt")
    count = options.eval_episodes
    with evaluating(f"{count} episodes"):
        result = evaluate(trainer.act, options.env_id, count, backend=options.backend)
    print(f"{algorithm}: {result} ({perf_counter() - begin:.0f} s)")
    return result


def main(options: Options) -> dict[str, Any]:
    """Make or read the data set, learn from it, compare; return what results.json has."""
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(options.seed)
    if options.write is not None:
        check_file(options.write)
    try:
        options.save.mkdir(parents=True, exist_ok=True)
        data = open_data(options)
        if options.write is not None:
            print(f"written: {to_hdf5(data, options.write)}")
        returns = np.array([episode["rewards"].sum(dtype=np.float64) for episode in data])
    except (DatasetError, OSError, ModuleNotFoundError) as error:
        raise SystemExit(str(error)) from None
    obs_space, space = data.observation_space, data.action_space
    if not (isinstance(obs_space, Box) and isinstance(space, Box) and space.is_bounded()):
        raise SystemExit(f"{data.name} has the spaces {obs_space, space}, expected bounded Box")
    if len(returns) < 2:
        raise SystemExit(f"episodes: {len(returns)}, expected two at least (--data-steps)")
    mean, half = float(returns.mean()), 1.96 * returns.std(ddof=1) / math.sqrt(len(returns))
    print(f"behaviour: return {mean:.1f} ± {half:.1f} (95 %) over {len(returns)} episodes")
    found: dict[str, Any] = {"behaviour": [mean, float(half)]}
    for algorithm in options.algorithms:
        buffer = data.to_buffer(SharedReplayBuffer, gamma=options.gamma, seed=options.seed)
        try:
            result = train(algorithm, buffer, options)
        except FloatingPointError as error:
            raise SystemExit(f"{algorithm}: {error}") from None
        found[algorithm] = [result.mean, result.ci95]
    (options.save / "results.json").write_text(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
