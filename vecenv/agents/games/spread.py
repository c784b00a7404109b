"""Spread-v0: the rules of `simple_spread_v3` of the multi-particle envs as a compiled game.

Agents push themselves over a plane to cover landmarks, and push each other away where they overlap.
All are rewarded for the distance of the nearest agent to each landmark, and each agent loses a
point for every agent that it overlaps.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit

from vecenv.core.arguments import read_count, take_options
from vecenv.jit.bundled import PICTURES
from vecenv.jit.env import JitVectorEnv
from vecenv.jit.games import AgentsOf
from vecenv.jit.kernels import EnvKernels, pack_record
from vecenv.jit.random import uniform

__all__ = ["SpreadOptions", "SpreadVectorEnv", "spread_kernels"]

STEP_SECONDS = 0.1
DAMPING = 0.25
FORCE = 5.0  # of an agent's push
CONTACT_FORCE = 1e2
CONTACT_MARGIN = 1e-3  # distance over which the contact force sets in
TOUCHING = 0.15 + 0.15  # distance of two agents that touch
COVERED = 0.1  # distance of an agent from a landmark that it covers
MAX_AGENTS = 64


class SpreadOptions(NamedTuple):
    """Options of the game: those of `simple_spread_v3`, with its defaults.

    Its `curriculum`, and views of nearest neighbours only, are not offered.
    """

    N: int = 3
    local_ratio: float = 0.5
    max_cycles: int = 25
    continuous_actions: bool = False
    terminate_on_success: bool = False


def reset(state, rng, params):
    """Place agents and landmarks anywhere."""
    state.num_cycles = 0
    for k in range(state.position.shape[0]):
        for axis in range(2):
            state.position[k, axis] = -1.0 + 2.0 * uniform(rng)
            state.velocity[k, axis] = 0.0
    for k in range(state.landmark.shape[0]):
        for axis in range(2):
            state.landmark[k, axis] = -1.0 + 2.0 * uniform(rng)


def step(state, actions, rng, params):
    """Move all agents, which push in one of four directions or not at all."""
    for k in range(state.force.shape[0]):
        push_by_number(state.force[k], actions[k])
    return advance(state, params)


def step_by_parts(state, actions, rng, params):
    """Move all agents, which push in four directions as much as they like."""
    for k in range(state.force.shape[0]):
        push_by_parts(state.force[k], actions[k])
    return advance(state, params)


@njit
def advance(state, params):
    """Let a tenth of a second pass, and reward all agents."""
    position, velocity, force = state.position, state.velocity, state.force
    num_agents = position.shape[0]
    for k in range(num_agents):
        for other in range(k + 1, num_agents):
            push_apart(state, k, other)
    for k in range(num_agents):
        for axis in range(2):
            position[k, axis] += velocity[k, axis] * STEP_SECONDS
            velocity[k, axis] = velocity[k, axis] * (1 - DAMPING) + force[k, axis] * STEP_SECONDS
    shared, are_covered = cover(state)
    for k in range(num_agents):
        own = 0.0
        for other in range(num_agents):
            if other != k and distance(position[other], position[k]) < TOUCHING:
                own -= 1.0
        state.rewards[k] = shared * (1 - params.local_ratio) + own * params.local_ratio
    state.num_cycles += 1
    if state.num_cycles >= params.max_cycles:
        return 0.0, False, True
    return 0.0, are_covered and params.terminate_on_success, False


@njit
def push_by_number(force, action):
    """Write the force of action 0 (none), 1 (left), 2 (right), 3 (down) or 4 (up)."""
    force[0] = force[1] = 0.0
    if action == 1:
        force[0] = -FORCE
    elif action == 2:
        force[0] = FORCE
    elif action == 3:
        force[1] = -FORCE
    elif action == 4:
        force[1] = FORCE


@njit
def push_by_parts(force, action):
    """Write the force of an action of five parts, each from 0 to 1: none, left, right, down, up."""
    force[0] = np.float64(in_unit(action[2]) - in_unit(action[1])) * FORCE
    force[1] = np.float64(in_unit(action[4]) - in_unit(action[3])) * FORCE


@njit
def in_unit(part):
    """Clip a part of an action, float32."""
    return np.float32(min(max(part, 0.0), 1.0))


@njit
def distance(one, other):
    """Distance of two points."""
    x, y = one[0] - other[0], one[1] - other[1]
    return math.sqrt(x * x + y * y)


@njit
def push_apart(state, k, other):
    """Add the force of a contact, which is next to none at a distance, to both agents."""
    between = distance(state.position[k], state.position[other])
    depth = soft_depth(-(between - TOUCHING) / CONTACT_MARGIN) * CONTACT_MARGIN
    for axis in range(2):
        away = state.position[k, axis] - state.position[other, axis]
        contact = CONTACT_FORCE * away / between * depth
        state.force[k, axis] = contact + state.force[k, axis]
        state.force[other, axis] = -contact + state.force[other, axis]


@njit
def soft_depth(depth):
    """log(1 + exp(depth)), without overflow, as `numpy.logaddexp(0, depth)` computes it."""
    if depth == 0:
        return math.log(2.0)
    if depth < 0:
        return math.log1p(math.exp(depth))
    return depth + math.log1p(math.exp(-depth))


@njit
def cover(state):
    """Return minus the sum of the landmarks' distances, and whether all of them are covered."""
    total, are_covered = 0.0, True
    for landmark in range(state.landmark.shape[0]):
        nearest = math.inf
        for k in range(state.position.shape[0]):
            nearest = min(nearest, distance(state.position[k], state.landmark[landmark]))
        total -= nearest
        are_covered &= nearest < COVERED
    return total, are_covered


