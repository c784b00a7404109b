"""Pendulum-v1 as a compiled environment, by Gymnasium's equations."""

import math

import numpy as np
from gymnasium.spaces import Box

from vecenv.jit.bundled import BundledVectorEnv, draw_stroke
from vecenv.jit.kernels import EnvKernels, pack_record
from vecenv.jit.random import uniform

MAX_SPEED = 8.0
MAX_TORQUE = 2.0
STEP_SECONDS = 0.05
# Terms of the torque are float32, as in Gymnasium.
TORQUE_COST = np.float32(0.001)


def reset(state, rng, params):
    """Begin at any angle, slowly."""
    state.theta = (2.0 * uniform(rng) - 1.0) * math.pi
    state.theta_dot = 2.0 * uniform(rng) - 1.0


def step(state, action, rng, params):
    """Turn by a torque for one time step; the reward is highest upright and at rest."""
    torque = min(max(np.float32(action[0]), np.float32(-MAX_TORQUE)), np.float32(MAX_TORQUE))
    theta, theta_dot = state.theta, state.theta_dot
    angle = (theta + math.pi) % (2.0 * math.pi) - math.pi
    cost = angle * angle + 0.1 * (theta_dot * theta_dot) + TORQUE_COST * (torque * torque)
    mass, length = params.mass, params.length
    acceleration = 3.0 * params.g / (2.0 * length) * math.sin(theta)
    acceleration += np.float32(3.0 / (mass * (length * length))) * torque
    theta_dot += acceleration * STEP_SECONDS
    state.theta_dot = min(max(theta_dot, -MAX_SPEED), MAX_SPEED)
    state.theta = theta + state.theta_dot * STEP_SECONDS
    return -cost, False, False


def observe(state, out, params):
    """Write cosine and sine of the angle, 0 upright, and the angular velocity."""
    out[0], out[1], out[2] = math.cos(state.theta), math.sin(state.theta), state.theta_dot


def draw(state, params):
    """Return a picture, uint8 (240, 240, 3)."""
    picture = np.full((240, 240, 3), 255, np.uint8)
    reach = 90 * float(params.length)
    tip = 120 - reach * math.sin(state.theta), 120 - reach * math.cos(state.theta)
    draw_stroke(picture, (120, 120), tip, 18, (204, 77, 77))
    draw_stroke(picture, (120, 120), (120, 120), 8, (40, 40, 40))
    return picture


_HIGH = np.array([1.0, 1.0, MAX_SPEED], dtype=np.float32)
PENDULUM = EnvKernels(
    name="Pendulum-v1",
    state_dtype=[("theta", np.float64), ("theta_dot", np.float64)],
    observation_space=Box(-_HIGH, _HIGH, dtype=np.float32),
    action_space=Box(-MAX_TORQUE, MAX_TORQUE, (1,), np.float32),
    reset=reset,
    step=step,
    observe=observe,
    render=draw,
    params=pack_record(g=10.0, mass=1.0, length=1.0),
)


class PendulumVectorEnv(BundledVectorEnv):
    """Many pendulums; `options` as for `JitVectorEnv`.

    Parameters that may differ between envs: `g` (m/s^2), `mass` (kg) and `length` (m).
    """

    kind, length, fps = PENDULUM, 200, round(1 / STEP_SECONDS)
