"""PPO for a game of several agents in one file (IPPO): Spread-v0 from -85 to about -57, a minute.

    python examples/ppo_agents.py
    python examples/ppo_agents.py --env mpe2.simple_spread_v3    # slow; needs "vecenv[agents]"
    vecenv train agents:Spread-v0 --algo examples/ppo_agents.py

All agents share one network and learn each from its own observations and rewards. If the agents of
a game have equal spaces, rows of all of them are one vector env, which PPO takes as it is: row
`game * num_agents + k` is agent k of that game. `vecenv.train.ppo_agents` is the same for several
groups, with a central critic, masks, checkpoints.
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
from vecenv import make_vec_agents
from vecenv.learn import EvaluationResult, evaluate


@dataclass
class Options:
    env: str = "Spread-v0"  # what make_vec_agents takes
    total_steps: int = 300_000  # steps of single agents
    num_games: int = 8  # games stepped side by side
    num_steps: int = 128  # steps of each game per update
    learning_rate: float = 2e-3  # of Adam; falls to 0
    num_epochs: int = 8  # passes over the rollout per update
    num_minibatches: int = 4  # gradient steps per pass
    gamma: float = 0.95  # discount
    gae_lambda: float = 0.95  # of advantages
    clip: float = 0.2  # of the ratio of probabilities
    entropy_weight: float = 0.01  # in the loss
    seed: int = 1
    save: Path = Path("runs/plain-ppo_agents")  # folder for the weights, agent.pt


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


def main(options: Options) -> dict[str, EvaluationResult]:
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    envs: Any = make_vec_agents(options.env, options.num_games)
    obs_space: Any = envs.single_observation_space
    action_space: Any = envs.single_action_space
    agent = Agent(obs_space.shape[0], int(action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=options.learning_rate, eps=1e-5)
    rollout = RolloutBuffer(
        options.num_steps, envs.num_envs, obs_space, action_space,
        autoreset_mode=envs.autoreset_mode, gamma=options.gamma, gae_lambda=options.gae_lambda,
        seed=options.seed,
    )  # fmt: skip
    rollout.start(envs.reset(seed=options.seed)[0])
    num_updates = options.total_steps // (envs.num_envs * options.num_steps)
    begin = time.perf_counter()
    for update in range(num_updates):
        optimizer.param_groups[0]["lr"] = options.learning_rate * (1 - update / num_updates)
        with torch.no_grad():
            for t in range(options.num_steps):
                obs = rollout.obs_at(t)
                policy = agent.policy(obs)
                actions = policy.sample()
                log_probs = policy.log_prob(actions)
                rollout.put(t, actions=actions, log_probs=log_probs, values=agent.value(obs))
                envs.step(rollout.env_actions(t), out=rollout.slot(t))  # writes who acted, too
            rollout.compute_advantages(agent.value(rollout.obs_at(options.num_steps)))
        for _ in range(options.num_epochs):
            for batch in rollout.minibatches(options.num_minibatches, normalize_advantages=True):
                policy = agent.policy(batch.obs)
                ratio = (policy.log_prob(batch.actions) - batch.log_probs).exp()
                clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
                gain = torch.min(ratio * batch.advantages, clipped * batch.advantages)
                errors = (agent.value(batch.obs) - batch.returns).square()
                bonus = options.entropy_weight * policy.entropy()
                loss = (0.25 * errors - gain - bonus).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        returns = rollout.episodes().returns
        if update % 10 == 9 and len(returns):
            steps = (update + 1) * envs.num_envs * options.num_steps
            speed = steps / (time.perf_counter() - begin)
            shown = f"return of an agent {np.mean(returns):.1f}, {speed:.0f} steps/s"
            print(f"{steps} steps: {shown}", flush=True)
        rollout.advance()

    def act(obs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {group: agent.actor(x).argmax(-1) for group, x in obs.items()}

    options.save.mkdir(parents=True, exist_ok=True)
    torch.save(agent.state_dict(), options.save / "agent.pt")
    found = evaluate(act, envs, 100, seed=10_000)
    envs.close()
    for group, result in found.items():
        print(f"{options.env}, {group}: {result}")
    return found


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
