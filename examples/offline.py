"""Learn from recorded data alone, by cloning and by TD3+BC: -140 from data of -740, a minute.

    python examples/offline.py
    python examples/offline.py --env-id HalfCheetah-v5 --data mujoco/halfcheetah/medium-v0  # Minari
    python examples/offline.py --write pendulum.hdf5      # keeps the data set that it makes

Without --data the example makes its data set itself, by a controller of Pendulum-v1 that acts at
random now and then: in some episodes rarely, in others nearly always. Cloning imitates the bad with
the good; TD3+BC learns from the rewards which actions are better. S. Fujimoto and S. Gu, "A
Minimalist Approach to Offline Reinforcement Learning", NeurIPS 2021 (arXiv 2106.06860).
"""

import copy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor, nn

from buffers import EpisodicReplayBuffer, SharedReplayBuffer, TransitionWriter
from buffers.datasets import EpisodeDataset, from_buffer, from_hdf5, from_minari, to_hdf5
from vecenv import make_vec
from vecenv.learn import EvaluationResult, evaluate


@dataclass
class Options:
    env_id: str = "Pendulum-v1"  # registered id, also "module:id"
    data: str | None = None  # a D4RL-like .hdf5 file, or the id of a Minari data set; None: make it
    num_episodes: int = 40  # of the data set that is made
    write: Path | None = None  # .hdf5 file to write that data set to
    num_updates: int = 5000  # gradient steps
    batch_size: int = 256  # transitions per update
    learning_rate: float = 1e-3  # of Adam, for all networks
    gamma: float = 0.99  # discount
    tau: float = 0.005  # step of the targets towards the critics in an update, as a fraction
    alpha: float = 40.0  # of TD3+BC: weight of the values beside imitation; 2.5 in its paper
    hidden: tuple[int, ...] = (128, 128)  # units of the ReLU layers of each network
    seed: int = 1  # of data, networks and draws
    save: Path = Path("runs/offline")  # folder for the policies


