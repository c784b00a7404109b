"""Gymnasium's Taxi-v4 with rain and a fickle passenger, as kernels."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Discrete
from numba import njit

from vecenv.jit import EnvKernels
from vecenv.jit.random import integers, uniform

FIELDS = {"s": "s", "fickle": "fickle_step"}
# Whether a wall is east of a cell, as bits of the five columns; 4 has the edge.
WALL_EAST = (0b10010, 0b10010, 0b10000, 0b10101, 0b10101)
HOME_ROW, HOME_COL = (0, 0, 4, 4), (0, 4, 0, 3)
MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1))
LEFT, RIGHT = (2, 3, 1, 0), (3, 2, 0, 1)  # directions of drifts


def make():
    return gym.make("Taxi-v4", disable_env_checker=True, is_rainy=True, fickle_passenger=True)


@njit
def encode(row, col, passenger, target):
    return ((row * 5 + col) * 5 + passenger) * 4 + target


@njit
def is_open(row, col, direction):
    if direction == 0:
        return row < 4
    if direction == 1:
        return row > 0
    if direction == 2:
        return (WALL_EAST[row] >> col) & 1 == 0
    return col > 0 and (WALL_EAST[row] >> (col - 1)) & 1 == 0


@njit
def home_of(row, col):
    for k in range(4):
        if HOME_ROW[k] == row and HOME_COL[k] == col:
            return k
    return -1


def reset(state, rng):
    left, total = uniform(rng), 0.0
    state.s = 0
    for number in range(500):
        passenger, target = number // 4 % 5, number % 4
        if passenger < 4 and passenger != target:
            total += 1.0 / 300.0
            if total > left:
                state.s = number
                break
    state.fickle = uniform(rng) < 0.3


def step(state, action, rng):
    s = state.s
    target, passenger, col, row = s % 4, s // 4 % 5, s // 20 % 5, s // 100
    was_row, was_col, was_passenger = row, col, passenger
    reward, is_over = -1.0, False
    luck = uniform(rng)
    if action < 4:
        if is_open(row, col, action):
            direction = action
            if luck >= 0.8 + 0.1:
                direction = RIGHT[action]
            elif luck >= 0.8:
                direction = LEFT[action]
            if is_open(row, col, direction):
                row += MOVES[direction][0]
                col += MOVES[direction][1]
    elif action == 4:
        if passenger < 4 and home_of(row, col) == passenger:
            passenger = 4
        else:
            reward = -10.0
    else:
        home = home_of(row, col)
        if passenger == 4 and home == target:
            passenger, is_over, reward = target, True, 20.0
        elif passenger == 4 and home >= 0:
            passenger = home
        else:
            reward = -10.0
    if state.fickle and was_passenger == 4 and (row != was_row or col != was_col):
        state.fickle = False
        other = integers(rng, 3)
        target = other + (other >= target)
    state.s = encode(row, col, passenger, target)
    return reward, is_over, False


def observe(state, out):
    out[0] = state.s


def action_mask(state, out):
    passenger, col, row = state.s // 4 % 5, state.s // 20 % 5, state.s // 100
    for direction in range(4):
        out[direction] = is_open(row, col, direction)
    home = home_of(row, col)
    out[4] = passenger < 4 and home == passenger
    out[5] = passenger == 4 and home >= 0


KERNELS = EnvKernels(
    [("s", np.int32), ("fickle", np.bool_)], Discrete(500), Discrete(6),
    reset, step, observe, action_mask, name="rainy Taxi",
)  # fmt: skip
