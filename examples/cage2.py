"""A defender for CAGE Challenge 2 in one file: -16.2 ± 0.3 after 3 000 000 steps, a minute.

    python examples/cage2.py
    vecenv train Cage2-v0 --algo examples/cage2.py

The compiled simulator of the challenge, 64 networks side by side, against both of its attackers,
and PPO in plain PyTorch. Blue sees the challenge's bits and what it remembers of earlier ones, and
chooses from 44 actions. `vecenv train Cage2-v0` trains longer, weighs the steps as the score of the
challenge does, and plays its table. Returns are of 100 steps: doing nothing costs about 500, the
challenge's winner scored -15.2.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.distributions import Categorical

from buffers import RolloutBuffer
from vecenv import make_vec
from vecenv.learn import EvaluationResult, evaluate


@dataclass
class Options:
    env_id: str = "Cage2-v0"  # registered id
    red_agent: str = "mixed"  # "b_line", "meander", or either, drawn for every episode
    total_steps: int = 3_000_000  # env steps
    num_envs: int = 64  # envs stepped side by side
    num_steps: int = 101  # an episode of every env, and the step that only resets
    learning_rate: float = 1e-3  # of Adam; falls to 0
    num_epochs: int = 4  # passes over the rollout per update
    num_minibatches: int = 4  # gradient steps per pass
    gamma: float = 0.995  # discount
    gae_lambda: float = 0.95  # of advantages
    clip: float = 0.2  # of the ratio of probabilities
    entropy_weight: float = 0.01  # in the loss; falls to 0
    seed: int = 1
    save: Path = Path("runs/plain-cage2")  # folder for the weights, agent.pt


class Agent(nn.Module):
    def __init__(self, num_inputs: int, num_actions: int, width: int = 64) -> None:
        super().__init__()
        self.actor = self.network(num_inputs, width, num_actions, gain=0.01)
        self.critic = self.network(num_inputs, width, 1, gain=1.0)

    @staticmethod
    def network(num_inputs: int, width: int, num_outputs: int, gain: float) -> nn.Sequential:
        layers = (
            nn.Linear(num_inputs, width),
            nn.Linear(width, width),
            nn.Linear(width, num_outputs),
        )
        for layer, own_gain in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
            nn.init.orthogonal_(layer.weight, own_gain)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    def policy(self, obs: Tensor) -> Categorical:
        return Categorical(logits=self.actor(obs))

    def value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)


def main(options: Options) -> EvaluationResult:
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    kwargs: Any = {"red_agent": options.red_agent, "observation": "memory"}
    envs = make_vec(options.env_id, options.num_envs, **kwargs)
    obs_space: Any = envs.single_observation_space
    action_space: Any = envs.single_action_space
    agent = Agent(obs_space.shape[0], int(action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=options.learning_rate, eps=1e-5)
    rollout = RolloutBuffer(
        options.num_steps, options.num_envs, obs_space, action_space,
        autoreset_mode=envs.autoreset_mode, gamma=options.gamma, gae_lambda=options.gae_lambda,
        seed=options.seed,
    )  # fmt: skip
    rollout.start(envs.reset(seed=options.seed)[0])
    num_updates = options.total_steps // (options.num_envs * options.num_steps)
    begin = time.perf_counter()
    for update in range(num_updates):
        left = 1 - update / num_updates
        optimizer.param_groups[0]["lr"] = options.learning_rate * left
        with torch.no_grad():
            for t in range(options.num_steps):
                obs = rollout.obs_at(t)
                policy = agent.policy(obs)
                actions = policy.sample()
                log_probs = policy.log_prob(actions)
                rollout.put(t, actions=actions, log_probs=log_probs, values=agent.value(obs))
                envs.step(rollout.env_actions(t), out=rollout.slot(t))
            returns = rollout.episodes().returns
            rollout.terminations.logical_or_(rollout.truncations)  # after 100 steps all is over
            rollout.truncations.zero_()
            rollout.compute_advantages(agent.value(rollout.obs_at(options.num_steps)))
        for _ in range(options.num_epochs):
            for batch in rollout.minibatches(options.num_minibatches, normalize_advantages=True):
                policy = agent.policy(batch.obs)
                ratio = (policy.log_prob(batch.actions) - batch.log_probs).exp()
                clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
                gain = torch.min(ratio * batch.advantages, clipped * batch.advantages)
                errors = (agent.value(batch.obs) - batch.returns).square()
                bonus = options.entropy_weight * left * policy.entropy()
                loss = (0.25 * errors - gain - bonus).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        if update % 50 == 49 and len(returns):
            steps = (update + 1) * options.num_envs * options.num_steps
            speed = steps / (time.perf_counter() - begin)
            print(f"{steps} steps: return {np.mean(returns):.1f}, {speed:.0f} steps/s", flush=True)
        rollout.advance()
    envs.close()

    options.save.mkdir(parents=True, exist_ok=True)
    torch.save(agent.state_dict(), options.save / "agent.pt")
    envs = make_vec(options.env_id, 100, **kwargs)
    result = evaluate(lambda obs: agent.actor(obs).argmax(-1), envs, 1000, seed=10_000)
    envs.close()
    print(f"{options.env_id}: {result}")
    return result


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
