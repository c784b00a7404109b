"""MinAtar's Seaquest: save divers, shoot fish and submarines, come up for air.

If several things are in a cell, a shot hits the oldest; so things of a kind are kept by age.
"""

import numpy as np
from numba import njit

from vecenv.jit.envs.minatar import SIZE, MinAtarVectorEnv, game_kernels, intended
from vecenv.jit.random import integers, uniform

BOTTOM = SIZE - 1  # shows the air left, and the divers on board
AIR = 200  # steps
SEATS = 6  # for divers
PAUSE = 5  # steps between two shots of the player
GUN_INTERVAL = 10  # steps that an enemy submarine waits between two shots
MOVE_INTERVAL = 5  # steps between two moves of divers, and of enemies at first
LEAST_MOVE_INTERVAL = 2
ENEMY_INTERVAL, DIVER_INTERVAL = 20, 30  # steps until the next one comes; for enemies, at first
LEFT, UP, RIGHT, DOWN, FIRE = 1, 2, 3, 4, 5  # actions; 0 stays

SHOT, ENEMY_SHOT, FISH, SUBMARINE, DIVER = range(5)  # kinds of things
X, Y, HEADING, TIMER, GUN = range(5)  # columns of a thing; TIMER counts steps until it moves
# Enemies come at most every step and are gone after 33, their shots after 11.
CAPACITY = 48


@njit
def add(state, kind, x, y, heading, timer):
    """Add a thing, as the youngest of its kind."""
    k = state.num[kind]
    if k < CAPACITY:
        thing = state.things[kind, k]
        thing[X], thing[Y], thing[HEADING] = x, y, heading
        thing[TIMER], thing[GUN] = timer, GUN_INTERVAL
        state.num[kind] = k + 1


@njit
def remove(state, kind, k):
    """Remove a thing; the others of its kind stay in order."""
    state.num[kind] -= 1
    for j in range(k, state.num[kind]):
        for column in range(5):
            state.things[kind, j, column] = state.things[kind, j + 1, column]


@njit
def find(state, kind, x, y):
    """Return the oldest thing of a kind in a cell, or -1."""
    for k in range(state.num[kind]):
        if state.things[kind, k, X] == x and state.things[kind, k, Y] == y:
            return k
    return -1


def reset(state, rng, params):
    """Begin at the surface, alone."""
    state.action, state.x, state.y, state.heading = 0, 5, 0, -1
    state.air, state.num_divers, state.pause, state.is_up = AIR, 0, 0, True
    state.enemy_interval = state.enemy_timer = ENEMY_INTERVAL
    state.diver_timer, state.move_interval, state.ramp_count = DIVER_INTERVAL, MOVE_INTERVAL, 0
    state.num[:] = 0


@njit
def send_enemy(state, rng):
    """Let an enemy come in at a side, unless it would meet others in its row."""
    heading = 1 if uniform(rng) < 1 / 2 else -1
    kind = SUBMARINE if uniform(rng) < 1 / 3 else FISH
    row = 1 + integers(rng, BOTTOM - 1)
    for other in (SUBMARINE, FISH):
        for k in range(state.num[other]):
            thing = state.things[other, k]
            if thing[Y] == row and thing[HEADING] != heading:
                return
    add(state, kind, 0 if heading > 0 else SIZE - 1, row, heading, state.move_interval)


@njit
def send_diver(state, rng):
    """Let a diver come in at a side."""
    heading = 1 if uniform(rng) < 1 / 2 else -1
    row = 1 + integers(rng, BOTTOM - 1)
    add(state, DIVER, 0 if heading > 0 else SIZE - 1, row, heading, MOVE_INTERVAL)


@njit
def steer(state, action):
    """Move or shoot."""
    if action == FIRE and state.pause == 0:
        add(state, SHOT, state.x, state.y, state.heading, 0)
        state.pause = PAUSE
    elif action in (LEFT, RIGHT):
        state.heading = 1 if action == RIGHT else -1
        state.x = min(max(state.x + state.heading, 0), SIZE - 1)
    elif action in (UP, DOWN):
        state.y = min(max(state.y + (action == DOWN) - (action == UP), 0), BOTTOM - 1)


@njit
def move_shots(state):
    """Move the player's shots; return how many enemies they hit."""
    num_hit = 0.0
    for k in range(state.num[SHOT] - 1, -1, -1):
        shot = state.things[SHOT, k]
        shot[X] += shot[HEADING]
        is_gone = shot[X] < 0 or shot[X] >= SIZE
        if not is_gone:
            for kind in (FISH, SUBMARINE):
                hit = find(state, kind, shot[X], shot[Y])
                if hit >= 0 and not is_gone:
                    remove(state, kind, hit)
                    num_hit += 1.0
                    is_gone = True
        if is_gone:
            remove(state, SHOT, k)
    return num_hit


@njit
def move_divers(state):
    """Move divers, and take those on board who meet the player while there are seats."""
    for k in range(state.num[DIVER] - 1, -1, -1):
        diver = state.things[DIVER, k]
        is_met = diver[X] == state.x and diver[Y] == state.y and state.num_divers < SEATS
        if not is_met:
            if diver[TIMER] > 0:
                diver[TIMER] -= 1
                continue
            diver[TIMER] = MOVE_INTERVAL
            diver[X] += diver[HEADING]
            is_met = diver[X] == state.x and diver[Y] == state.y and state.num_divers < SEATS
        if is_met:
            state.num_divers += 1
        if is_met or diver[X] < 0 or diver[X] >= SIZE:
            remove(state, DIVER, k)


