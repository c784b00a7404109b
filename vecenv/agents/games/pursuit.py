"""Pursuit-v0: the rules of PettingZoo's `pursuit_v5` as a compiled game.

Pursuers hunt evaders on a grid with a building in its middle. All agents move by one cell at a
time, evaders at random. An evader is caught if pursuers are on all open cells beside it (or, with
`surround=False`, if `n_catch` of them are on its cell). The pursuers move in turn, and are rewarded
after each move, as in the parallel env of `pursuit_v5`. Rewards are summed in its order, so that
they are equal to the last bit.

Cells are numbered row by row, in a grid with a margin outside the map, which looks like buildings;
agents see whole rows of counts in it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit

from vecenv.core.arguments import read_count, take_options
from vecenv.jit.bundled import PICTURES
from vecenv.jit.env import JitVectorEnv
from vecenv.jit.games import AgentsOf
from vecenv.jit.kernels import EnvKernels, pack_record
from vecenv.jit.random import integers, uniform

__all__ = ["PursuitOptions", "PursuitVectorEnv", "pursuit_kernels", "pursuit_params"]

WALL, PURSUER, EVADER = 0, 1, 2  # kinds that are counted on each cell
NUM_COUNTS = 3
MOVES = ((-1, 0), (1, 0), (0, 1), (0, -1), (0, 0))  # (x, y) by action; four lead to a cell beside
MAX_TRIES = 10_000  # to place an agent by the rules; the last try counts then
MAX_AGENTS = 128  # of a kind; counts are bytes, and NumPy adds more of them in another order


class PursuitOptions(NamedTuple):
    """Options of the game: those of `pursuit_v5`, with its defaults, without custom controllers."""

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
    state.num_evaders = state.evader.shape[0]
    for k in range(state.grid.shape[0]):
        state.grid[k] = params.empty_grid[k]
    part = params.constraint_window
    x_start, y_start = uniform(rng) * (1.0 - part), uniform(rng) * (1.0 - part)
    window = (
        int(params.x_size * x_start),
        int(params.x_size * (x_start + part)),
        int(params.y_size * y_start),
        int(params.y_size * (y_start + part)),
    )
    place(state.pursuer, PURSUER, window, state.grid, rng, params)
    place(state.evader, EVADER, window, state.grid, rng, params)


@njit
def place(cells, kind, window, grid, rng, params):
    """Place all agents of a kind in a window of the map, (x_low, x_high, y_low, y_high)."""
    x_low, x_high, y_low, y_high = window
    for k in range(cells.shape[0]):
        cell = np.uint32(0)
        for _ in range(MAX_TRIES):
            x = x_low + integers(rng, x_high - x_low)
            y = y_low + integers(rng, y_high - y_low)
            cell = params.first_cell + np.uint32(y * params.row_cells + x)
            if is_free(cell, cells, k, grid, params):
                break
        cells[k] = cell
        grid[NUM_COUNTS * cell + kind] += 1


@njit
def is_free(cell, cells, num_placed, grid, params):
    """Whether a cell is open, and none of those placed are on it or beside it."""
    if grid[NUM_COUNTS * cell + WALL] != 0:
        return False
    for k in range(num_placed):  # noqa: SIM110 - compiled, this is faster than a generator
        if is_near(cells[k], cell, params):
            return False
    return True


@njit
def is_near(one, other, params):
    """Whether two cells are the same, or beside each other."""
    away = abs(np.int64(one) - np.int64(other))
    return away == 0 or away == 1 or away == params.row_cells


def step(state, actions, rng, params):
    """Move the pursuers, remove the evaders they have caught, move the others."""
    grid, pursuer, evader = state.grid, state.pursuer, state.evader
    num_pursuers = pursuer.shape[0]
    for k in range(num_pursuers):
        state.earned[k] = tag_reward(pursuer[k], grid, params) / num_pursuers
    for k in range(num_pursuers):
        pursuer[k] = move(pursuer[k], PURSUER, actions[k], grid, params)
        state.earned[k] = tag_reward(pursuer[k], grid, params) / num_pursuers
        if k + 1 == num_pursuers:
            remove_caught(state, params)
        pay(state, params)
    if not params.freeze_evaders:
        for k in range(state.num_evaders):
            evader[k] = move(evader[k], EVADER, integers(rng, len(MOVES)), grid, params)
    state.num_cycles += 1
    if state.num_cycles >= params.max_cycles:
        return 0.0, False, True
    return 0.0, state.num_evaders == 0, False


@njit
def move(cell, kind, action, grid, params):
    """Move an agent by a cell, unless that is a building or outside; return where it is."""
    to = params.after[cell, action]
    grid[NUM_COUNTS * cell + kind] -= 1
    grid[NUM_COUNTS * to + kind] += 1
    return to


@njit
def tag_reward(cell, grid, params):
    """Reward of a pursuer for the evaders beside it; where that is outside, on its own cell."""
    num_tagged = 0
    for k in range(4):
        num_tagged += grid[NUM_COUNTS * params.beside[cell, k] + EVADER]
    return params.tag_reward * num_tagged


@njit
def remove_caught(state, params):
    """Remove evaders that are caught, the others stay in order; reward all for the last move."""
    pursuer, evader, left = state.pursuer, state.evader, 0
    num_pursuers = pursuer.shape[0]
    for k in range(num_pursuers):
        state.has_caught[k] = 0
    for k in range(state.num_evaders):
        cell = evader[k]
        if is_caught(cell, state.grid, params):
            state.grid[NUM_COUNTS * cell + EVADER] -= 1
            for j in range(num_pursuers):
                if is_near(pursuer[j], cell, params) and (pursuer[j] == cell) != params.surround:
                    state.has_caught[j] = 1
        else:
            evader[left] = cell
            left += 1
    state.num_evaders = left
    for k in range(num_pursuers):
        state.earned[k] += params.catch_reward * state.has_caught[k]
        state.earned[k] += params.urgency_reward


@njit
def is_caught(cell, grid, params):
    """Whether pursuers are on all open cells beside an evader; or enough of them on its own."""
    if not params.surround:
        return grid[NUM_COUNTS * cell + PURSUER] >= params.n_catch
    for k in range(4):
        around = NUM_COUNTS * params.around[cell, k]
        if grid[around + PURSUER] == 0 and grid[around + WALL] == 0:
            return False
    return True


@njit
def pay(state, params):
    """Pay all pursuers what they have earned by the move of one of them, a part of it shared."""
    earned, rewards = state.earned, state.rewards
    mean = sum_as_numpy(earned) / earned.shape[0]
    if params.local_ratio == 0.0:
        for k in range(earned.shape[0]):
            rewards[k] += mean
        return
    for k in range(earned.shape[0]):
        rewards[k] += params.local_ratio * earned[k] + (1.0 - params.local_ratio) * mean


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


def _observer(size: int) -> Any:
    """Return the kernel `observe` for this `obs_range`; compiled code is faster if it knows it."""
    num_seen = 2 * ((size - 1) // 2) + 1  # of an even size, the last row and column are never seen

    def observe(state, agent, out, params):
        """Write what is on the cells around a pursuer."""
        grid, numbers = state.grid, out.reshape(out.size)
        for y in range(num_seen):
            left = state.pursuer[agent] - params.corner + y * params.row_cells
            start, to = np.uint64(NUM_COUNTS * left), np.uint64(NUM_COUNTS * size * y)
            for k in range(np.uint64(NUM_COUNTS * num_seen)):  # unsigned: no index from the end
                numbers[to + k] = grid[start + k]
        for k in range(size):
            for last in range(num_seen, size):
                out[last, k, WALL] = out[k, last, WALL] = 1.0
                out[last, k, PURSUER] = out[k, last, PURSUER] = 0.0
                out[last, k, EVADER] = out[k, last, EVADER] = 0.0

    return observe


def central_state(state, out, params):
    """Write what is on all cells of the map."""
    for y in range(out.shape[0]):
        for x in range(out.shape[1]):
            cell = params.first_cell + y * params.row_cells + x
            for kind in range(NUM_COUNTS):
                out[y, x, kind] = state.grid[NUM_COUNTS * cell + kind]


def draw(state, params):
    """Draw the map: buildings dark, what pursuers see tinted, pursuers red, evaders blue."""
    margin, size = int(params.margin), 16
    grid = state.grid.reshape(-1, int(params.row_cells), NUM_COUNTS)
    grid = grid[margin : len(grid) - margin, margin : grid.shape[1] - margin]
    picture = np.full(grid.shape, 245, np.uint8)
    for cell in state.pursuer.tolist():
        y, x = (place - margin for place in divmod(cell, int(params.row_cells)))
        reach = int(params.reach)
        seen = picture[max(y - reach, 0) : y + reach + 1, max(x - reach, 0) : x + reach + 1]
        seen[:] = (255, 226, 196)
    picture[grid[..., WALL] > 0] = (90, 90, 90)
    picture = picture.repeat(size, axis=0).repeat(size, axis=1)
    for kind, inset, colour in ((EVADER, 3, (40, 90, 200)), (PURSUER, 5, (200, 40, 40))):
        for y, x in np.argwhere(grid[..., kind] > 0):
            cell = picture[y * size : (y + 1) * size, x * size : (x + 1) * size]
            cell[inset:-inset, inset:-inset] = colour
    return picture


@functools.lru_cache(maxsize=32)
def pursuit_kernels(options: PursuitOptions) -> EnvKernels:
    """Return the kernels of games of this size; other options are parameters."""
    margin, size = _margin(options), options.obs_range
    num_cells = (options.y_size + 2 * margin) * (options.x_size + 2 * margin)
    most = max(options.n_pursuers, options.n_evaders)
    return EnvKernels(
        name="Pursuit-v0",
        state_dtype=[
            ("num_cycles", np.int32),
            ("num_evaders", np.int32),  # that are left: the first of `evader`
            ("pursuer", np.uint32, (options.n_pursuers,)),  # their cells
            ("evader", np.uint32, (options.n_evaders,)),
            ("earned", np.float64, (options.n_pursuers,)),
            ("has_caught", np.int8, (options.n_pursuers,)),
            ("grid", np.uint8, (num_cells * NUM_COUNTS,)),
        ],
        groups={
            "pursuer": AgentsOf(
                options.n_pursuers, Box(0, most, (size, size, 3), np.float32), Discrete(5)
            )
        },
        reset=reset,
        step=step,
        observe=_observer(size),
        render=draw,
        central_state=central_state,
        state_space=Box(0, most, (options.y_size, options.x_size, 3), np.float32),
    )


def pursuit_params(options: PursuitOptions) -> Any:
    """Return the parameters of the kernels: numbers, and tables of the cells."""
    margin, reach = _margin(options), (options.obs_range - 1) // 2
    building = rectangle(options.x_size, options.y_size)
    walls = np.pad(building, margin, constant_values=1)
    is_inside = np.pad(np.ones_like(building), margin)
    row_cells = walls.shape[1]
    empty_grid = np.zeros((walls.size, NUM_COUNTS), np.uint8)
    empty_grid[:, WALL] = walls.reshape(-1)
    cells = np.arange(walls.size)
    after = np.zeros((walls.size, len(MOVES)), np.uint32)
    around = np.zeros((walls.size, 4), np.uint32)
    beside = np.zeros((walls.size, 4), np.uint32)
    for action, (dx, dy) in enumerate(MOVES):
        to = np.clip(cells + dx + dy * row_cells, 0, walls.size - 1)
        after[:, action] = np.where(walls.reshape(-1)[to] == 0, to, cells)
        if action < 4:
            around[:, action] = to
            beside[:, action] = np.where(is_inside.reshape(-1)[to] != 0, to, cells)
    return pack_record(
        margin=margin,
        reach=reach,
        row_cells=np.uint32(row_cells),
        first_cell=np.uint32(margin * row_cells + margin),
        corner=np.uint32(reach * row_cells + reach),  # from it to an agent, of what that sees
        empty_grid=empty_grid.reshape(-1),
        after=after,  # where each action leads from each cell
        around=around,  # the four cells beside each cell
        beside=beside,  # likewise, but the cell itself where they are outside the map
        x_size=options.x_size,
        y_size=options.y_size,
        max_cycles=options.max_cycles,
        local_ratio=1.0 - float(options.shared_reward),
        n_catch=options.n_catch,
        freeze_evaders=bool(options.freeze_evaders),
        tag_reward=float(options.tag_reward),
        catch_reward=float(options.catch_reward),
        urgency_reward=float(options.urgency_reward),
        surround=bool(options.surround),
        constraint_window=float(options.constraint_window),
    )


def rectangle(x_size: int, y_size: int) -> np.ndarray:
    """Return where the building is, int8 (y_size, x_size)."""
    x, y = np.arange(x_size) / x_size, np.arange(y_size) / y_size
    inside_x, inside_y = (x > 0.3) & (x < 1.0 - 0.3), (y > 0.2) & (y < 1.0 - 0.2)
    return (inside_y[:, None] & inside_x).astype(np.int8)


def _margin(options: PursuitOptions) -> int:
    return max(1, (options.obs_range - 1) // 2)


class PursuitVectorEnv(JitVectorEnv):
    """Many games of pursuit; options are those of `PursuitOptions` and of `JitVectorEnv`.

    Observations and actions are those of all pursuers of a game;
    `vecenv.make_vec_agents` has rows of agents.

    Raises:
        ValueError: An option is out of range; says which, and what is possible.
    """

    metadata: dict[str, Any] = PICTURES

    def __init__(self, num_envs: int = 1, **options: Any) -> None:
        chosen = take_options(PursuitOptions, PursuitOptions._fields, options)
        self.options = _checked(chosen)
        super().__init__(
            pursuit_kernels(self.options), num_envs, params=pursuit_params(self.options), **options
        )

    def check_state(self, state: Any, states: np.ndarray) -> None:
        """Refuse players in walls."""
        is_open = pursuit_params(self.options).empty_grid[WALL::NUM_COUNTS] == 0
        for kind in ("pursuer", "evader"):
            cells = states[kind]
            if cells.max() >= len(is_open) or not is_open[cells].all():
                raise ValueError(f"state['states'] has {kind}s outside the map of Pursuit-v0")
        num_evaders = states["num_evaders"]
        if num_evaders.min() < 0 or num_evaders.max() > self.options.n_evaders:
            raise ValueError("state['states'] has an impossible number of evaders of Pursuit-v0")


def _checked(options: PursuitOptions) -> PursuitOptions:
    """Return the options; raise ValueError if they make no game."""
    limits = (
        ("max_cycles", 1, 2**31 - 1),
        ("x_size", 3, 250),
        ("y_size", 3, 250),
        ("n_evaders", 1, MAX_AGENTS),
        ("n_pursuers", 1, MAX_AGENTS),
        ("obs_range", 1, 250),
        ("n_catch", 1, MAX_AGENTS),
    )
    read = {name: read_count(name, getattr(options, name), *limit) for name, *limit in limits}
    options = options._replace(**read)
    window = options.constraint_window
    if not 0 < window <= 1 or int(min(options.x_size, options.y_size) * window) < 1:
        raise ValueError(
            f"constraint_window is {window!r}, expected a part of the map, at most 1, that is at "
            "least a cell wide"
        )
    wide, high = (int(np.ceil(size * window)) for size in (options.x_size, options.y_size))
    for name in ("n_evaders", "n_pursuers"):
        # No two of a kind start beside each other, so at most one in two cells.
        if getattr(options, name) > -(-wide * high // 2):
            raise ValueError(
                f"{name} is {getattr(options, name)}, which do not fit into {wide} x {high} cells "
                "without being beside each other"
            )
    return options
