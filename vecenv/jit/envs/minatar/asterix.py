"""MinAtar's Asterix: collect gold and avoid enemies that cross the board."""

import numpy as np
from numba import njit

from vecenv.jit.envs.minatar import RAMP_INTERVAL, SIZE, MinAtarVectorEnv, game_kernels, intended
from vecenv.jit.random import integers, uniform

NUM_LANES = SIZE - 2  # the rows 1 to 8, with at most one thing each
LEFT, UP, RIGHT, DOWN = 1, 2, 3, 4  # actions; 0 stays
NOTHING, ENEMY, GOLD = 0, 1, 2
PLAYER, ENEMIES, TRAIL, GOLDS = range(4)  # channels


def reset(state, rng, params):
    """Begin in the middle of an empty board."""
    state.action = 0
    state.x, state.y = 5, 5
    state.spawn_interval = state.spawn_timer = 10
    state.move_interval = state.move_timer = 5
    state.ramp_timer, state.ramp_count = RAMP_INTERVAL, 0
    state.kind[:], state.at[:], state.heading[:] = NOTHING, 0, 1


@njit
def send_in(state, rng):
    """Let something come in at a side, in a lane that is free."""
    from_left, is_gold = uniform(rng) < 1 / 2, uniform(rng) < 1 / 3
    num_free = 0
    for lane in range(NUM_LANES):
        num_free += state.kind[lane] == NOTHING
    if num_free == 0:
        return
    chosen = integers(rng, num_free)
    for lane in range(NUM_LANES):
        if state.kind[lane] == NOTHING:
            if chosen == 0:
                state.kind[lane] = GOLD if is_gold else ENEMY
                state.at[lane] = 0 if from_left else SIZE - 1
                state.heading[lane] = 1 if from_left else -1
                return
            chosen -= 1


@njit
def meet(state):
    """Return what the player's cell is worth, and whether an enemy is there; take the gold."""
    lane = state.y - 1
    if state.kind[lane] == NOTHING or state.at[lane] != state.x:
        return 0.0, False
    if state.kind[lane] == ENEMY:
        return 0.0, True
    state.kind[lane] = NOTHING
    return 1.0, False


@njit
def get_harder(state):
    """Shorten the intervals from time to time."""
    if state.spawn_interval <= 1 and state.move_interval <= 1:
        return
    if state.ramp_timer >= 0:
        state.ramp_timer -= 1
        return
    if state.move_interval > 1 and state.ramp_count % 2 == 1:
        state.move_interval -= 1
    if state.spawn_interval > 1:
        state.spawn_interval -= 1
    state.ramp_count += 1
    state.ramp_timer = RAMP_INTERVAL


def step(state, action, rng, params):
    """Move by one cell; gold is worth 1, an enemy ends the game."""
    action = intended(state, action, rng, params)
    if state.spawn_timer == 0:
        send_in(state, rng)
        state.spawn_timer = state.spawn_interval
    state.x = min(max(state.x + (action == RIGHT) - (action == LEFT), 0), SIZE - 1)
    state.y = min(max(state.y + (action == DOWN) - (action == UP), 1), NUM_LANES)
    reward, is_caught = meet(state)
    if state.move_timer == 0:
        state.move_timer = state.move_interval
        for lane in range(NUM_LANES):
            if state.kind[lane] != NOTHING:
                state.at[lane] += state.heading[lane]
                if state.at[lane] < 0 or state.at[lane] >= SIZE:
                    state.kind[lane] = NOTHING
        more, is_caught_now = meet(state)
        reward, is_caught = reward + more, is_caught or is_caught_now
    state.spawn_timer -= 1
    state.move_timer -= 1
    if params.difficulty_ramping:
        get_harder(state)
    return reward, is_caught, False


def observe(state, out, params):
    """Write the picture; a trail is where a thing was before."""
    out[:] = 0
    out[state.y, state.x, PLAYER] = 255
    for lane in range(NUM_LANES):
        if state.kind[lane] != NOTHING:
            channel = ENEMIES if state.kind[lane] == ENEMY else GOLDS
            out[lane + 1, state.at[lane], channel] = 255
            behind = state.at[lane] - state.heading[lane]
            if 0 <= behind < SIZE:
                out[lane + 1, behind, TRAIL] = 255


ASTERIX = game_kernels(
    "Asterix",
    ("player", "enemy", "trail", "gold"),
    5,
    "x y spawn_interval spawn_timer move_interval move_timer ramp_timer ramp_count",
    [(name, np.int8, (NUM_LANES,)) for name in ("kind", "at", "heading")],
    reset=reset,
    step=step,
    observe=observe,
)


class AsterixVectorEnv(MinAtarVectorEnv):
    """Many games of Asterix; actions: stay, left, up, right, down."""

    kind = ASTERIX
    actions = "stay", "left", "up", "right", "down"
