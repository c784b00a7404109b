"""PPO with a GRU in one file: CartPole without its velocities, about 495 of 500 points, a minute.

    python examples/ppo_recurrent.py
    vecenv train BlindCartPole-v1 --algo examples/ppo_recurrent.py      # in the folder examples

The policy sees the position of the cart and the angle of the pole alone; it has to remember them to
know how fast they change. Without memory episodes last about 50 steps. The rollout keeps the state
of the GRU before each step, and batches are sequences of steps (`RolloutBuffer.sequences`).
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box
from torch import Tensor, nn
from torch.distributions import Categorical

from buffers import RolloutBuffer
from vecenv import make_vec
from vecenv.learn import EvaluationResult, evaluate


@dataclass
class Options:
    env_id: str = "BlindCartPole-v1"  # registered id, also "module:id"
    total_steps: int = 204_800  # env steps
    num_envs: int = 16  # envs stepped side by side
    num_steps: int = 128  # steps of each env per update
    sequence_length: int = 32  # steps through which gradients pass
    learning_rate: float = 2e-3  # of Adam; falls to 0
    num_epochs: int = 4  # passes over the rollout per update
    num_minibatches: int = 4  # gradient steps per pass
    clip: float = 0.2  # of the ratio of probabilities
    entropy_weight: float = 0.001  # in the loss
    reward_scale: float = 0.01  # values near 1: they share the GRU with the policy
    seed: int = 1
    save: Path = Path("runs/plain-ppo_recurrent")  # folder for the weights, agent.pt


class WithoutVelocities(gym.ObservationWrapper):
    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1", max_episode_steps=-1))
        space: Any = self.env.observation_space
        self.observation_space = Box(space.low[::2], space.high[::2], dtype=space.dtype)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[::2]


gym.register("BlindCartPole-v1", entry_point=lambda **_: WithoutVelocities(), max_episode_steps=500)


class Agent(nn.Module):
    """Policy and value of what a GRU remembers."""

    def __init__(self, num_inputs: int, num_actions: int, size: int = 64) -> None:
        super().__init__()
        self.size = size
        self.encoder = nn.Sequential(nn.Linear(num_inputs, size), nn.Tanh())
        self.cell = nn.GRUCell(size, size)
        self.actor, self.critic = nn.Linear(size, num_actions), nn.Linear(size, 1)

    def forward(
        self, obs: Tensor, state: Tensor, is_first: Tensor
    ) -> tuple[Categorical, Tensor, Tensor]:
        """Of obs (L, S, F), is_first (L, S), state (S, size) before: policy, values, state."""
        states = []
        for x, first in zip(self.encoder(obs), is_first, strict=True):
            state = self.cell(x, state.masked_fill(first[:, None], 0.0))
            states.append(state)
        memory = torch.stack(states)
        return Categorical(logits=self.actor(memory)), self.critic(memory).squeeze(-1), state


def play(agent: Agent, options: Options, episodes: int = 100) -> EvaluationResult:
    """Return the mean return of the likeliest actions."""
    envs = make_vec(options.env_id, 50)
    state = torch.zeros(50, agent.size)

    def act(obs: Tensor, starts: Tensor) -> Tensor:
        nonlocal state
        policy, _, state = agent(obs[None], state, starts[None])
        return policy.probs[0].argmax(-1)

    result = evaluate(act, envs, episodes, seed=10_000)
    envs.close()
    return result


def main(options: Options) -> EvaluationResult:
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    envs = make_vec(options.env_id, options.num_envs)
    obs_space: Any = envs.single_observation_space
    action_space: Any = envs.single_action_space
    agent = Agent(obs_space.shape[0], int(action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=options.learning_rate, eps=1e-5)
    rollout = RolloutBuffer(
        options.num_steps, options.num_envs, obs_space, action_space,
        autoreset_mode=envs.autoreset_mode, seed=options.seed,
        extra_columns={"state": Box(-1, 1, (agent.size,))},
    )  # fmt: skip
    rollout.start(envs.reset(seed=options.seed)[0])
    state = torch.zeros(options.num_envs, agent.size)

    def act(t: int) -> tuple[Categorical, Tensor, Tensor]:
        return agent(rollout.obs_at(t)[None], state, rollout.is_first_at(t)[None])

    num_updates = options.total_steps // (options.num_envs * options.num_steps)
    begin = time.perf_counter()
    for update in range(num_updates):
        optimizer.param_groups[0]["lr"] = options.learning_rate * (1 - update / num_updates)
        with torch.no_grad():
            for t in range(options.num_steps):
                policy, values, after = act(t)
                actions = policy.sample()
                env_actions = rollout.put(
                    t, actions=actions[0], log_probs=policy.log_prob(actions)[0],
                    values=values[0], state=state,
                )  # fmt: skip
                envs.step(env_actions, out=rollout.slot(t))
                state = after
            returns = rollout.episodes().returns
            rollout.rewards.mul_(options.reward_scale)
            rollout.compute_advantages(act(options.num_steps)[1][0])
        for _ in range(options.num_epochs):
            for batch in rollout.sequences(
                options.num_minibatches, length=options.sequence_length,
                initial_states=["state"], normalize_advantages=True,
            ):  # fmt: skip
                policy, values, _ = agent(batch.obs, batch.initial_states["state"], batch.is_first)
                ratio = (policy.log_prob(batch.actions) - batch.log_probs).exp()
                clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
                gain = torch.min(ratio * batch.advantages, clipped * batch.advantages)
                errors = (values - batch.returns).square()
                losses = 0.5 * errors - gain - options.entropy_weight * policy.entropy()
                optimizer.zero_grad()
                ((batch.weights * losses).sum() / batch.weights.sum()).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        if update % 10 == 9 and len(returns):
            steps = (update + 1) * options.num_envs * options.num_steps
            speed = steps / (time.perf_counter() - begin)
            print(f"{steps} steps: return {np.mean(returns):.1f}, {speed:.0f} steps/s", flush=True)
        rollout.advance()
    envs.close()

    options.save.mkdir(parents=True, exist_ok=True)
    torch.save(agent.state_dict(), options.save / "agent.pt")
    result = play(agent, options)
    print(f"{options.env_id}: {result}")
    return result


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
