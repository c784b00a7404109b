"""Acrobot-v1 as a compiled environment, by Gymnasium's equations (those of Sutton's book)."""

import math

import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit

from vecenv.jit.bundled import BundledVectorEnv, draw_stroke
from vecenv.jit.kernels import EnvKernels, pack_record
from vecenv.jit.random import uniform

STEP_SECONDS = 0.2
INERTIA = 1.0  # of each link, kg m^2
MAX_SPEED_1, MAX_SPEED_2 = 4.0 * math.pi, 9.0 * math.pi


@njit
def accelerations(theta_1, theta_2, omega_1, omega_2, torque, params):
    """Return the angular accelerations of both joints, float64 each."""
    cos_2, sin_2 = math.cos(theta_2), math.sin(theta_2)
    mass_1, mass_2, length, gravity = params.mass_1, params.mass_2, params.length_1, params.gravity
    center_1, center_2 = 0.5 * length, 0.5 * params.length_2
    square_1, square_2 = center_1 * center_1, center_2 * center_2
    d_1 = mass_1 * square_1
    d_1 = d_1 + mass_2 * (length * length + square_2 + 2.0 * length * center_2 * cos_2)
    d_1 = d_1 + INERTIA + INERTIA
    d_2 = mass_2 * (square_2 + length * center_2 * cos_2) + INERTIA
    phi_2 = mass_2 * center_2 * gravity * math.cos(theta_1 + theta_2 - math.pi / 2.0)
    phi_1 = -mass_2 * length * center_2 * (omega_2 * omega_2) * sin_2
    phi_1 = phi_1 - 2.0 * mass_2 * length * center_2 * omega_2 * omega_1 * sin_2
    weight = (mass_1 * center_1 + mass_2 * length) * gravity
    phi_1 = phi_1 + weight * math.cos(theta_1 - math.pi / 2.0) + phi_2
    pull = mass_2 * length * center_2 * (omega_1 * omega_1) * sin_2
    alpha_2 = torque + d_2 / d_1 * phi_1 - pull - phi_2
    alpha_2 = alpha_2 / (mass_2 * square_2 + INERTIA - d_2 * d_2 / d_1)
    return -(d_2 * alpha_2 + phi_1) / d_1, alpha_2


@njit
def wrapped(angle):
    """Return an angle between -pi and pi."""
    while angle > math.pi:
        angle -= 2.0 * math.pi
    while angle < -math.pi:
        angle += 2.0 * math.pi
    return angle


@njit
def summed(first, second, third, fourth):
    """Return the weighted sum of the four slopes of a Runge-Kutta step."""
    return STEP_SECONDS / 6.0 * (first + 2.0 * second + 2.0 * third + fourth)


def reset(state, rng, params):
    """Begin near hanging at rest."""
    state.theta_1 = np.float32(-0.1 + 0.2 * uniform(rng))
    state.theta_2 = np.float32(-0.1 + 0.2 * uniform(rng))
    state.omega_1 = np.float32(-0.1 + 0.2 * uniform(rng))
    state.omega_2 = np.float32(-0.1 + 0.2 * uniform(rng))


def step(state, action, rng, params):
    """Apply a torque of -1, 0 or 1 to the lower joint; each step costs 1 until the tip is up."""
    torque, half = action - 1.0, STEP_SECONDS / 2.0
    x, y, u, v = state.theta_1, state.theta_2, state.omega_1, state.omega_2
    # Fourth-order Runge-Kutta: velocities (a) and accelerations (b) at four points of the step.
    a_1, b_1 = accelerations(x, y, u, v, torque, params)
    u_2, v_2 = u + half * a_1, v + half * b_1
    a_2, b_2 = accelerations(x + half * u, y + half * v, u_2, v_2, torque, params)
    u_3, v_3 = u + half * a_2, v + half * b_2
    a_3, b_3 = accelerations(x + half * u_2, y + half * v_2, u_3, v_3, torque, params)
    u_4, v_4 = u + STEP_SECONDS * a_3, v + STEP_SECONDS * b_3
    a_4, b_4 = accelerations(
        x + STEP_SECONDS * u_3, y + STEP_SECONDS * v_3, u_4, v_4, torque, params
    )
    state.theta_1 = wrapped(x + summed(u, u_2, u_3, u_4))
    state.theta_2 = wrapped(y + summed(v, v_2, v_3, v_4))
    state.omega_1 = min(max(u + summed(a_1, a_2, a_3, a_4), -MAX_SPEED_1), MAX_SPEED_1)
    state.omega_2 = min(max(v + summed(b_1, b_2, b_3, b_4), -MAX_SPEED_2), MAX_SPEED_2)
    is_up = -math.cos(state.theta_1) - math.cos(state.theta_2 + state.theta_1) > 1.0
    return 0.0 if is_up else -1.0, is_up, False


def observe(state, out, params):
    """Write cosine and sine of both angles, 0 hanging, and both angular velocities."""
    out[0], out[1] = math.cos(state.theta_1), math.sin(state.theta_1)
    out[2], out[3] = math.cos(state.theta_2), math.sin(state.theta_2)
    out[4], out[5] = state.omega_1, state.omega_2


def draw(state, params):
    """Return a picture, uint8 (240, 240, 3)."""
    picture = np.full((240, 240, 3), 255, np.uint8)
    draw_stroke(picture, (0, 70), (240, 70), 1, (60, 60, 60))  # the height to reach
    angle = state.theta_1 + state.theta_2
    elbow = 120 + 50 * math.sin(state.theta_1), 120 + 50 * math.cos(state.theta_1)
    tip = elbow[0] + 50 * math.sin(angle), elbow[1] + 50 * math.cos(angle)
    draw_stroke(picture, (120, 120), elbow, 10, (40, 150, 160))
    draw_stroke(picture, elbow, tip, 10, (40, 150, 160))
    for joint in ((120, 120), elbow):
        draw_stroke(picture, joint, joint, 8, (220, 180, 30))
    return picture


_HIGH = np.array([1.0, 1.0, 1.0, 1.0, MAX_SPEED_1, MAX_SPEED_2], dtype=np.float32)
ACROBOT = EnvKernels(
    name="Acrobot-v1",
    state_dtype=[(name, np.float64) for name in ("theta_1", "theta_2", "omega_1", "omega_2")],
    observation_space=Box(-_HIGH, _HIGH, dtype=np.float32),
    action_space=Discrete(3),
    reset=reset,
    step=step,
    observe=observe,
    render=draw,
    params=pack_record(gravity=9.8, mass_1=1.0, mass_2=1.0, length_1=1.0, length_2=1.0),
)


class AcrobotVectorEnv(BundledVectorEnv):
    """Many acrobots; `options` as for `JitVectorEnv`.

    Parameters that may differ between envs: `gravity` (m/s^2), and of the upper and the lower link
    `mass_1`, `mass_2` (kg), `length_1`, `length_2` (m; their centres of mass are in the middle).
    """

    kind, length, fps = ACROBOT, 500, 15
