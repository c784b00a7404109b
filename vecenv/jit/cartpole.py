"""CartPole-v1 as a compiled environment, equal to Gymnasium's step for step."""

import math

import numpy as np
from gymnasium.spaces import Box, Discrete

from vecenv.jit.bundled import BundledVectorEnv, draw_stroke
from vecenv.jit.kernels import EnvKernels, pack_record
from vecenv.jit.random import uniform

STEP_SECONDS = 0.02
MAX_ANGLE = 12 * 2 * math.pi / 360
MAX_POSITION = 2.4
START = 0.05  # each state variable begins within +- this


def reset(state, rng, params):
    """Begin near upright and at rest."""
    state.x = (2.0 * uniform(rng) - 1.0) * START
    state.x_dot = (2.0 * uniform(rng) - 1.0) * START
    state.theta = (2.0 * uniform(rng) - 1.0) * START
    state.theta_dot = (2.0 * uniform(rng) - 1.0) * START


def step(state, action, rng, params):
    """Push the cart left (0) or right (1) for one time step."""
    half_length, pole_mass = 0.5 * params.pole_length, params.pole_mass
    total_mass, mass_length = pole_mass + params.cart_mass, pole_mass * half_length
    force = params.force if action == 1 else -params.force
    cos, sin = math.cos(state.theta), math.sin(state.theta)
    push = (force + mass_length * (state.theta_dot * state.theta_dot) * sin) / total_mass
    theta_acc = (params.gravity * sin - cos * push) / (
        half_length * (4.0 / 3.0 - pole_mass * (cos * cos) / total_mass)
    )
    x_acc = push - mass_length * theta_acc * cos / total_mass
    state.x += STEP_SECONDS * state.x_dot
    state.x_dot += STEP_SECONDS * x_acc
    state.theta += STEP_SECONDS * state.theta_dot
    state.theta_dot += STEP_SECONDS * theta_acc
    terminated = abs(state.x) > MAX_POSITION or abs(state.theta) > MAX_ANGLE
    return 1.0, terminated, False


def observe(state, out, params):
    """Write position, velocity, angle and angular velocity."""
    out[0], out[1], out[2], out[3] = state.x, state.x_dot, state.theta, state.theta_dot


def draw(state, params):
    """Return a picture of the whole track, uint8 (200, 300, 3)."""
    picture = np.full((200, 300, 3), 255, np.uint8)
    ground = 160.0
    x = 150 + float(state.x) * 300 / (2 * MAX_POSITION)
    draw_stroke(picture, (0, ground), (300, ground), 1.5, (60, 60, 60))
    draw_stroke(picture, (x - 13, ground), (x + 13, ground), 20, (60, 60, 60))
    hinge, length = (x, ground - 8), 90.0 * float(params.pole_length)
    tip = x + length * math.sin(state.theta), hinge[1] - length * math.cos(state.theta)
    draw_stroke(picture, hinge, tip, 8, (202, 152, 101))
    draw_stroke(picture, hinge, hinge, 5, (129, 132, 203))
    return picture


_HIGH = np.array([2 * MAX_POSITION, np.inf, 2 * MAX_ANGLE, np.inf], dtype=np.float32)
CARTPOLE = EnvKernels(
    name="CartPole-v1",
    state_dtype=[(name, np.float64) for name in ("x", "x_dot", "theta", "theta_dot")],
    observation_space=Box(-_HIGH, _HIGH, dtype=np.float32),
    action_space=Discrete(2),
    reset=reset,
    step=step,
    observe=observe,
    render=draw,
    params=pack_record(gravity=9.8, cart_mass=1.0, pole_mass=0.1, pole_length=1.0, force=10.0),
)


class CartPoleVectorEnv(BundledVectorEnv):
    """Many CartPoles; `options` as for `JitVectorEnv`.

    Parameters that may differ between envs: `gravity` (m/s^2), `cart_mass`, `pole_mass` (kg),
    `pole_length` (m; the centre of mass is in the middle) and `force` (N).
    """

    kind, length, fps = CARTPOLE, 500, round(1 / STEP_SECONDS)
