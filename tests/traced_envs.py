"""Envs that leave traces: each call is a line of a file, wherever the env is. It imports little."""

import os
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


class TracedEnv(gym.Env):
    """Writes down when it is made, reset, stepped and closed; an episode has five steps."""

    observation_space = Box(-1, 99, (1,), np.float32)
    action_space = Discrete(2)
    metadata = {"render_modes": ["ansi"], "render_fps": 50}

    def __init__(self, path, render_mode=None):
        self.path, self.render_mode, self.count = path, render_mode, 0
        self.write("made")

    def write(self, call):
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{call}\n".encode())
        os.close(file)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.write("reset")
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.write("step")
        self.count += 1
        return np.full(1, self.count, np.float32), 1.0, self.count >= 5, False, {}

    def render(self):
        return f"step {self.count}"

    def close(self):
        self.write("close")


class TracedGame:
    """A `ParallelEnv` that leaves traces, too."""

    metadata = {"name": "traced_v0"}
    possible_agents = ["left", "right"]

    def __init__(self, path):
        self.env = TracedEnv(path)
        self.agents = []

    def observation_space(self, agent):
        return self.env.observation_space

    def action_space(self, agent):
        return self.env.action_space

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        obs, _ = self.env.reset(seed=seed)
        return dict.fromkeys(self.agents, obs), {agent: {} for agent in self.agents}

    def step(self, actions):
        obs, reward, is_over, _, _ = self.env.step(0)
        told = [dict.fromkeys(self.agents, value) for value in (obs, reward, is_over, False)]
        infos = {agent: {} for agent in self.agents}
        self.agents = [] if is_over else self.agents
        return (*told, infos)

    def close(self):
        self.env.close()


def traces(path):
    """Return how often each call was made, by its name."""
    lines = Path(path).read_text().split() if Path(path).exists() else []
    return {call: lines.count(call) for call in sorted(set(lines))}
