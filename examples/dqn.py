"""Double DQN in one file, to be changed: 500 points in CartPole-v1 after 60 000 steps, a minute.

    python examples/dqn.py
    python examples/dqn.py --env-id LunarLander-v3 --total-steps 300000   # slow; needs box2d
    vecenv train CartPole-v1 --algo examples/dqn.py

V. Mnih et al., "Human-level control through deep reinforcement learning", Nature 2015, and H. van
Hasselt et al., "Deep Reinforcement Learning with Double Q-learning", 2016 (arXiv 1509.06461). For
envs of vectors with discrete actions. `vecenv.train.dqn` is the same with pictures, priorities,
n steps, checkpoints.
"""

import copy
import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import nn

from buffers import SharedReplayBuffer, TransitionWriter
from vecenv import make_vec
from vecenv.learn import EvaluationResult, evaluate


@dataclass
class Options:
    env_id: str = "CartPole-v1"  # registered id, also "module:id"
    total_steps: int = 60_000  # env steps
    num_envs: int = 8  # envs stepped side by side
    learning_starts: int = 1_000  # env steps before the first update
    updates_per_step: int = 2  # after each step of all envs
    learning_rate: float = 5e-4  # of Adam; falls to 0
    batch_size: int = 128  # transitions per update
    capacity: int = 50_000  # of the buffer, in transitions
    gamma: float = 0.99  # discount
    tau: float = 0.01  # step of the target network in an update, as a fraction
    exploration: tuple[float, float] = (1.0, 0.02)  # share of random actions: at first, at last
    exploration_steps: int = 10_000  # env steps in which it falls
    hidden: tuple[int, ...] = (128, 128)  # units of the layers
    seed: int = 1
    save: Path = Path("runs/plain-dqn")  # folder for the weights, network.pt


def make_network(*widths: int) -> nn.Sequential:
    layers = [part for a, b in pairwise(widths[:-1]) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


def main(options: Options) -> EvaluationResult:
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    rng = np.random.default_rng(options.seed)
    envs = make_vec(options.env_id, options.num_envs)
    obs_space: Any = envs.single_observation_space
    action_space: Any = envs.single_action_space
    network = make_network(obs_space.shape[0], *options.hidden, int(action_space.n))
    target = copy.deepcopy(network).requires_grad_(False)
    optimizer = torch.optim.Adam(network.parameters(), lr=options.learning_rate)
    buffer = SharedReplayBuffer(
        options.capacity, obs_space, action_space, gamma=options.gamma, seed=options.seed
    )
    writer = TransitionWriter(envs, buffer)
    obs, _ = envs.reset(seed=options.seed)
    writer.reset(obs)

    returns, running = deque[float](maxlen=20), np.zeros(options.num_envs)
    begin, first, last = time.perf_counter(), *options.exploration
    for steps in range(options.num_envs, options.total_steps + 1, options.num_envs):
        share = max(last, first + (last - first) * steps / options.exploration_steps)
        with torch.no_grad():
            actions = network(torch.as_tensor(obs)).argmax(-1).numpy()
        is_random = rng.random(options.num_envs) < share
        actions[is_random] = rng.integers(action_space.n, size=options.num_envs)[is_random]
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        writer.step(actions, obs, rewards, terminations, truncations, infos)

        running += rewards
        is_over = terminations | truncations
        returns.extend(running[is_over])
        running[is_over] = 0
        if steps < options.learning_starts:
            continue
        optimizer.param_groups[0]["lr"] = options.learning_rate * (1 - steps / options.total_steps)
        for _ in range(options.updates_per_step):
            batch = buffer.sample(options.batch_size)
            with torch.no_grad():  # the network chooses, the target says what that is worth
                best = network(batch.next_obs).argmax(-1, keepdim=True)
                next_values = target(batch.next_obs).gather(-1, best).squeeze(-1)
                goals = batch.rewards + batch.discounts * next_values  # 0 after a termination
            values = network(batch.obs).gather(-1, batch.actions[:, None]).squeeze(-1)
            loss = nn.functional.smooth_l1_loss(values, goals)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 10.0)
            optimizer.step()
            with torch.no_grad():
                for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
                    theirs.lerp_(ours, options.tau)
        if steps % 10_000 < options.num_envs:
            speed = steps / (time.perf_counter() - begin)
            print(f"{steps} steps: return {np.mean(returns):.1f}, {speed:.0f} steps/s", flush=True)
    envs.close()

    options.save.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), options.save / "network.pt")
    result = evaluate(lambda obs: network(obs).argmax(-1), options.env_id, 100, seed=10_000)
    print(f"{options.env_id}: {result}")
    return result


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
