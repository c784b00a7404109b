"""Breakout on a board of 10 x 10 cells, by the rules of MinAtar's, as a compiled env.

    vecenv train breakout:Breakout-v0 --algo dqn                   # in the folder examples
    vecenv train breakout:BreakoutFrames-v0 --algo dqn             # stacks of gray pictures
    vecenv watch breakout:Breakout-v0 --gif breakout.gif

The rules are those of K. Young and T. Tian, "MinAtar: An Atari-Inspired Testbed for Thorough and
Reproducible Reinforcement Learning Experiments", 2019 (arXiv 1903.03176), with its three useful
actions; with probability 0.1 the action before is repeated. A random policy scores about 0.5.

Breakout-v0 observes a channel for each kind of thing, among them where the ball was. What
BreakoutFrames-v0 observes is a stack of the last four pictures, as of Atari's games: one channel
only, and where the ball flies to shows in several pictures. An episode begins with the same four.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit

from vecenv.jit import EnvKernels, JitVectorEnv
from vecenv.jit.random import integers, uniform

SIZE = 10  # cells of an edge
TOP, NUM_ROWS = 1, 3  # where bricks are
STICKY = 0.1  # probability with which the action before is repeated
LEFT, RIGHT = 1, 2  # actions; 0 stays
PADDLE, BALL, TRAIL, BRICKS = range(4)  # channels of an observation
NUM_FRAMES = 4
COLORS = np.array([(90, 160, 250), (255, 255, 255), (110, 110, 110), (230, 120, 60)], np.uint8)


def reset(state, rng):
    """Hang up all bricks; the ball enters at a side, below the middle row of bricks."""
    state.bricks[:] = 1
    from_right = integers(rng, 2)
    state.paddle, state.action, state.has_hit = 4, 0, False
    state.x, state.y = (SIZE - 1) * from_right, TOP + NUM_ROWS - 1
    state.dx, state.dy = 1 - 2 * from_right, 1
    state.trail_x, state.trail_y = state.x, state.y


def step(state, action, rng):
    """Move the paddle, then the ball, which flies diagonally; a brick is worth 1."""
    if uniform(rng) < STICKY:
        action = state.action
    state.action = action
    state.paddle = min(max(state.paddle + (action == RIGHT) - (action == LEFT), 0), SIZE - 1)

    x, y = state.x + state.dx, state.y + state.dy
    state.trail_x, state.trail_y = state.x, state.y
    if x < 0 or x >= SIZE:  # off the side walls
        x, state.dx = state.x, -state.dx
    reward, is_lost, is_in_brick = 0.0, False, False
    if y < 0:  # off the ceiling
        y, state.dy = 0, -state.dy
    elif TOP <= y < TOP + NUM_ROWS and state.bricks[y - TOP, x]:
        is_in_brick = True
        if not state.has_hit:  # having broken one, the ball flies through others until it is out
            reward = 1.0
            state.bricks[y - TOP, x] = 0
            y, state.dy = state.y, -state.dy
    elif y == SIZE - 1:
        if not state.bricks.any():
            state.bricks[:] = 1
        if state.x == state.paddle:
            y, state.dy = state.y, -state.dy
        elif x == state.paddle:  # off the paddle's corner, back to where it came from
            y, state.dx, state.dy = state.y, -state.dx, -state.dy
        else:
            is_lost = True
    state.has_hit = is_in_brick
    state.x, state.y = x, y
    return reward, is_lost, False


def observe(state, out):
    """Write a picture with a channel for each kind of thing, 255 where there is one."""
    out[:] = 0
    out[SIZE - 1, state.paddle, PADDLE] = 255
    out[state.y, state.x, BALL] = 255
    out[state.trail_y, state.trail_x, TRAIL] = 255
    for row in range(NUM_ROWS):
        for column in range(SIZE):
            if state.bricks[row, column]:
                out[TOP + row, column, BRICKS] = 255


def draw(state):
    """Return a picture, uint8 (160, 160, 3)."""
    channels = np.zeros((SIZE, SIZE, 4), np.uint8)
    observe(state, channels)
    picture = np.zeros((SIZE, SIZE, 3), np.uint8)
    for channel in (BRICKS, TRAIL, BALL, PADDLE):
        picture[channels[..., channel] > 0] = COLORS[channel]
    return picture.repeat(16, axis=0).repeat(16, axis=1)


STATE: Any = [
    *((name, np.int32) for name in ("paddle", "action", "x", "y", "dx", "dy")),
    ("trail_x", np.int32),
    ("trail_y", np.int32),
    ("has_hit", np.bool_),  # broke a brick in the step before, or was in one since
    ("bricks", np.int8, (NUM_ROWS, SIZE)),
]
BREAKOUT = EnvKernels(
    name="Breakout",
    state_dtype=STATE,
    observation_space=Box(0, 255, (SIZE, SIZE, 4), np.uint8),
    action_space=Discrete(3),
    reset=reset,
    step=step,
    observe=observe,
    render=draw,
)


reset_game, step_game = njit(reset), njit(step)


@njit
def draw_gray(state, out):
    """Write one picture: bricks are dark, the paddle is brighter, and the ball is white."""
    out[:] = 0
    out[TOP : TOP + NUM_ROWS] = 100 * state.bricks
    out[SIZE - 1, state.paddle] = 180
    out[state.y, state.x] = 255


def reset_frames(state, rng):
    """Begin an episode, and fill the stack with its first picture."""
    reset_game(state, rng)
    draw_gray(state, state.frames[0])
    state.frames[1:] = state.frames[0]


def step_frames(state, action, rng):
    """Step, and move the stack on by a picture; the oldest comes first."""
    result = step_game(state, action, rng)
    for k in range(NUM_FRAMES - 1):
        state.frames[k] = state.frames[k + 1]
    draw_gray(state, state.frames[NUM_FRAMES - 1])
    return result


def observe_frames(state, out):
    """Write the stack."""
    out[:] = state.frames


FRAMES = EnvKernels(
    name="BreakoutFrames",
    state_dtype=[*STATE, ("frames", np.uint8, (NUM_FRAMES, SIZE, SIZE))],
    observation_space=Box(0, 255, (NUM_FRAMES, SIZE, SIZE), np.uint8),
    action_space=Discrete(3),
    reset=reset_frames,
    step=step_frames,
    observe=observe_frames,
    render=draw,
)


def make_vec(num_envs: int, **options: Any) -> JitVectorEnv:
    """Make `num_envs` of them; `options` as for `JitVectorEnv`."""
    return JitVectorEnv(BREAKOUT, num_envs, **options)


def make_vec_frames(num_envs: int, **options: Any) -> JitVectorEnv:
    """The same of those that observe stacks of pictures."""
    return JitVectorEnv(FRAMES, num_envs, **options)


gym.register("Breakout-v0", vector_entry_point="breakout:make_vec", max_episode_steps=5000)
gym.register(
    "BreakoutFrames-v0", vector_entry_point="breakout:make_vec_frames", max_episode_steps=5000
)
