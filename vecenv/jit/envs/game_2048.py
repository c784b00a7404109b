"""2048 as a compiled environment: slide tiles on a board of 4 x 4, equal ones merge."""

import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit

from vecenv.jit.bundled import BundledVectorEnv, draw_stroke, enlarge
from vecenv.jit.kernels import EnvKernels
from vecenv.jit.random import integers, uniform

SIZE = 4
MOST = 17  # exponent of the largest possible tile
FOUR = 0.1  # probability of a new 4 instead of a 2


@njit
def cell(action, line, k):
    """Return the k-th cell of a line, from the edge that tiles slide to.

    Actions are up (0), right (1), down (2), left (3).
    """
    if action == 0 or action == 2:
        return (k if action == 0 else SIZE - 1 - k) * SIZE + line
    return line * SIZE + (k if action == 3 else SIZE - 1 - k)


@njit
def can_slide(board, action):
    """Return whether some tile has a gap or an equal tile before it."""
    for line in range(SIZE):
        for k in range(SIZE - 1):
            before, tile = board[cell(action, line, k)], board[cell(action, line, k + 1)]
            if tile != 0 and (before == 0 or before == tile):
                return True
    return False


@njit
def slide(board, action, line):
    """Slide the tiles of a line; each merges at most once. Return the sum of merged tiles."""
    earned, num_placed, last = 0.0, 0, 0
    for k in range(SIZE):
        tile = board[cell(action, line, k)]
        if tile == 0:
            continue
        board[cell(action, line, k)] = 0
        if tile == last:
            board[cell(action, line, num_placed - 1)] = tile + 1
            earned += 2.0 ** (tile + 1)
            last = 0
        else:
            board[cell(action, line, num_placed)] = tile
            num_placed += 1
            last = tile
    return earned


@njit
def add_tile(board, rng):
    """Put a 2, or sometimes a 4, onto one of the empty cells."""
    num_empty = 0
    for k in range(SIZE * SIZE):
        num_empty += board[k] == 0
    chosen = integers(rng, num_empty)
    tile = 2 if uniform(rng) < FOUR else 1
    for k in range(SIZE * SIZE):
        if board[k] == 0:
            if chosen == 0:
                board[k] = tile
                return
            chosen -= 1


def reset(state, rng):
    """Begin with two tiles."""
    state.board[:] = 0
    add_tile(state.board, rng)
    add_tile(state.board, rng)


def step(state, action, rng):
    """Slide all tiles; the reward is the sum of the tiles made by merging.

    A move that changes nothing adds no tile and earns nothing. The game ends when no move changes
    anything.
    """
    if not can_slide(state.board, action):
        return 0.0, False, False
    reward = 0.0
    for line in range(SIZE):
        reward += slide(state.board, action, line)
    add_tile(state.board, rng)
    for other in range(4):
        if can_slide(state.board, other):
            return reward, False, False
    return reward, True, False


def observe(state, out):
    """Write the exponents of the tiles: 0 for an empty cell, 11 for 2048."""
    for row in range(SIZE):
        for column in range(SIZE):
            out[row, column] = state.board[row * SIZE + column]


def action_mask(state, out):
    """Write which moves change something."""
    for action in range(4):
        out[action] = can_slide(state.board, action)


def draw(state):
    """Return a picture, uint8 (192, 192, 3); larger tiles are redder, with a dot per doubling."""
    board = np.asarray(state.board).reshape(SIZE, SIZE)
    share = np.minimum(board / 11, 1.0)[..., None]
    colors = np.array((240, 235, 220)) * (1 - share) + np.array((220, 70, 40)) * share
    colors[board == 0] = (205, 195, 185)
    picture = enlarge(np.rint(colors).astype(np.uint8), 48, (150, 140, 130))
    for row, column in np.argwhere(board > 0).tolist():
        for k in range(int(board[row, column])):
            place = column * 48 + 9 + 10 * (k % 4), row * 48 + 9 + 10 * (k // 4)
            draw_stroke(picture, place, place, 6, (50, 45, 40))
    return picture


GAME_2048 = EnvKernels(
    name="2048-v0",
    state_dtype=[("board", np.int8, (SIZE * SIZE,))],
    observation_space=Box(0, MOST, (SIZE, SIZE), np.uint8),
    action_space=Discrete(4),
    reset=reset,
    step=step,
    observe=observe,
    action_mask=action_mask,
    render=draw,
)


class Game2048VectorEnv(BundledVectorEnv):
    """Many games; `options` as for `JitVectorEnv`.

    Set `max_episode_steps`: a policy that only makes moves without effect never ends a game.
    """

    kind, length = GAME_2048, 10_000

    def get_action_meanings(self) -> list[str]:
        """Return the names of the actions, as Atari's envs do."""
        return ["up", "right", "down", "left"]
