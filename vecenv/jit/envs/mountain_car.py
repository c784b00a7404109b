"""MountainCar-v0 and MountainCarContinuous-v0 compiled, by Gymnasium's equations."""

import dataclasses
import itertools
import math

import numpy as np
from gymnasium.spaces import Box, Discrete

from vecenv.jit.bundled import BundledVectorEnv, draw_stroke
from vecenv.jit.kernels import EnvKernels, pack_record
from vecenv.jit.random import uniform

MIN_POSITION, MAX_POSITION = -1.2, 0.6
MAX_SPEED = 0.07
FORCE = 0.001
GRAVITY = 0.0025
GOAL = 0.5
# The continuous car, which Gymnasium computes in float32.
POWER = 0.0015
GOAL_CONTINUOUS = np.float32(0.45)
LEAST, MOST = np.float32(MIN_POSITION), np.float32(MAX_POSITION)
FASTEST = np.float32(MAX_SPEED)
THREE = np.float32(3.0)


def reset(state, rng, params):
    """Begin near the bottom of the valley, at rest."""
    state.position = -0.6 + 0.2 * uniform(rng)
    state.velocity = 0.0


def step(state, action, rng, params):
    """Push to the left (0), not at all (1) or to the right (2); each step costs 1."""
    velocity = state.velocity + ((action - 1) * FORCE - math.cos(3.0 * state.position) * GRAVITY)
    velocity = min(max(velocity, -MAX_SPEED), MAX_SPEED)
    position = min(max(state.position + velocity, MIN_POSITION), MAX_POSITION)
    if position == MIN_POSITION and velocity < 0:
        velocity = 0.0
    state.position, state.velocity = position, velocity
    return -1.0, position >= GOAL and velocity >= params.goal_velocity, False


def step_continuous(state, action, rng, params):
    """Push with a force of at most 1; the goal is worth 100, force costs its square."""
    force, slope = np.float32(action[0]), GRAVITY * math.cos(np.float64(THREE * state.position))
    if force > 1.0 or force < -1.0:  # Gymnasium's bounds are float64
        push = np.float32(math.copysign(POWER, force) - slope)
    else:
        push = force * np.float32(POWER) - np.float32(slope)
    velocity = state.velocity + push
    velocity = min(max(velocity, -FASTEST), FASTEST)
    position = min(max(state.position + velocity, LEAST), MOST)
    if position == LEAST and velocity < 0:
        velocity = np.float32(0.0)
    state.position, state.velocity = position, velocity
    is_there = position >= GOAL_CONTINUOUS and velocity >= np.float32(params.goal_velocity)
    cost = np.float64(action[0]) * np.float64(action[0]) * 0.1
    return (100.0 if is_there else 0.0) - cost, is_there, False


def observe(state, out, params):
    """Write position and velocity."""
    out[0], out[1] = state.position, state.velocity


def draw(state, params):
    """Return a picture, uint8 (200, 300, 3)."""
    picture = np.full((200, 300, 3), 255, np.uint8)
    scale = 300 / (MAX_POSITION - MIN_POSITION)

    def place(x: float, above: float = 0.0) -> tuple[float, float]:
        height = math.sin(3 * x) * 0.45 + 0.55
        return (x - MIN_POSITION) * scale, 195 - height * scale - above

    xs = np.linspace(MIN_POSITION, MAX_POSITION, 40).tolist()
    for x, after in itertools.pairwise(xs):
        draw_stroke(picture, place(x), place(after), 2, (60, 60, 60))
    draw_stroke(picture, place(GOAL), place(GOAL, 25), 2, (60, 60, 60))
    draw_stroke(picture, place(GOAL, 22), place(GOAL, 22), 9, (220, 180, 30))
    car = place(float(state.position), 8)
    draw_stroke(picture, car, car, 16, (40, 90, 200))
    return picture


_LOW = np.array([MIN_POSITION, -MAX_SPEED], dtype=np.float32)
_HIGH = np.array([MAX_POSITION, MAX_SPEED], dtype=np.float32)
MOUNTAIN_CAR = EnvKernels(
    name="MountainCar-v0",
    state_dtype=[("position", np.float64), ("velocity", np.float64)],
    observation_space=Box(_LOW, _HIGH, dtype=np.float32),
    action_space=Discrete(3),
    reset=reset,
    step=step,
    observe=observe,
    render=draw,
    params=pack_record(goal_velocity=0.0),
)
MOUNTAIN_CAR_CONTINUOUS = dataclasses.replace(
    MOUNTAIN_CAR,
    name="MountainCarContinuous-v0",
    state_dtype=[("position", np.float32), ("velocity", np.float32)],
    action_space=Box(-1.0, 1.0, (1,), np.float32),
    step=step_continuous,
)


class MountainCarVectorEnv(BundledVectorEnv):
    """Many cars; `options` as for `JitVectorEnv`.

    Parameter that may differ between envs: `goal_velocity`, the least speed at the goal.
    """

    kind, length, fps = MOUNTAIN_CAR, 200, 30


class MountainCarContinuousVectorEnv(MountainCarVectorEnv):
    """Likewise, with a continuous force."""

    kind, length = MOUNTAIN_CAR_CONTINUOUS, 999