@njit
def move_enemies(state, kind):
    """Move fish or submarines; return how many ran into shots, and whether one met the player."""
    num_hit, is_lost = 0.0, False
    for k in range(state.num[kind] - 1, -1, -1):
        enemy = state.things[kind, k]
        is_gone = False
        is_lost = is_lost or (enemy[X] == state.x and enemy[Y] == state.y)
        if enemy[TIMER] > 0:
            enemy[TIMER] -= 1
        else:
            enemy[TIMER] = state.move_interval
            enemy[X] += enemy[HEADING]
            if enemy[X] < 0 or enemy[X] >= SIZE:
                is_gone = True
            elif enemy[X] == state.x and enemy[Y] == state.y:
                is_lost = True
            else:
                shot = find(state, SHOT, enemy[X], enemy[Y])
                if shot >= 0:
                    remove(state, SHOT, shot)
                    num_hit += 1.0
                    is_gone = True
        if kind == SUBMARINE:  # one that has left may still shoot
            if enemy[GUN] > 0:
                enemy[GUN] -= 1
            else:
                enemy[GUN] = GUN_INTERVAL
                add(state, ENEMY_SHOT, enemy[X], enemy[Y], enemy[HEADING], 0)
        if is_gone:
            remove(state, kind, k)
    return num_hit, is_lost


@njit
def move_enemy_shots(state):
    """Move the enemies' shots; return whether one hits the player."""
    is_lost = False
    for k in range(state.num[ENEMY_SHOT] - 1, -1, -1):
        shot = state.things[ENEMY_SHOT, k]
        is_lost = is_lost or (shot[X] == state.x and shot[Y] == state.y)
        shot[X] += shot[HEADING]
        is_lost = is_lost or (shot[X] == state.x and shot[Y] == state.y)
        if shot[X] < 0 or shot[X] >= SIZE:
            remove(state, ENEMY_SHOT, k)
    return is_lost


@njit
def come_up(state, is_ramping):
    """Set one diver free for new air, or six for the rest of the air; return the reward.

    As in MinAtar, -1 divers are on board after six were set free.
    """
    state.is_up = True
    reward = 0.0
    if state.num_divers == SEATS:
        state.num_divers = 0
        reward = float(state.air * SIZE // AIR)
    state.air = AIR
    state.num_divers -= 1
    is_hardest = state.enemy_interval <= 1 and state.move_interval <= LEAST_MOVE_INTERVAL
    if is_ramping and not is_hardest:
        if state.move_interval > LEAST_MOVE_INTERVAL and state.ramp_count % 2 == 1:
            state.move_interval -= 1
        if state.enemy_interval > 1:
            state.enemy_interval -= 1
        state.ramp_count += 1
    return reward


def step(state, action, rng, params):
    """Move or shoot; an enemy is worth 1, six divers up to 10; contact or no air end the game."""
    action = intended(state, action, rng, params)
    if state.enemy_timer == 0:
        send_enemy(state, rng)
        state.enemy_timer = state.enemy_interval
    if state.diver_timer == 0:
        send_diver(state, rng)
        state.diver_timer = DIVER_INTERVAL
    steer(state, action)
    reward = move_shots(state)
    move_divers(state)
    num_hit, is_lost = move_enemies(state, SUBMARINE)
    is_lost = move_enemy_shots(state) or is_lost
    num_fish_hit, is_eaten = move_enemies(state, FISH)
    reward, is_lost = reward + num_hit + num_fish_hit, is_lost or is_eaten
    state.enemy_timer -= state.enemy_timer > 0
    state.diver_timer -= state.diver_timer > 0
    state.pause -= state.pause > 0
    is_lost = is_lost or state.air <= 0
    if state.y > 0:
        state.air -= 1
        state.is_up = False
    elif not state.is_up:
        if state.num_divers == 0:
            is_lost = True
        else:
            reward += come_up(state, params.difficulty_ramping)
    return reward, is_lost, False


# Channels, and the channel of each kind of thing.
PLAYER, TAIL, SHOTS, TRAIL, ENEMY_SHOTS, ALL_FISH, SUBMARINES, AIR_GAUGE, SEAT_GAUGE, DIVERS = (
    range(10)
)
CHANNEL_OF = (SHOTS, ENEMY_SHOTS, ALL_FISH, SUBMARINES, DIVERS)


def observe(state, out, params):
    """Write the picture; a trail is where a thing was before."""
    out[:] = 0
    out[state.y, state.x, PLAYER] = 255
    out[state.y, state.x - state.heading, TAIL] = 255
    for column in range(max(state.air, 0) * SIZE // AIR):
        out[BOTTOM, column, AIR_GAUGE] = 255
    for k in range(state.num_divers):
        out[BOTTOM, BOTTOM - 1 - k, SEAT_GAUGE] = 255
    for kind in range(5):
        for k in range(state.num[kind]):
            thing = state.things[kind, k]
            out[thing[Y], thing[X], CHANNEL_OF[kind]] = 255
            behind = thing[X] - thing[HEADING]
            if kind >= FISH and 0 <= behind < SIZE:
                out[thing[Y], behind, TRAIL] = 255


SEAQUEST = game_kernels(
    "Seaquest",
    ("player", "tail", "shot", "trail", "enemy shot", *2 * ["enemy"], "gauge", *2 * ["friend"]),
    6,
    "x y heading air num_divers pause enemy_interval enemy_timer diver_timer move_interval "
    "ramp_count",
    [("is_up", np.bool_), ("num", np.int32, (5,)), ("things", np.int8, (5, CAPACITY, 5))],
    reset=reset,
    step=step,
    observe=observe,
)


class SeaquestVectorEnv(MinAtarVectorEnv):
    """Many games of Seaquest; actions: stay, left, up, right, down, fire."""

    kind = SEAQUEST
    actions = "stay", "left", "up", "right", "down", "fire"