def observe(state, agent, out, params):
    """Write what an agent observes."""
    observe_agent(state, agent, out)


@njit
def observe_agent(state, agent, out):
    """Write an agent's velocity and position, where landmarks and the others are, and zeros.

    The zeros are what others say, and in this game nobody says anything.
    """
    position = state.position
    x, y = position[agent, 0], position[agent, 1]
    out[0], out[1], out[2], out[3] = state.velocity[agent, 0], state.velocity[agent, 1], x, y
    at = 4
    for k in range(state.landmark.shape[0]):
        out[at], out[at + 1] = state.landmark[k, 0] - x, state.landmark[k, 1] - y
        at += 2
    for k in range(position.shape[0]):
        if k != agent:
            out[at], out[at + 1] = position[k, 0] - x, position[k, 1] - y
            at += 2
    for k in range(at, out.shape[0]):
        out[k] = 0.0


def central_state(state, out, params):
    """Write what all agents observe, one after the other."""
    num_agents = state.position.shape[0]
    width = out.shape[0] // num_agents
    for k in range(num_agents):
        observe_agent(state, k, out[k * width : (k + 1) * width])


def draw(state, params):
    """Draw landmarks as dark dots, agents as discs that can be seen through."""
    size, reach = 280, 1.4
    axis = np.linspace(-reach, reach, size)
    picture = np.full((size, size, 3), 250.0)
    for points, radius, colour, strength in (
        (state.position, TOUCHING / 2, (90, 90, 216), 0.6),
        (state.landmark, 0.05, (64, 64, 64), 1.0),
    ):
        for x, y in points:
            inside = (axis[None, :] - x) ** 2 + (axis[::-1, None] - y) ** 2 < radius**2
            picture[inside] += strength * (np.array(colour) - picture[inside])
    return picture.astype(np.uint8)


@functools.lru_cache(maxsize=32)
def spread_kernels(num_agents: int, continuous_actions: bool) -> EnvKernels:
    """Return the kernels of games of so many agents and landmarks."""
    width = 4 + 2 * num_agents + 4 * (num_agents - 1)
    low = np.zeros(5, np.float32)
    action_space = Box(low, low + 1) if continuous_actions else Discrete(5)
    return EnvKernels(
        name="Spread-v0",
        state_dtype=[
            ("num_cycles", np.int64),
            ("position", np.float64, (num_agents, 2)),
            ("velocity", np.float64, (num_agents, 2)),
            ("force", np.float64, (num_agents, 2)),
            ("landmark", np.float64, (num_agents, 2)),
        ],
        groups={
            "agent": AgentsOf(num_agents, Box(-np.inf, np.inf, (width,), np.float32), action_space)
        },
        reset=reset,
        step=step_by_parts if continuous_actions else step,
        observe=observe,
        render=draw,
        central_state=central_state,
        state_space=Box(-np.inf, np.inf, (num_agents * width,), np.float32),
    )


class SpreadVectorEnv(JitVectorEnv):
    """Many games of spread; options are those of `SpreadOptions` and of `JitVectorEnv`.

    Observations and actions are those of all agents of a game;
    `vecenv.make_vec_agents` has rows of agents.

    Raises:
        ValueError: An option is out of range; says which, and what is possible.
    """

    metadata: dict[str, Any] = PICTURES

    def __init__(self, num_envs: int = 1, **options: Any) -> None:
        chosen = take_options(SpreadOptions, SpreadOptions._fields, options)
        self.options = chosen = chosen._replace(
            N=read_count("N", chosen.N, 1, MAX_AGENTS),
            max_cycles=read_count("max_cycles", chosen.max_cycles, 1, 2**31 - 1),
        )
        if not 0.0 <= chosen.local_ratio <= 1.0:
            raise ValueError(f"local_ratio is {chosen.local_ratio!r}, expected a part from 0 to 1")
        params = pack_record(
            local_ratio=float(chosen.local_ratio),
            max_cycles=chosen.max_cycles,
            terminate_on_success=bool(chosen.terminate_on_success),
        )
        kernels = spread_kernels(chosen.N, bool(chosen.continuous_actions))
        super().__init__(kernels, num_envs, params=params, **options)
