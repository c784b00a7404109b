"""MinAtar's Space Invaders: shoot down waves of aliens, which shoot back."""

import numpy as np
from numba import njit

from vecenv.jit.envs.minatar import SIZE, MinAtarVectorEnv, game_kernels, intended

BOTTOM = SIZE - 1
PAUSE = 5  # steps between two shots of the player
ALIEN_PAUSE = 10  # steps between two shots of the aliens
MOVE_INTERVAL = 12  # steps between two moves of the first wave, at most
LEAST_INTERVAL = 6  # lower bound for later waves
LEFT, RIGHT, FIRE = 1, 2, 3  # actions; 0 stays
PLAYER, ALIENS, TO_LEFT, TO_RIGHT, SHOTS, ALIEN_SHOTS = range(6)  # channels


@njit
def send_wave(state):
    """Put up four rows of six aliens."""
    state.aliens[0:4, 2:8] = 1


def reset(state, rng, params):
    """Begin in the middle, below the first wave."""
    state.action, state.x, state.pause = 0, 5, 0
    state.heading, state.alien_pause = -1, ALIEN_PAUSE
    state.move_interval = state.move_timer = MOVE_INTERVAL
    state.aliens[:], state.shots[:], state.alien_shots[:] = 0, 0, 0
    send_wave(state)


@njit
def move_shots(state):
    """Move the player's shots up by a cell, those of the aliens down."""
    for row in range(BOTTOM):
        for column in range(SIZE):
            state.shots[row, column] = state.shots[row + 1, column]
            state.alien_shots[BOTTOM - row, column] = state.alien_shots[BOTTOM - 1 - row, column]
    for column in range(SIZE):
        state.shots[BOTTOM, column] = 0
        state.alien_shots[0, column] = 0


@njit
def lowest_alien(state, column):
    """Return the row of the lowest alien of a column, -1 if there is none."""
    for row in range(BOTTOM, -1, -1):
        if state.aliens[row, column]:
            return row
    return -1


@njit
def count_aliens(state):
    """Return how many aliens there are."""
    count = 0
    for row in range(SIZE):
        for column in range(SIZE):
            count += state.aliens[row, column]
    return count


@njit
def move_aliens(state):
    """Move all sideways, or down if they are at the edge; return whether they landed.

    Aliens that leave the board come in at the other side: this happens in a game's last step.
    """
    edge = 0 if state.heading < 0 else SIZE - 1
    if lowest_alien(state, edge) < 0:
        for row in range(SIZE):
            for k in range(SIZE - 1):
                column = k if state.heading < 0 else SIZE - 1 - k
                state.aliens[row, column] = state.aliens[row, column - state.heading]
            state.aliens[row, SIZE - 1 - edge] = 0
        return False
    state.heading = -state.heading
    has_landed = False
    for column in range(SIZE):
        last = state.aliens[BOTTOM, column]
        has_landed = has_landed or last != 0
        for row in range(BOTTOM, 0, -1):
            state.aliens[row, column] = state.aliens[row - 1, column]
        state.aliens[0, column] = last
    return has_landed


@njit
def shoot_back(state):
    """Let an alien shoot: the lowest of the nearest column that has any; the left one first."""
    for distance in range(SIZE):
        for column in (state.x - distance, state.x + distance):
            if 0 <= column < SIZE:
                row = lowest_alien(state, column)
                if row >= 0:
                    state.alien_shots[row, column] = 1
                    return


@njit
def hit_aliens(state):
    """Remove aliens together with the shots that hit them; return how many."""
    num_hit = 0.0
    for row in range(SIZE):
        for column in range(SIZE):
            if state.aliens[row, column] and state.shots[row, column]:
                state.aliens[row, column] = state.shots[row, column] = 0
                num_hit += 1.0
    return num_hit


def step(state, action, rng, params):
    """Move or shoot; an alien is worth 1, a shot that hits or an alien that lands ends the game."""
    action = intended(state, action, rng, params)
    if action == FIRE and state.pause == 0:
        state.shots[BOTTOM, state.x] = 1
        state.pause = PAUSE
    state.x = min(max(state.x + (action == RIGHT) - (action == LEFT), 0), SIZE - 1)
    move_shots(state)
    is_lost = state.alien_shots[BOTTOM, state.x] != 0 or state.aliens[BOTTOM, state.x] != 0
    if state.move_timer == 0:
        state.move_timer = min(count_aliens(state), state.move_interval)  # fewer aliens are faster
        is_lost = move_aliens(state) or is_lost or state.aliens[BOTTOM, state.x] != 0
    if state.alien_pause == 0:
        state.alien_pause = ALIEN_PAUSE
        shoot_back(state)
    reward = hit_aliens(state)
    state.pause -= state.pause > 0
    state.move_timer -= 1
    state.alien_pause -= 1
    if count_aliens(state) == 0:
        if state.move_interval > LEAST_INTERVAL and params.difficulty_ramping:
            state.move_interval -= 1
        send_wave(state)
    return reward, is_lost, False


def observe(state, out, params):
    """Write the picture; a second channel of aliens tells where they go."""
    out[:] = 0
    out[BOTTOM, state.x, PLAYER] = 255
    direction = TO_LEFT if state.heading < 0 else TO_RIGHT
    for row in range(SIZE):
        for column in range(SIZE):
            if state.aliens[row, column]:
                out[row, column, ALIENS] = out[row, column, direction] = 255
            if state.shots[row, column]:
                out[row, column, SHOTS] = 255
            if state.alien_shots[row, column]:
                out[row, column, ALIEN_SHOTS] = 255


SPACE_INVADERS = game_kernels(
    "SpaceInvaders",
    ("player", "enemy", "enemy", "enemy", "shot", "enemy shot"),
    4,
    "x pause heading alien_pause move_interval move_timer",
    [(name, np.int8, (SIZE, SIZE)) for name in ("aliens", "shots", "alien_shots")],
    reset=reset,
    step=step,
    observe=observe,
)


class SpaceInvadersVectorEnv(MinAtarVectorEnv):
    """Many games of Space Invaders; actions: stay, left, right, fire."""

    kind = SPACE_INVADERS
    actions = "stay", "left", "right", "fire"
