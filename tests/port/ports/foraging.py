"""Level-based foraging, 8 x 8 cells, three players and two foods, as kernels of a game."""

import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit

from vecenv.jit import AgentsOf, EnvKernels
from vecenv.jit.random import integers

SIZE, PLAYERS, FOODS, LIMIT = 8, 3, 2, 50
STAY, NORTH, SOUTH, WEST, EAST, LOAD = range(6)
FIELDS = {
    "field": "field",
    "row": lambda env: [player.position[0] for player in env.players],
    "col": lambda env: [player.position[1] for player in env.players],
    "level": lambda env: [player.level for player in env.players],
    "spawned": "_food_spawned",
    "steps": "current_step",
}


def make():
    from lbforaging.foraging import ForagingEnv

    class Foraging(ForagingEnv):
        def reset(self, *, seed=None, options=None):
            for player in self.players:  # where they were matters to LBF's next episode
                player.position = None
            return super().reset(seed, options)

    return Foraging(
        players=PLAYERS, min_player_level=1, max_player_level=2, min_food_level=1,
        max_food_level=None, field_size=(SIZE, SIZE), max_num_food=FOODS, sight=SIZE,
        max_episode_steps=LIMIT, force_coop=False,
    )  # fmt: skip


@njit
def is_empty(state, row, col):
    is_free = state.field[row, col] == 0
    for k in range(PLAYERS):
        is_free &= not (state.row[k] == row and state.col[k] == col)
    return is_free


@njit
def is_near_food(state, row, col):
    """Whether food is around a cell, or two cells away in a line."""
    for y in range(max(row - 2, 0), min(row + 3, SIZE)):
        for x in range(max(col - 2, 0), min(col + 3, SIZE)):
            is_close = abs(y - row) <= 1 and abs(x - col) <= 1
            if state.field[y, x] > 0 and (is_close or y == row or x == col):
                return True
    return False


@njit
def food_beside(state, row, col):
    """Number of the cell of the food beside a cell; -1 for none. There is at most one."""
    if row > 0 and state.field[row - 1, col] > 0:
        return (row - 1) * SIZE + col
    if row < SIZE - 1 and state.field[row + 1, col] > 0:
        return (row + 1) * SIZE + col
    if col > 0 and state.field[row, col - 1] > 0:
        return row * SIZE + col - 1
    if col < SIZE - 1 and state.field[row, col + 1] > 0:
        return row * SIZE + col + 1
    return -1


@njit
def skip_permutation(rng, count):
    """Draw what a permutation draws whose result makes no difference."""
    for k in range(count - 1, 0, -1):
        integers(rng, k + 1)


def reset(state, rng):
    state.field[:] = 0
    state.row[:] = -1
    state.col[:] = -1
    state.steps, state.spawned = 0, 0
    skip_permutation(rng, PLAYERS)
    total = 0
    for k in range(PLAYERS):
        for _ in range(1000):
            row, col = integers(rng, SIZE), integers(rng, SIZE)
            if is_empty(state, row, col):
                state.row[k], state.col[k] = row, col
                state.level[k] = 1 + integers(rng, 2)
                break
        total += state.level[k]
    skip_permutation(rng, FOODS)
    count = 0
    for _ in range(1000):
        if count == FOODS:
            break
        row, col = 1 + integers(rng, SIZE - 2), 1 + integers(rng, SIZE - 2)
        if not is_near_food(state, row, col) and is_empty(state, row, col):
            level = 1 + integers(rng, total)
            state.field[row, col] = level
            state.spawned += level
            count += 1


@njit
def move(state, k, action):
    """Where a player wants to be, as the number of a cell."""
    row, col = state.row[k], state.col[k]
    if action == NORTH and row > 0 and state.field[row - 1, col] == 0:
        row -= 1
    elif action == SOUTH and row < SIZE - 1 and state.field[row + 1, col] == 0:
        row += 1
    elif action == WEST and col > 0 and state.field[row, col - 1] == 0:
        col -= 1
    elif action == EAST and col < SIZE - 1 and state.field[row, col + 1] == 0:
        col += 1
    return row * SIZE + col


def step(state, actions, rng):
    state.steps += 1
    for k in range(PLAYERS):
        state.wanted[k] = move(state, k, actions[k])
        beside = food_beside(state, state.row[k], state.col[k])
        state.loads[k] = beside if actions[k] == LOAD else -1
    for k in range(PLAYERS):
        is_alone = True
        for other in range(PLAYERS):
            is_alone &= other == k or state.wanted[other] != state.wanted[k]
        if is_alone:
            state.row[k], state.col[k] = state.wanted[k] // SIZE, state.wanted[k] % SIZE
    for k in range(PLAYERS):
        place = state.loads[k]
        if place < 0:
            continue
        food = state.field[place // SIZE, place % SIZE]
        together = 0
        for other in range(PLAYERS):
            if state.loads[other] == place:
                together += state.level[other]
        for other in range(PLAYERS):
            if state.loads[other] == place:
                state.loads[other] = -1
                if together >= food:
                    share = float(state.level[other] * food)
                    state.rewards[other] = share / float(together * state.spawned)
        if together >= food:
            state.field[place // SIZE, place % SIZE] = 0
    return 0.0, not state.field.any() or state.steps >= LIMIT, False


def observe(state, agent, out):
    for k in range(FOODS):
        out[3 * k], out[3 * k + 1], out[3 * k + 2] = -1, -1, 0
    at = 0
    for row in range(SIZE):
        for col in range(SIZE):
            if state.field[row, col] > 0:
                out[at], out[at + 1], out[at + 2] = row, col, state.field[row, col]
                at += 3
    at = 3 * FOODS
    for place in range(PLAYERS):
        k = agent if place == 0 else (place - 1 if place <= agent else place)
        out[at], out[at + 1], out[at + 2] = state.row[k], state.col[k], state.level[k]
        at += 3


LOW = np.array([-1, -1, 0] * (FOODS + PLAYERS), np.float32)
HIGH = np.array([SIZE - 1, SIZE - 1, 6] * FOODS + [SIZE - 1, SIZE - 1, 2] * PLAYERS, np.float32)
KERNELS = EnvKernels(
    [
        ("field", np.int32, (SIZE, SIZE)),
        *((name, np.int32, (PLAYERS,)) for name in ("row", "col", "level", "wanted", "loads")),
        ("spawned", np.int32), ("steps", np.int32),
    ],
    groups={"agent": AgentsOf(PLAYERS, Box(LOW, HIGH, dtype=np.float32), Discrete(6))},
    reset=reset, step=step, observe=observe, name="foraging",
)  # fmt: skip
