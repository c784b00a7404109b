"""Pursuit-v0: the rules of PettingZoo's `pursuit_v5` as a compiled game.

Pursuers hunt evaders on a grid with a building in its middle. All move by a cell at a time; evaders
at random. An evader is caught if pursuers are on all open cells beside it (or, with
`surround=False`, if `n_catch` of them are on its cell). The pursuers move in turn, and are rewarded
each time: that is how `pursuit_v5` does as a parallel env, and rewards are summed up in its order,
so that they are equal to the last bit.

Positions count from the corner of a grid with a margin, which is outside the map and looks as
buildings do.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit

from vecenv.jit.env import JitVectorEnv
from vecenv.jit.games import AgentsOf
from vecenv.jit.kernels import EnvKernels, pack_record
from vecenv.jit.random import integers, uniform

__all__ = ["PursuitOptions", "PursuitVectorEnv", "pursuit_kernels", "pursuit_params"]

WALL, PURSUER, EVADER = 0, 1, 2  # channels of the grid: counts on each cell
DX = np.array([-1, 1, 0, 0, 0])  # by action; the first four are also the cells beside a cell
DY = np.array([0, 0, 1, -1, 0])
STAY = 4
MAX_TRIES = 10_000  # to place an agent as the rules want; then it is where the last try was
MAX_AGENTS = 128  # of a kind; counts are bytes, and NumPy adds up more of them in another order


class PursuitOptions(NamedTuple):
    """Options of the game: those of `pursuit_v5`, with its values, but for custom controllers."""

    max_cycles: int = 500
    x_size: int = 16
    y_size: int = 16
    shared_reward: bool = True
    n_evaders: int = 30
    n_pursuers: int = 8
    obs_range: int = 7
    n_catch: int = 2
    freeze_evaders: bool = False
    tag_reward: float = 0.01
    catch_reward: float = 5.0
    urgency_reward: float = -0.1
    surround: bool = True
    constraint_window: float = 1.0


def reset(state, rng, params):
    """Place pursuers and evaders, each not beside another one of their kind."""
    state.num_cycles = 0
    state.num_evaders = state.evader_x.shape[0]
    grid = state.grid
    for y in range(grid.shape[0]):
        for x in range(grid.shape[1]):
            grid[y, x, WALL] = params.walls[y, x]
            grid[y, x, PURSUER] = 0
            grid[y, x, EVADER] = 0
    window = params.constraint_window
    x_start, y_start = uniform(rng) * (1.0 - window), uniform(rng) * (1.0 - window)
    x_low = params.margin + int(params.x_size * x_start)
    y_low = params.margin + int(params.y_size * y_start)
    x_high = params.margin + int(params.x_size * (x_start + window))
    y_high = params.margin + int(params.y_size * (y_start + window))
    place(state.pursuer_x, state.pursuer_y, PURSUER, x_low, x_high, y_low, y_high, grid, rng)
    place(state.evader_x, state.evader_y, EVADER, x_low, x_high, y_low, y_high, grid, rng)


@njit
def place(xs, ys, channel, x_low, x_high, y_low, y_high, grid, rng):
    """Place all agents of a kind in a window of the map."""
    for k in range(xs.shape[0]):
        x, y = 0, 0
        for _ in range(MAX_TRIES):
            x = x_low + integers(rng, x_high - x_low)
            y = y_low + integers(rng, y_high - y_low)
            if is_free(x, y, xs, ys, k, grid):
                break
        xs[k], ys[k] = x, y
        grid[y, x, channel] += 1


@njit
def is_free(x, y, xs, ys, num_placed, grid):
    """Whether a cell is open, and none of those placed are on it or beside it."""
    if grid[y, x, WALL] != 0:
        return False
    for other in range(num_placed):
        if abs(xs[other] - x) + abs(ys[other] - y) <= 1:
            return False
    return True


def step(state, actions, rng, params):
    """Move the pursuers, remove the evaders they have caught, move the others."""
    num_pursuers = state.pursuer_x.shape[0]
    for k in range(num_pursuers):
        state.num_tagged[k] = num_beside(state, k, params)
        state.has_caught[k] = 0
    for k in range(num_pursuers):
        move(state.pursuer_x, state.pursuer_y, k, actions[k], state.grid, PURSUER)
        state.num_tagged[k] = num_beside(state, k, params)
        if k + 1 == num_pursuers:
            remove_caught(state, params)
        pay(state, k + 1 == num_pursuers, params)
    if not params.freeze_evaders:
        for k in range(state.num_evaders):
            move(state.evader_x, state.evader_y, k, integers(rng, 5), state.grid, EVADER)
    state.num_cycles += 1
    if state.num_cycles >= params.max_cycles:
        return 0.0, False, True
    return 0.0, state.num_evaders == 0, False


@njit
def move(xs, ys, k, action, grid, channel):
    """Move an agent by a cell, unless that is a building or outside."""
    old_x, old_y = xs[k], ys[k]
    x, y = old_x + DX[action], old_y + DY[action]
    if grid[y, x, WALL] == 0:
        grid[old_y, old_x, channel] -= 1
        grid[y, x, channel] += 1
        xs[k], ys[k] = x, y


@njit
def num_beside(state, k, params):
    """Count the evaders beside a pursuer; where that is outside, those on its own cell."""
    grid, margin = state.grid, params.margin
    x, y = state.pursuer_x[k], state.pursuer_y[k]
    last_x, last_y = grid.shape[1] - 1 - margin, grid.shape[0] - 1 - margin
    return (
        np.int64(grid[y, max(x - 1, margin), EVADER])
        + grid[y, min(x + 1, last_x), EVADER]
        + grid[min(y + 1, last_y), x, EVADER]
        + grid[max(y - 1, margin), x, EVADER]
    )


@njit
def remove_caught(state, params):
    """Remove evaders that are caught, and note by which pursuers; the others stay in order."""
    grid, left = state.grid, 0
    for k in range(state.num_evaders):
        x, y = state.evader_x[k], state.evader_y[k]
        if params.surround:
            reach = 1
            num_around = (
                np.int64(grid[y, x - 1, PURSUER] > 0)
                + (grid[y, x + 1, PURSUER] > 0)
                + (grid[y + 1, x, PURSUER] > 0)
                + (grid[y - 1, x, PURSUER] > 0)
            )
            is_caught = num_around == params.num_open[y, x]
        else:
            reach = 0
            is_caught = grid[y, x, PURSUER] >= params.n_catch
        if is_caught:
            grid[y, x, EVADER] -= 1
            for pursuer in range(state.pursuer_x.shape[0]):
                away = abs(state.pursuer_x[pursuer] - x) + abs(state.pursuer_y[pursuer] - y)
                if away == reach:
                    state.has_caught[pursuer] = 1
        else:
            state.evader_x[left], state.evader_y[left] = x, y
            left += 1
    state.num_evaders = left


@njit
def pay(state, is_last, params):
    """Reward all pursuers after one of them, perhaps the last, has moved."""
    num_pursuers, earned = state.num_tagged.shape[0], state.earned
    for k in range(num_pursuers):
        earned[k] = params.tag_reward * state.num_tagged[k] / num_pursuers
        if is_last:
            earned[k] += params.catch_reward * state.has_caught[k]
            earned[k] += params.urgency_reward
    mean = sum_as_numpy(earned) / num_pursuers
    for k in range(num_pursuers):
        state.rewards[k] += params.local_ratio * earned[k] + (1.0 - params.local_ratio) * mean


@njit
def sum_as_numpy(values):
    """Add up to 128 numbers in the order in which NumPy does: by eights."""
    num_eights = values.shape[0] // 8
    total = 0.0
    if num_eights:
        a, b, c, d = values[0], values[1], values[2], values[3]
        e, f, g, h = values[4], values[5], values[6], values[7]
        for k in range(8, 8 * num_eights, 8):
            a, b, c, d = a + values[k], b + values[k + 1], c + values[k + 2], d + values[k + 3]
            e, f, g, h = e + values[k + 4], f + values[k + 5], g + values[k + 6], h + values[k + 7]
        total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for k in range(8 * num_eights, values.shape[0]):
        total += values[k]
    return total


def observe(state, agent, out, params):
    """Write the cells around a pursuer: buildings, pursuers, evaders."""
    size = out.shape[0]
    reach = (size - 1) // 2
    top, left = state.pursuer_y[agent] - reach, state.pursuer_x[agent] - reach
    for y in range(2 * reach + 1):
        for x in range(2 * reach + 1):
            for channel in range(3):
                out[y, x, channel] = state.grid[top + y, left + x, channel]
    for k in range(size):  # of an even size, the last row and column are never seen
        for last in range(2 * reach + 1, size):
            out[last, k, WALL] = out[k, last, WALL] = 1.0
            out[last, k, PURSUER] = out[k, last, PURSUER] = 0.0
            out[last, k, EVADER] = out[k, last, EVADER] = 0.0


def draw(state, params):
    """Draw the map: buildings dark, what pursuers see tinted, pursuers red, evaders blue."""
    margin, size = int(params.margin), 16
    grid = state.grid[margin : len(state.grid) - margin, margin : state.grid.shape[1] - margin]
    picture = np.full((*grid.shape[:2], 3), 245, np.uint8)
    for x, y in zip(state.pursuer_x - margin, state.pursuer_y - margin, strict=True):
        reach = int(params.reach)
        seen = picture[max(y - reach, 0) : y + reach + 1, max(x - reach, 0) : x + reach + 1]
        seen[:] = (255, 226, 196)
    picture[grid[..., WALL] > 0] = (90, 90, 90)
    picture = picture.repeat(size, axis=0).repeat(size, axis=1)
    for channel, inset, colour in ((EVADER, 3, (40, 90, 200)), (PURSUER, 5, (200, 40, 40))):
        for y, x in np.argwhere(grid[..., channel] > 0):
            cell = picture[y * size : (y + 1) * size, x * size : (x + 1) * size]
            cell[inset:-inset, inset:-inset] = colour
    return picture


@functools.lru_cache(maxsize=32)
def pursuit_kernels(options: PursuitOptions) -> EnvKernels:
    """Return the kernels of games of this size; other options are parameters."""
    margin = _margin(options)
    grid_shape = (options.y_size + 2 * margin, options.x_size + 2 * margin, 3)
    size = options.obs_range
    most = max(options.n_pursuers, options.n_evaders)
    return EnvKernels(
        name="Pursuit-v0",
        state_dtype=[
            ("num_cycles", np.int32),
            ("num_evaders", np.int32),
            ("pursuer_x", np.int32, (options.n_pursuers,)),
            ("pursuer_y", np.int32, (options.n_pursuers,)),
            ("evader_x", np.int32, (options.n_evaders,)),
            ("evader_y", np.int32, (options.n_evaders,)),
            ("num_tagged", np.int32, (options.n_pursuers,)),  # evaders beside each pursuer
            ("has_caught", np.int8, (options.n_pursuers,)),
            ("earned", np.float64, (options.n_pursuers,)),
            ("grid", np.uint8, grid_shape),
        ],
        groups={
            "pursuer": AgentsOf(
                options.n_pursuers, Box(0, most, (size, size, 3), np.float32), Discrete(5)
            )
        },
        reset=reset,
        step=step,
        observe=observe,
        render=draw,
    )


def pursuit_params(options: PursuitOptions) -> Any:
    """Return the parameters of the kernels."""
    margin = _margin(options)
    walls = rectangle(options.x_size, options.y_size)
    return pack_record(
        margin=margin,
        x_size=options.x_size,
        y_size=options.y_size,
        max_cycles=options.max_cycles,
        local_ratio=1.0 - float(options.shared_reward),
        n_catch=options.n_catch,
        freeze_evaders=options.freeze_evaders,
        tag_reward=float(options.tag_reward),
        catch_reward=float(options.catch_reward),
        urgency_reward=float(options.urgency_reward),
        surround=options.surround,
        constraint_window=float(options.constraint_window),
        reach=(options.obs_range - 1) // 2,
        walls=np.pad(walls, margin, constant_values=1),
        num_open=np.pad(num_open_beside(walls), margin),
    )


def rectangle(x_size: int, y_size: int) -> np.ndarray:
    """Return where the building is, int8 (y_size, x_size)."""
    x, y = np.arange(x_size) / x_size, np.arange(y_size) / y_size
    inside_x, inside_y = (x > 0.3) & (x < 1.0 - 0.3), (y > 0.2) & (y < 1.0 - 0.2)
    return (inside_y[:, None] & inside_x).astype(np.int8)


def num_open_beside(walls: np.ndarray) -> np.ndarray:
    """Return how many pursuers surround an evader on each cell, int8 (y_size, x_size).

    As in `pursuit_v5`, a building counts as open in the first row and column of the map.
    """
    y_size, x_size = walls.shape
    found = np.zeros_like(walls)
    for y, x in np.ndindex(walls.shape):
        found[y, x] = 4 - (x in (0, x_size - 1)) - (y in (0, y_size - 1))
        for dx, dy in zip(DX[:STAY], DY[:STAY], strict=True):
            if 0 < x + dx < x_size and 0 < y + dy < y_size:
                found[y, x] -= walls[y + dy, x + dx]
    return found


def _margin(options: PursuitOptions) -> int:
    return max(1, (options.obs_range - 1) // 2)


class PursuitVectorEnv(JitVectorEnv):
    """Many games of pursuit; options are those of `PursuitOptions` and of `JitVectorEnv`.

    Its observations are those of all pursuers of a game, its actions likewise;
    `vecenv.make_vec_agents` has rows of agents.

    Raises:
        ValueError: An option is out of range; says which, and what is possible.
    """

    def __init__(self, num_envs: int = 1, **options: Any) -> None:
        own = {name: options.pop(name) for name in PursuitOptions._fields if name in options}
        self.options = PursuitOptions(**own)
        _check(self.options)
        super().__init__(
            pursuit_kernels(self.options), num_envs, params=pursuit_params(self.options), **options
        )

    def _check_states(self, states: np.ndarray) -> None:
        margin = _margin(self.options)
        for kind in ("pursuer", "evader"):
            for axis, size in (("x", self.options.x_size), ("y", self.options.y_size)):
                places = states[f"{kind}_{axis}"]
                if places.min() < margin or places.max() >= margin + size:
                    raise ValueError(f"state['states'] has {kind}s outside the map of Pursuit-v0")
        num_evaders = states["num_evaders"]
        if num_evaders.min() < 0 or num_evaders.max() > self.options.n_evaders:
            raise ValueError("state['states'] has an impossible number of evaders of Pursuit-v0")


def _check(options: PursuitOptions) -> None:
    """Refuse options that make no game."""
    for name, least, most in (
        ("max_cycles", 1, 2**31 - 1),
        ("x_size", 3, 250),
        ("y_size", 3, 250),
        ("n_evaders", 1, MAX_AGENTS),
        ("n_pursuers", 1, MAX_AGENTS),
        ("obs_range", 1, 250),
        ("n_catch", 1, MAX_AGENTS),
    ):
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}, expected an integer from {least} to {most}")
    window = options.constraint_window
    if not 0 < window <= 1 or int(min(options.x_size, options.y_size) * window) < 1:
        raise ValueError(
            f"constraint_window is {window!r}, expected a part of the map, at most 1, that is at "
            "least a cell wide"
        )
    wide, high = (int(np.ceil(size * window)) for size in (options.x_size, options.y_size))
    for name in ("n_evaders", "n_pursuers"):
        # No two of a kind are beside each other, so at most one in two cells.
        if getattr(options, name) > -(-wide * high // 2):
            raise ValueError(
                f"{name} is {getattr(options, name)}, which do not fit into {wide} x {high} cells "
                "without being beside each other"
            )