def make_network(*widths: int) -> nn.Sequential:
    layers = [part for a, b in pairwise(widths[:-1]) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


class Agent(nn.Module):
    """A deterministic actor, and two critics; observations are scaled as the data set's are."""

    mean: Tensor
    std: Tensor

    def __init__(self, obs: Tensor, num_actions: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.actor = make_network(obs.shape[1], *hidden, num_actions)
        widths = obs.shape[1] + num_actions, *hidden, 1
        self.critics = nn.ModuleList(make_network(*widths) for _ in range(2))
        self.register_buffer("mean", obs.mean(0))
        self.register_buffer("std", obs.std(0) + 1e-3)

    def scaled(self, obs: Tensor) -> Tensor:
        return (obs.float() - self.mean) / self.std

    def act(self, obs: Tensor) -> Tensor:
        """Return actions (B, A) from -1 to 1 for scaled obs."""
        return self.actor(obs).tanh()


def values_of(critics: nn.ModuleList, obs: Tensor, actions: Tensor) -> Tensor:
    """Return what each critic says, (2, B)."""
    return torch.stack([critic(torch.cat([obs, actions], -1)).squeeze(-1) for critic in critics])


def control(obs: np.ndarray, is_random: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return torques (N, 1): swing up by the energy, balance at the top; or random ones."""
    angle, speed = np.arctan2(obs[:, 1], obs[:, 0]), obs[:, 2]
    missing = 15 - (0.5 * speed**2 + 15 * obs[:, 0])  # energy, of 15 at the top
    torques = np.where(np.abs(angle) < 0.3, -10 * angle - 2 * speed, missing * np.sign(speed))
    torques[is_random] = rng.uniform(-2, 2, is_random.sum())
    return torques.clip(-2, 2)[:, None].astype(np.float32)


def record(options: Options) -> EpisodeDataset:
    """Play an episode in each of the envs, and return what was seen."""
    count, rng = options.num_episodes, np.random.default_rng(options.seed)
    envs = make_vec("Pendulum-v1", count, autoreset_mode="SameStep")
    spaces = envs.single_observation_space, envs.single_action_space
    buffer = EpisodicReplayBuffer(200 * count, *spaces, num_envs=count)
    writer, shares = TransitionWriter(envs, buffer), np.linspace(0.3, 1, count)
    obs, _ = envs.reset(seed=options.seed)
    writer.reset(obs)
    for _ in range(200):
        actions = control(obs, rng.random(count) < shares, rng)
        obs, rewards, ends, cuts, infos = envs.step(actions)
        writer.step(actions, obs, rewards, ends, cuts, infos)
    envs.close()
    return from_buffer(buffer)


def open_data(options: Options) -> EpisodeDataset:
    if options.data is None:
        if options.env_id != "Pendulum-v1":
            raise SystemExit(f"{options.env_id} has no data set: give one by --data")
        return record(options)
    envs = make_vec(options.env_id, 1)
    spaces: Any = envs.single_observation_space, envs.single_action_space
    envs.close()
    if options.data.endswith((".hdf5", ".h5")):
        return from_hdf5(options.data, *spaces)
    return from_minari(options.data, observation_space=spaces[0], action_space=spaces[1])


def train(algorithm: str, data: EpisodeDataset, options: Options) -> EvaluationResult:
    """Learn, save the policy, and evaluate it."""
    torch.manual_seed(options.seed)
    buffer = data.to_buffer(SharedReplayBuffer, gamma=options.gamma, seed=options.seed)
    space: Any = data.action_space
    low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
    agent = Agent(buffer.rows()["obs"][: len(buffer)].float(), len(low), options.hidden)
    targets = copy.deepcopy(agent.critics).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), lr=options.learning_rate)
    for _ in range(options.num_updates):
        batch = buffer.sample(options.batch_size)
        obs, next_obs = agent.scaled(batch.obs), agent.scaled(batch.next_obs)
        recorded = 2 * (batch.actions - low) / (high - low) - 1
        actions = agent.act(obs)
        loss = (actions - recorded).square().sum(-1).mean()  # imitate
        if algorithm == "td3bc":
            with torch.no_grad():
                noise = 0.2 * torch.randn(recorded.shape)
                following = (agent.act(next_obs) + noise.clamp(-0.5, 0.5)).clamp(-1, 1)
                goals = values_of(targets, next_obs, following).amin(0)
                goals = batch.rewards + batch.discounts * goals  # 0 after a termination
            errors = values_of(agent.critics, obs, recorded) - goals
            agent.critics.requires_grad_(False)  # which the actor's loss passes through
            values = values_of(agent.critics, obs, actions)[0]
            agent.critics.requires_grad_(True)
            loss = loss - options.alpha * values.mean() / values.detach().abs().mean()
            loss = loss + errors.square().mean(1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for theirs, ours in zip(targets.parameters(), agent.critics.parameters(), strict=True):
                theirs.lerp_(ours, options.tau)

    def act(obs: Tensor) -> np.ndarray:
        actions = low + (agent.act(agent.scaled(obs)) + 1) / 2 * (high - low)
        return actions.numpy().astype(space.dtype)

    options.save.mkdir(parents=True, exist_ok=True)
    torch.save(agent.state_dict(), options.save / f"{algorithm}.pt")
    result = evaluate(act, options.env_id, 100, seed=10_000)
    print(f"{algorithm}: {result}", flush=True)
    return result


def main(options: Options) -> dict[str, EvaluationResult]:
    """Make or read the data set, learn from it by both algorithms, and compare."""
    torch.set_num_threads(1)
    data = open_data(options)
    if options.write is not None:
        print(f"written: {to_hdf5(data, options.write)}")
    returns = [episode["rewards"].sum() for episode in data]
    print(f"data: return {np.mean(returns):.1f} over {len(returns)} episodes", flush=True)
    return {algorithm: train(algorithm, data, options) for algorithm in ("bc", "td3bc")}


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
