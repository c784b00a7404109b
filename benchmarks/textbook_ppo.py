"""PPO as it is usually written in one file: the baseline of `benchmarks/ppo.py`.

Gymnasium's own vector env with a statistics wrapper per env, `torch.distributions`, a conversion
from NumPy to torch and back in every step, a Python loop over time for the advantages, indexing per
minibatch, `nn.Sequential` networks, Adam and `clip_grad_norm_`. It is written plainly, not badly.

Same-step autoreset, so every step it makes is a step of an episode.

    python benchmarks/textbook_ppo.py
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

ENV_ID = "CartPole-v1"
NUM_ENVS, NUM_STEPS = 8, 128
NUM_EPOCHS, NUM_MINIBATCHES = 4, 4
LEARNING_RATE = 2.5e-4
GAMMA, GAE_LAMBDA = 0.99, 0.95
CLIP, ENTROPY_WEIGHT, VALUE_WEIGHT, MAX_GRAD_NORM = 0.2, 0.01, 0.5, 0.5


def make_env() -> gym.Env:
    """Make one env that records the return of its episodes."""
    return gym.wrappers.RecordEpisodeStatistics(gym.make(ENV_ID))


def linear(num_inputs: int, num_outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """Make a linear layer with orthogonal weights and no bias to begin with."""
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Separate actor and critic, 64-64 with tanh."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            linear(num_inputs, 64), nn.Tanh(), linear(64, 64), nn.Tanh(), linear(64, 1, gain=1.0)
        )
        self.actor = nn.Sequential(
            linear(num_inputs, 64),
            nn.Tanh(),
            linear(64, 64),
            nn.Tanh(),
            linear(64, num_actions, gain=0.01),
        )

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        """Return values (B, 1)."""
        return self.critic(obs)

    def act(
        self, obs: torch.Tensor, action: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the action (drawn if not given), its log-probability, entropy and value."""
        distribution = Categorical(logits=self.actor(obs))
        if action is None:
            action = distribution.sample()
        return action, distribution.log_prob(action), distribution.entropy(), self.critic(obs)


class Clock:
    """Seconds per phase; the few microseconds it takes itself are in the phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to phase `name`."""
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin


def train(num_updates: int, seed: int = 1, clock: Clock | None = None) -> tuple[int, list[float]]:
    """Train for some updates; return how many env steps were made and the episodes' returns."""
    clock = clock or Clock()
    torch.manual_seed(seed)
    np.random.seed(seed)
    envs = gym.vector.SyncVectorEnv(
        [make_env] * NUM_ENVS, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )
    assert isinstance(envs.single_action_space, gym.spaces.Discrete)
    shape = envs.single_observation_space.shape
    assert shape is not None
    agent = Agent(int(np.prod(shape)), int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)

    obs = torch.zeros((NUM_STEPS, NUM_ENVS, *shape))
    actions = torch.zeros((NUM_STEPS, NUM_ENVS))
    log_probs = torch.zeros((NUM_STEPS, NUM_ENVS))
    rewards = torch.zeros((NUM_STEPS, NUM_ENVS))
    dones = torch.zeros((NUM_STEPS, NUM_ENVS))
    values = torch.zeros((NUM_STEPS, NUM_ENVS))

    episode_returns: list[float] = []
    next_obs = torch.Tensor(envs.reset(seed=seed)[0])
    next_done = torch.zeros(NUM_ENVS)
    for update in range(num_updates):
        optimizer.param_groups[0]["lr"] = (1 - update / num_updates) * LEARNING_RATE
        for step in range(NUM_STEPS):
            with clock.phase("policy"), torch.no_grad():
                obs[step], dones[step] = next_obs, next_done
                action, log_prob, _, value = agent.act(next_obs)
                values[step] = value.flatten()
                actions[step], log_probs[step] = action, log_prob
            with clock.phase("env"):
                new_obs, reward, terminated, truncated, infos = envs.step(action.cpu().numpy())
            with clock.phase("policy"):
                rewards[step] = torch.tensor(reward).view(-1)
                next_obs = torch.Tensor(new_obs)
                next_done = torch.Tensor(np.logical_or(terminated, truncated))
                if "final_info" in infos:
                    for i in np.flatnonzero(infos["_final_info"]):
                        episode_returns.append(float(infos["final_info"]["episode"]["r"][i]))

        with clock.phase("advantages"), torch.no_grad():
            next_value = agent.value(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards)
            last = torch.zeros(NUM_ENVS)
            for t in reversed(range(NUM_STEPS)):
                is_last = t == NUM_STEPS - 1
                not_done = 1.0 - (next_done if is_last else dones[t + 1])
                value = next_value if is_last else values[t + 1]
                delta = rewards[t] + GAMMA * value * not_done - values[t]
                advantages[t] = last = delta + GAMMA * GAE_LAMBDA * not_done * last
            returns = advantages + values

        with clock.phase("update"):
            flat_obs = obs.reshape((-1, *shape))
            flat_log_probs, flat_actions = log_probs.reshape(-1), actions.reshape(-1)
            flat_advantages, flat_returns = advantages.reshape(-1), returns.reshape(-1)
            batch_size = NUM_ENVS * NUM_STEPS
            indices = np.arange(batch_size)
            for _ in range(NUM_EPOCHS):
                np.random.shuffle(indices)
                for start in range(0, batch_size, batch_size // NUM_MINIBATCHES):
                    rows = indices[start : start + batch_size // NUM_MINIBATCHES]
                    _, new_log_prob, entropy, new_value = agent.act(
                        flat_obs[rows], flat_actions.long()[rows]
                    )
                    log_ratio = new_log_prob - flat_log_probs[rows]
                    ratio = log_ratio.exp()
                    with torch.no_grad():
                        _approx_kl = ((ratio - 1) - log_ratio).mean()
                        _clip_fraction = ((ratio - 1.0).abs() > CLIP).float().mean().item()
                    advantage = flat_advantages[rows]
                    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                    policy_loss = torch.max(
                        -advantage * ratio, -advantage * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
                    ).mean()
                    value_loss = 0.5 * ((new_value.view(-1) - flat_returns[rows]) ** 2).mean()
                    loss = policy_loss - ENTROPY_WEIGHT * entropy.mean() + VALUE_WEIGHT * value_loss
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
                    optimizer.step()
    envs.close()
    return num_updates * NUM_ENVS * NUM_STEPS, episode_returns


def main() -> None:
    """Train for about 100 000 steps and print how it went."""
    begin = time.perf_counter()
    clock = Clock()
    num_steps, episode_returns = train(num_updates=97, clock=clock)
    seconds = time.perf_counter() - begin
    print(f"{num_steps} steps in {seconds:.1f} s: {num_steps / seconds:.0f} steps/s")
    print({name: round(spent / seconds, 3) for name, spent in clock.seconds.items()})
    print(f"mean return of the last 20 episodes: {np.mean(episode_returns[-20:]):.1f}")


if __name__ == "__main__":
    main()
