"""SAC in one file, to be changed: about -145 points in Pendulum-v1 after 15 000 steps, a minute.

    python examples/sac.py
    python examples/sac.py --env-id HalfCheetah-v5 --total-steps 300000   # slow; needs mujoco
    vecenv train Pendulum-v1 --algo examples/sac.py

T. Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018 (arXiv 1812.05905). For
envs of vectors with bounded continuous actions. `vecenv.train.sac` is the same with compiled
gradients, priorities, n steps, first-ready stepping, checkpoints.
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
from torch import Tensor, nn
from torch.distributions import Normal

from buffers import SharedReplayBuffer, TransitionWriter
from vecenv import make_vec
from vecenv.learn import EvaluationResult, evaluate


@dataclass
class Options:
    env_id: str = "Pendulum-v1"  # registered id, also "module:id"
    total_steps: int = 15_000  # env steps
    num_envs: int = 4  # envs stepped side by side
    learning_starts: int = 1_000  # env steps, with random actions, before the first update
    updates_per_step: int = 2  # after each step of all envs
    learning_rate: float = 1e-3  # of Adam
    batch_size: int = 256  # transitions per update
    capacity: int = 100_000  # of the buffer, in transitions
    gamma: float = 0.99  # discount
    tau: float = 0.005  # step of the target critics in an update, as a fraction
    hidden: tuple[int, ...] = (128, 128)  # units of the layers
    seed: int = 1
    save: Path = Path("runs/plain-sac")  # folder for the weights, agent.pt


def make_network(*widths: int) -> nn.Sequential:
    layers = [part for a, b in pairwise(widths[:-1]) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


class Agent(nn.Module):
    """An actor whose actions are from -1 to 1, two critics, and the weight of the entropy."""

    def __init__(self, num_inputs: int, num_actions: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.actor = make_network(num_inputs, *hidden, 2 * num_actions)
        widths = num_inputs + num_actions, *hidden, 1
        self.critics = nn.ModuleList(make_network(*widths) for _ in range(2))
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def draw(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions (B, A), and the logarithms of their densities (B,)."""
        mean, log_std = self.actor(obs.float()).chunk(2, -1)
        policy = Normal(mean, log_std.clamp(-5, 2).exp())
        x = policy.rsample()
        slope = 2 * (np.log(2) - x - nn.functional.softplus(-2 * x))  # log of tanh's derivative
        return x.tanh(), (policy.log_prob(x) - slope).sum(-1)

    def act(self, obs: Tensor) -> Tensor:
        """Return the actions (B, A) in the middle of the distributions."""
        return self.actor(obs.float()).chunk(2, -1)[0].tanh()


def values_of(critics: nn.ModuleList, obs: Tensor, actions: Tensor) -> Tensor:
    """Return what each critic says, (2, B)."""
    inputs = torch.cat([obs.float(), actions], -1)
    return torch.stack([critic(inputs).squeeze(-1) for critic in critics])


def main(options: Options) -> EvaluationResult:
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    envs = make_vec(options.env_id, options.num_envs)
    obs_space: Any = envs.single_observation_space
    space: Any = envs.single_action_space
    middle, half = (space.high + space.low) / 2, (space.high - space.low) / 2
    agent = Agent(obs_space.shape[0], space.shape[0], options.hidden)
    targets = copy.deepcopy(agent.critics).requires_grad_(False)
    parts = agent.actor, agent.critics
    actor_optimizer, critic_optimizer = (
        torch.optim.Adam(part.parameters(), lr=options.learning_rate) for part in parts
    )
    alpha_optimizer = torch.optim.Adam([agent.log_alpha], lr=options.learning_rate)
    buffer = SharedReplayBuffer(
        options.capacity, obs_space, space, gamma=options.gamma, seed=options.seed
    )
    writer = TransitionWriter(envs, buffer)
    obs, _ = envs.reset(seed=options.seed)
    writer.reset(obs)

    def learn() -> None:
        batch = buffer.sample(options.batch_size)
        alpha = agent.log_alpha.detach().exp()
        with torch.no_grad():
            actions, log_probs = agent.draw(batch.next_obs)
            values = values_of(targets, batch.next_obs, actions).amin(0) - alpha * log_probs
            goals = batch.rewards + batch.discounts * values  # 0 after a termination
        errors = values_of(agent.critics, batch.obs, batch.actions) - goals
        actions, log_probs = agent.draw(batch.obs)
        agent.critics.requires_grad_(False)  # which the actor's loss passes through
        values = values_of(agent.critics, batch.obs, actions).amin(0)
        agent.critics.requires_grad_(True)
        actor_loss = (alpha * log_probs - values).mean()
        entropy_goal = -actions.shape[-1]
        alpha_loss = -(agent.log_alpha * (log_probs.detach() + entropy_goal)).mean()
        for optimizer in (critic_optimizer, actor_optimizer, alpha_optimizer):
            optimizer.zero_grad()
        (errors.square().mean(1).sum() + actor_loss + alpha_loss).backward()
        for optimizer in (critic_optimizer, actor_optimizer, alpha_optimizer):
            optimizer.step()
        with torch.no_grad():
            for theirs, ours in zip(targets.parameters(), agent.critics.parameters(), strict=True):
                theirs.lerp_(ours, options.tau)

    returns, running = deque[float](maxlen=20), np.zeros(options.num_envs)
    begin = time.perf_counter()
    for steps in range(options.num_envs, options.total_steps + 1, options.num_envs):
        if steps < options.learning_starts:
            actions = 2 * torch.rand(options.num_envs, *space.shape) - 1
        else:
            with torch.no_grad():
                actions, _ = agent.draw(torch.as_tensor(obs))
        scaled = (middle + half * actions.numpy()).astype(space.dtype)
        obs, rewards, terminations, truncations, infos = envs.step(scaled)
        writer.step(actions, obs, rewards, terminations, truncations, infos)

        running += rewards
        is_over = terminations | truncations
        returns.extend(running[is_over])
        running[is_over] = 0
        if steps >= options.learning_starts:
            for _ in range(options.updates_per_step):
                learn()
        if steps % 2_000 < options.num_envs and returns:
            speed = steps / (time.perf_counter() - begin)
            print(f"{steps} steps: return {np.mean(returns):.1f}, {speed:.0f} steps/s", flush=True)
    envs.close()

    def act(obs: Tensor) -> np.ndarray:
        return (middle + half * agent.act(obs).numpy()).astype(space.dtype)

    options.save.mkdir(parents=True, exist_ok=True)
    torch.save(agent.state_dict(), options.save / "agent.pt")
    result = evaluate(act, options.env_id, 100, seed=10_000)
    print(f"{options.env_id}: {result}")
    return result


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
