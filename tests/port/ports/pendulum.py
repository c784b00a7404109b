"""Gymnasium's Pendulum-v1, as kernels."""

import math

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from vecenv.jit import EnvKernels
from vecenv.jit.random import uniform

FIELDS = {"angle": "state[0]", "speed": "state[1]"}
HIGH = np.array([1.0, 1.0, 8.0], np.float32)


def make():
    return gym.make("Pendulum-v1", disable_env_checker=True)


def reset(state, rng):
    state.angle = -math.pi + 2.0 * math.pi * uniform(rng)
    state.speed = -1.0 + 2.0 * uniform(rng)
    state.square, state.effort, state.pull = 0.0, 0.0, 0.0


def step(state, action, rng):
    torque = min(max(action[0], np.float32(-2.0)), np.float32(2.0))
    wrapped = (state.angle + math.pi) % (2.0 * math.pi) - math.pi
    state.square = torque * torque  # NumPy rounds these to float32
    state.effort = np.float32(0.001) * state.square
    state.pull = 3.0 * torque
    cost = wrapped**2 + 0.1 * state.speed**2 + state.effort
    speed = state.speed + (15.0 * math.sin(state.angle) + state.pull) * 0.05
    state.speed = min(max(speed, -8.0), 8.0)
    state.angle += state.speed * 0.05
    return -cost, False, False


def observe(state, out):
    out[0] = math.cos(state.angle)
    out[1] = math.sin(state.angle)
    out[2] = state.speed


KERNELS = EnvKernels(
    [
        ("angle", np.float64), ("speed", np.float64),
        *((name, np.float32) for name in ("square", "effort", "pull")),
    ],
    Box(-HIGH, HIGH, dtype=np.float32), Box(-2.0, 2.0, (1,), np.float32),
    reset, step, observe, name="Pendulum",
)  # fmt: skip
