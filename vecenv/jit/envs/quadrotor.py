"""A quadrotor in a vertical plane, to be brought to a point and held there.

    m a = R(theta) (0, f_1 + f_2) - (0, m g),    I alpha = l (f_2 - f_1)

with thrusts f of the two rotors, each at distance l from the centre; integrated by the
semi-implicit Euler method. The figures are roughly those of a drone of half a kilogram.
"""

import math

import numpy as np
from gymnasium.spaces import Box

from vecenv.jit.bundled import BundledVectorEnv, draw_stroke
from vecenv.jit.kernels import EnvKernels, pack_record
from vecenv.jit.random import uniform

HOVERING = 0.5 * 9.81  # N, thrust that keeps a drone of the default mass in the air
STEP_SECONDS = 0.02
SUBSTEPS = 2
MAX_DISTANCE = 3.0  # in x and in z, m
MAX_ANGLE = math.pi / 2
START = 1.5  # m; positions begin within +- this
ACTION_COST = 0.05


def reset(state, rng, params):
    """Begin at rest, somewhere, slightly tilted."""
    state.x = (2.0 * uniform(rng) - 1.0) * START
    state.z = (2.0 * uniform(rng) - 1.0) * START
    state.theta = (2.0 * uniform(rng) - 1.0) * 0.2
    state.x_dot = state.z_dot = state.theta_dot = 0.0


def step(state, action, rng, params):
    """Fly with two thrusts: -1 is none, 1 is twice the hover thrust of the default drone."""
    first = min(max(np.float64(action[0]), -1.0), 1.0)
    second = min(max(np.float64(action[1]), -1.0), 1.0)
    mass, gravity, seconds = params.mass, params.gravity, STEP_SECONDS / SUBSTEPS
    hover = 0.5 * HOVERING
    thrust = hover * (2.0 + first + second)
    spin = hover * (second - first) * params.arm / params.inertia
    for _ in range(SUBSTEPS):
        state.x_dot -= seconds * thrust * math.sin(state.theta) / mass
        state.z_dot += seconds * (thrust * math.cos(state.theta) / mass - gravity)
        state.theta_dot += seconds * spin
        state.x += seconds * state.x_dot
        state.z += seconds * state.z_dot
        state.theta += seconds * state.theta_dot
    is_lost = max(abs(state.x), abs(state.z)) > MAX_DISTANCE or abs(state.theta) > MAX_ANGLE
    nearness = 1.0 / (1.0 + 4.0 * (state.x * state.x + state.z * state.z))
    return nearness - ACTION_COST * (first * first + second * second), is_lost, False


def observe(state, out, params):
    """Write position, sine and cosine of the tilt, and velocities; the target is the origin."""
    out[0], out[1] = state.x, state.z
    out[2], out[3] = math.sin(state.theta), math.cos(state.theta)
    out[4], out[5], out[6] = state.x_dot, state.z_dot, state.theta_dot


def draw(state, params):
    """Return a picture, uint8 (240, 240, 3)."""
    picture, scale = np.full((240, 240, 3), (235, 242, 250), np.uint8), 120 / MAX_DISTANCE
    draw_stroke(picture, (120, 120), (120, 120), 8, (220, 60, 50))
    x, y = 120 + scale * state.x, 120 - scale * state.z
    reach = 3 * float(params.arm) * scale
    dx, dy = reach * math.cos(state.theta), reach * math.sin(state.theta)
    draw_stroke(picture, (x - dx, y + dy), (x + dx, y - dy), 4, (50, 60, 80))
    for sign in (-1, 1):
        rotor = x + sign * dx, y - sign * dy - 4
        draw_stroke(picture, (rotor[0] - 7, rotor[1]), (rotor[0] + 7, rotor[1]), 3, (40, 90, 200))
    return picture


_HIGH = np.array([MAX_DISTANCE + 1, MAX_DISTANCE + 1, 1, 1, np.inf, np.inf, np.inf], np.float32)
QUADROTOR = EnvKernels(
    name="Quadrotor2D-v0",
    state_dtype=[(name, np.float64) for name in ("x", "z", "theta", "x_dot", "z_dot", "theta_dot")],
    observation_space=Box(-_HIGH, _HIGH, dtype=np.float32),
    action_space=Box(-1.0, 1.0, (2,), np.float32),
    reset=reset,
    step=step,
    observe=observe,
    render=draw,
    params=pack_record(gravity=9.81, mass=0.5, arm=0.15, inertia=0.004),
)


class Quadrotor2DVectorEnv(BundledVectorEnv):
    """Many quadrotors; `options` as for `JitVectorEnv`.

    Parameters that may differ between envs: `gravity` (m/s^2), `mass` (kg), `arm` (m) and `inertia`
    (kg m^2). Thrusts stay the same, so a heavier drone hovers with actions above the middle.
    """

    kind, length, fps = QUADROTOR, 250, round(1 / STEP_SECONDS)
