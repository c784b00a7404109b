"""Episodes whose observations say where they come from, and buffers full of them."""

import numpy as np
from gymnasium import spaces

from buffers import EpisodicReplayBuffer, TransitionWriter

SPACE = spaces.Box(-1, 10**6, (2,), np.float32)  # (number of the episode, step)
ACTIONS = spaces.Discrete(1000)


def make_buffer(capacity=1000, staged=False, **options):
    return EpisodicReplayBuffer(
        capacity, SPACE, ACTIONS, **{"seed": 0, "staged": staged, **options}
    )


def make_episode(number, length, boundaries=(), terminates=True):
    steps = np.arange(length + 1)
    flags = np.zeros(length, np.bool_)
    flags[list(boundaries)] = True
    last = steps[:-1] == length - 1
    return {
        "obs": np.stack([np.full(length + 1, number), steps], axis=1).astype(np.float32),
        "actions": steps[:-1] % 1000,
        "rewards": steps[:-1] + number / 8,
        "terminations": last & terminates,
        "truncations": last & (not terminates),
        "boundaries": flags,
    }


def slow_bound(length, boundaries, t):
    """The second boundary from step t on, else the first, else the last step."""
    ahead = [place for place in sorted(boundaries) if t <= place < length]
    return [length - 1, *ahead[:2]][min(len(ahead), 2)]


def fill(buffer, count=40, seed=0):
    rng = np.random.default_rng(seed)
    for number in range(count):
        length = int(rng.integers(1, 20))
        boundaries = np.flatnonzero(rng.random(length) < 0.2)
        buffer.add_episode(make_episode(number, length, boundaries))
    return buffer


def filled_from(envs, num_steps, kind=EpisodicReplayBuffer, **options):
    """A buffer that steps of envs with random actions were added to."""
    single = envs.single_observation_space, envs.single_action_space
    buffer = kind(10_000, *single, num_envs=envs.num_envs, **options)
    writer = TransitionWriter(envs, buffer)
    writer.reset(envs.reset(seed=1)[0])
    envs.action_space.seed(1)
    for _ in range(num_steps):
        actions = envs.action_space.sample()
        writer.step(actions, *envs.step(actions))
    return buffer


def one_step(count, step=0, over=False):
    obs = np.full((count, 2), step, np.float32)
    flags = np.full(count, over)
    return {
        "obs": obs,
        "next_obs": obs + 1,
        "actions": np.zeros(count, int),
        "rewards": np.zeros(count),
        "terminations": flags,
        "truncations": np.zeros(count, np.bool_),
    }
