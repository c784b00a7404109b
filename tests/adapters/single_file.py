"""An actor-critic in one file of the CleanRL kind, on Gymnasium's vector envs.

`test_single_file_scripts.py` runs it as it is and with the import line of `vector` changed.
"""

import gymnasium as gym
import numpy as np
import torch
from gymnasium import vector
from torch import nn
from torch.distributions import Categorical

NUM_ENVS, NUM_STEPS, GAMMA = 8, 128, 0.99


def make_env():
    return gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))


def network(num_outputs):
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, num_outputs))


def main(num_iterations, asynchronous):
    """Train; return the networks and (step, episodic return, length) of each episode."""
    torch.manual_seed(1)
    vector_class = vector.AsyncVectorEnv if asynchronous else vector.SyncVectorEnv
    envs = vector_class([make_env] * NUM_ENVS, autoreset_mode=vector.AutoresetMode.SAME_STEP)
    assert isinstance(envs.single_action_space, gym.spaces.Discrete)
    agent = nn.ModuleDict({"actor": network(2), "critic": network(1)})
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    episodes, rows = [], []
    obs, _ = envs.reset(seed=1)
    for _ in range(num_iterations):
        rows.clear()
        for step in range(NUM_STEPS):
            before = torch.Tensor(obs)
            with torch.no_grad():
                actions = Categorical(logits=agent["actor"](before)).sample()
            obs, rewards, terminations, truncations, infos = envs.step(actions.numpy())
            over = np.logical_or(terminations, truncations)
            rows.append((before, actions, torch.Tensor(rewards), torch.Tensor(over)))
            if "final_info" in infos:
                episode = infos["final_info"]["episode"]
                for i in np.flatnonzero(infos["final_info"]["_episode"]):
                    episodes.append((step, float(episode["r"][i]), int(episode["l"][i])))
        with torch.no_grad():
            goal, goals = agent["critic"](torch.Tensor(obs)).squeeze(1), []
            for _, _, rewards, over in reversed(rows):
                goal = rewards + GAMMA * goal * (1 - over)
                goals.insert(0, goal)
        all_obs, all_actions = (torch.cat([row[k] for row in rows]) for k in (0, 1))
        errors = torch.cat(goals) - agent["critic"](all_obs).squeeze(1)
        log_probs = Categorical(logits=agent["actor"](all_obs)).log_prob(all_actions)
        optimizer.zero_grad()
        (errors.square() - log_probs * errors.detach()).mean().backward()
        optimizer.step()
    envs.close()
    return agent, episodes
