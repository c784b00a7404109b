"""MiniGrid's LavaGapS7, the image of its observation, as kernels."""

import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit

from vecenv.jit import EnvKernels
from vecenv.jit.random import integers

FIELDS = {
    "x": "agent_pos[0]", "y": "agent_pos[1]", "direction": "agent_dir", "gap_x": "gap_pos[0]",
    "gap_y": "gap_pos[1]", "steps": "step_count",
}  # fmt: skip
SIZE, VIEW, LIMIT = 7, 7, 4 * 7**2
EMPTY, WALL, GOAL, LAVA = 1, 2, 8, 9
DX, DY = (1, 0, -1, 0), (0, 1, 0, -1)


def make():
    from minigrid.envs import LavaGapEnv
    from minigrid.wrappers import ImgObsWrapper

    return ImgObsWrapper(LavaGapEnv(size=SIZE))


@njit
def cell(state, x, y):
    if x <= 0 or y <= 0 or x >= SIZE - 1 or y >= SIZE - 1:
        return WALL
    if x == state.gap_x:
        return EMPTY if y == state.gap_y else LAVA
    return GOAL if x == SIZE - 2 and y == SIZE - 2 else EMPTY


@njit
def seen_cell(state, across, along):
    """The cell `along` rows down and `across` columns right of the corner of the view."""
    ahead, right = VIEW - 1 - along, across - VIEW // 2
    if ahead == 0 and right == 0:
        return EMPTY  # the agent's own
    dx, dy = DX[state.direction], DY[state.direction]
    return cell(state, state.x + dx * ahead - dy * right, state.y + dy * ahead + dx * right)


def reset(state, rng):
    state.x, state.y, state.direction, state.steps = 1, 1, 0, 0
    state.gap_x = 2 + integers(rng, SIZE - 4)
    state.gap_y = 1 + integers(rng, SIZE - 2)


def step(state, action, rng):
    state.steps += 1
    reward, is_over = 0.0, False
    if action == 0:
        state.direction = (state.direction + 3) % 4
    elif action == 1:
        state.direction = (state.direction + 1) % 4
    elif action == 2:
        x, y = state.x + DX[state.direction], state.y + DY[state.direction]
        ahead = cell(state, x, y)
        if ahead != WALL:
            state.x, state.y = x, y
        if ahead == GOAL:
            is_over = True
            reward = 1 - 0.9 * (state.steps / LIMIT)
        if ahead == LAVA:
            is_over = True
    return reward, is_over, state.steps >= LIMIT


@njit
def spread(state, out, i, j, side):
    """Show what is beside and behind a cell that is seen and does not hide it."""
    if out[i, j, 0] == 0 or seen_cell(state, i, j) == WALL:
        return
    out[i + side, j, 0] = 1
    if j > 0:
        out[i + side, j - 1, 0] = 1
        out[i, j - 1, 0] = 1


def observe(state, out):
    out[:] = 0
    out[VIEW // 2, VIEW - 1, 0] = 1  # seen, for now
    for j in range(VIEW - 1, -1, -1):
        for i in range(VIEW - 1):
            spread(state, out, i, j, 1)
        for i in range(VIEW - 1, 0, -1):
            spread(state, out, i, j, -1)
    for i in range(VIEW):
        for j in range(VIEW):
            if out[i, j, 0] != 0:
                kind = seen_cell(state, i, j)
                out[i, j, 0] = kind
                out[i, j, 1] = 5 if kind == WALL else (1 if kind == GOAL else 0)


KERNELS = EnvKernels(
    [(name, np.int32) for name in FIELDS],
    Box(0, 255, (VIEW, VIEW, 3), np.uint8), Discrete(7),
    reset, step, observe, name="LavaGapS7",
)  # fmt: skip
