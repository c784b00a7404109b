"""A small actor-critic training, all of it resumable: `python -m learn.training FOLDER`."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from buffers import RolloutBuffer
from vecenv import make_vec
from vecenv.learn import Moments, Run


@dataclass
class Options:
    folder: Path
    env_id: str = "JitCartPole-v1"
    backend: str = "jit"
    total_steps: int = 1024
    save_every: int = 200
    resume: bool = False


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.moments = Moments(4)
        self.policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.value = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, obs):
        x = self.moments(obs)
        return torch.distributions.Categorical(logits=self.policy(x)), self.value(x).squeeze(-1)


def collect(envs, agent, rollout):
    """Fill the rollout."""
    for t in range(rollout.num_steps):
        policy, values = agent(rollout.obs_at(t))
        actions = policy.sample()
        rollout.actions[t] = actions
        rollout.log_probs[t] = policy.log_prob(actions)
        rollout.values[t] = values
        envs.step(rollout.env_actions(t), out=rollout.slot(t))
    rollout.compute_advantages(agent(rollout.obs_at(rollout.num_steps))[1])
    agent.moments.update(rollout.obs[:-1][rollout.valid])


def loss_of(agent, batch, rng):
    """Policy and value loss, with noise of two more random streams."""
    policy, values = agent(batch.obs)
    noise = rng.normal(size=len(values)).astype(np.float32) * np.random.rand()  # noqa: NPY002  # the global one
    loss = -(policy.log_prob(batch.actions) * batch.advantages).mean()
    return loss + (values - batch.returns - torch.from_numpy(noise)).square().mean()


def train(options, after_save=lambda run, steps: None):
    """Train, or go on; return the final weights, and what is random after them."""
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002 - an env may use it
    envs = make_vec(options.env_id, 4, backend=options.backend)
    spaces = envs.single_observation_space, envs.single_action_space
    agent, rng = Agent(), np.random.default_rng(1)
    optimizer = torch.optim.Adam(agent.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.99**n)
    rollout = RolloutBuffer(16, 4, *spaces, autoreset_mode=envs.autoreset_mode, seed=1)
    parts = {"agent": agent, "optimizer": optimizer, "schedule": schedule}
    parts |= {"envs": envs, "rollout": rollout, "rng": rng}
    with Run(options.folder, options, options.resume, save_every=options.save_every) as run:
        saved = run.restore(parts)
        steps = 0 if saved is None else saved["steps"]
        if saved is None or run.not_restored:
            rollout.start(envs.reset(seed=1)[0])
        while steps < options.total_steps and not run.should_stop:
            with torch.no_grad():
                collect(envs, agent, rollout)
            run.add_episodes(steps, rollout.episodes().returns)
            for batch in rollout.minibatches(2):
                loss = loss_of(agent, batch, rng)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
            steps += 64
            rollout.advance()
            run.log(steps, {"loss": loss, "return": run.recent_return()})
            if run.is_due(steps):
                run.save({**parts, "steps": steps}, score=run.recent_return())
                after_save(run, steps)
        run.save({**parts, "steps": steps})
        curve = np.array(run.curve_returns)
    envs.close()
    weights = {name: tensor.numpy() for name, tensor in agent.state_dict().items()}
    return weights | {"torch": torch.rand(3).numpy(), "numpy": rng.random(3), "curve": curve}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--env-id", default="JitCartPole-v1")
    parser.add_argument("--backend", default="jit")
    parser.add_argument("--total-steps", type=int, default=1024)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    weights = train(Options(**vars(given)))
    np.savez(given.folder / "weights.npz", **weights)
