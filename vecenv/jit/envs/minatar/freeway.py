"""MinAtar's Freeway: cross eight lanes of cars as often as possible."""

import numpy as np
from numba import njit

from vecenv.jit.envs.minatar import SIZE, MinAtarVectorEnv, game_kernels, intended
from vecenv.jit.random import integers, uniform

NUM_LANES = SIZE - 2  # the rows 1 to 8, with a car each
BOTTOM = SIZE - 1
COLUMN = 4  # of the player
PAUSE = 3  # steps between two moves
DURATION = 2500  # steps of a game
SLOWEST = 5
UP, DOWN = 1, 2  # actions; 0 stays
PLAYER, CARS, TRAILS = range(3)  # channels; TRAILS is the first trail channel


@njit
def change_traffic(state, rng):
    """Draw how often each car moves, every step to every fifth, and in which direction."""
    for lane in range(NUM_LANES):
        state.interval[lane] = state.timer[lane] = 1 + integers(rng, SLOWEST)
    for lane in range(NUM_LANES):
        state.heading[lane] = 1 if uniform(rng) > 0.5 else -1


def reset(state, rng, params):
    """Begin at the bottom, with all cars at the left."""
    state.action, state.y, state.pause, state.num_left = 0, BOTTOM, PAUSE, DURATION
    state.car[:] = 0
    change_traffic(state, rng)


@njit
def is_hit(state, lane):
    """Whether the car of a lane is where the player is."""
    return state.car[lane] == COLUMN and lane + 1 == state.y


def step(state, action, rng, params):
    """Go up or down; the top is worth 1, and leads back to the bottom as every car does."""
    action = intended(state, action, rng, params)
    if action != 0 and state.pause == 0:
        state.pause = PAUSE
        state.y = min(max(state.y + (action == DOWN) - (action == UP), 0), BOTTOM)
    reward = 0.0
    if state.y == 0:
        reward = 1.0
        change_traffic(state, rng)
        state.y = BOTTOM
    for lane in range(NUM_LANES):
        if is_hit(state, lane):
            state.y = BOTTOM
        if state.timer[lane] > 0:
            state.timer[lane] -= 1
            continue
        state.timer[lane] = state.interval[lane]
        state.car[lane] = (state.car[lane] + state.heading[lane] + SIZE) % SIZE
        if is_hit(state, lane):
            state.y = BOTTOM
    state.pause -= state.pause > 0
    state.num_left -= 1
    return reward, state.num_left < 0, False


def observe(state, out, params):
    """Write the picture; the channel of a car's trail tells how often the car moves."""
    out[:] = 0
    out[state.y, COLUMN, PLAYER] = 255
    for lane in range(NUM_LANES):
        out[lane + 1, state.car[lane], CARS] = 255
        behind = (state.car[lane] - state.heading[lane] + SIZE) % SIZE
        out[lane + 1, behind, TRAILS + state.interval[lane] - 1] = 255


FREEWAY = game_kernels(
    "Freeway",
    ("player", "enemy", *["trail"] * SLOWEST),
    3,
    "y pause num_left",
    [(name, np.int8, (NUM_LANES,)) for name in ("car", "heading", "interval", "timer")],
    reset=reset,
    step=step,
    observe=observe,
)


class FreewayVectorEnv(MinAtarVectorEnv):
    """Many games of Freeway; actions: stay, up, down."""

    kind = FREEWAY
    actions = "stay", "up", "down"
