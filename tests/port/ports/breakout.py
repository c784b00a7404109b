"""MinAtar's Breakout, as kernels."""

import numpy as np
from gymnasium.spaces import Box, Discrete

from vecenv.jit import EnvKernels
from vecenv.jit.random import integers, uniform

FIELDS = {
    "ball_x": "game.env.ball_x", "ball_y": "game.env.ball_y", "ball_dir": "game.env.ball_dir",
    "pos": "game.env.pos", "bricks": "game.env.brick_map", "strike": "game.env.strike",
    "last_x": "game.env.last_x", "last_y": "game.env.last_y", "last_action": "game.last_action",
}  # fmt: skip
KEYS = (0, 1, 3)  # MinAtar's numbers of the minimal actions
TURN_X, TURN_Y, TURN_BACK = (1, 0, 3, 2), (3, 2, 1, 0), (2, 3, 0, 1)


def make():
    from minatar.gym import BaseEnv

    class Breakout(BaseEnv):
        def reset(self, *, seed=None, options=None):
            self.game.last_action = 0  # which MinAtar keeps from one episode to the next
            return super().reset(seed, options)

    return Breakout("breakout", use_minimal_action_set=True)


def reset(state, rng):
    side = integers(rng, 2)
    state.ball_y, state.ball_x, state.ball_dir = 3, 9 * side, 2 + side
    state.pos = 4
    state.bricks[:] = 0
    state.bricks[1:4] = 1
    state.strike = False
    state.last_x, state.last_y, state.last_action = state.ball_x, state.ball_y, 0


def step(state, action, rng):
    key = KEYS[action]
    if uniform(rng) < 0.1:
        key = state.last_action
    state.last_action = key
    if key == 1:
        state.pos = max(0, state.pos - 1)
    elif key == 3:
        state.pos = min(9, state.pos + 1)
    state.last_x, state.last_y = state.ball_x, state.ball_y
    x = state.ball_x + (1 if 1 <= state.ball_dir <= 2 else -1)
    y = state.ball_y + (1 if state.ball_dir >= 2 else -1)
    reward, is_over, strikes = 0.0, False, False
    if x < 0 or x > 9:
        x = min(max(x, 0), 9)
        state.ball_dir = TURN_X[state.ball_dir]
    if y < 0:
        y = 0
        state.ball_dir = TURN_Y[state.ball_dir]
    elif state.bricks[y, x] == 1:
        strikes = True
        if not state.strike:
            reward = 1.0
            state.strike = True
            state.bricks[y, x] = 0
            y = state.last_y
            state.ball_dir = TURN_Y[state.ball_dir]
    elif y == 9:
        if not state.bricks.any():
            state.bricks[1:4] = 1
        if state.ball_x == state.pos:
            state.ball_dir = TURN_Y[state.ball_dir]
            y = state.last_y
        elif x == state.pos:
            state.ball_dir = TURN_BACK[state.ball_dir]
            y = state.last_y
        else:
            is_over = True
    if not strikes:
        state.strike = False
    state.ball_x, state.ball_y = x, y
    return reward, is_over, False


def observe(state, out):
    for row in range(10):
        for column in range(10):
            out[row, column, 0] = row == 9 and column == state.pos
            out[row, column, 1] = row == state.ball_y and column == state.ball_x
            out[row, column, 2] = row == state.last_y and column == state.last_x
            out[row, column, 3] = state.bricks[row, column] == 1


def follow(obs):
    """A policy that meets the ball in both ways: without it all bricks are seldom gone."""
    paddle = int(np.flatnonzero(obs[9, :, 0])[0])
    (y,), (x,) = np.nonzero(obs[:, :, 1])
    (last_y,), (last_x,) = np.nonzero(obs[:, :, 2])
    ahead = min(max(x + (x - last_x) * (y > last_y), 0), 9) if y >= 7 else x
    target = ahead if (obs[:, :, 3].sum() + x) % 3 == 0 else x
    return 0 if target == paddle else (1 if target < paddle else 2)


POLICIES = [follow]
KERNELS = EnvKernels(
    [
        *((name, np.int32) for name in ("ball_x", "ball_y", "ball_dir", "pos", "last_x", "last_y")),
        ("last_action", np.int32), ("strike", np.bool_), ("bricks", np.int8, (10, 10)),
    ],
    Box(0.0, 1.0, (10, 10, 4), bool), Discrete(3),
    reset, step, observe, name="MinAtar Breakout",
)  # fmt: skip
