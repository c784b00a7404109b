"""Grid worlds seen by the player, by MiniGrid's rules: rooms, keys, doors, the user's maps.

The rules are those of the package `minigrid` 3: M. Chevalier-Boisvert et al., "Minigrid &
Miniworld", 2023 (arXiv 2306.13831).
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit

from vecenv.core.arguments import read_count
from vecenv.jit.bundled import PICTURES, draw_stroke, enlarge
from vecenv.jit.env import JitVectorEnv
from vecenv.jit.kernels import EnvKernels, pack_record
from vecenv.jit.random import integers

VIEW = 7  # cells along an edge of the view
EMPTY, WALL, KEY, GOAL, LAVA, OPEN, CLOSED, LOCKED = range(8)  # cells; the last three are doors
# Codes of the cells in observations: MiniGrid's kind, color and state.
CODES = np.array(
    [(1, 0, 0), (2, 5, 0), (5, 4, 0), (8, 1, 0), (9, 0, 0), (4, 4, 0), (4, 4, 1), (4, 4, 2)],
    np.uint8,
)
COLORS = np.zeros((8, 3), np.uint8)
COLORS[[WALL, GOAL, LAVA]] = (110, 110, 110), (60, 200, 80), (230, 90, 40)
COLORS[[OPEN, CLOSED, LOCKED]] = (90, 80, 20), (170, 150, 30), (220, 190, 40)
SIGNS = {".": EMPTY, "#": WALL, "K": KEY, "G": GOAL, "L": LAVA, "D": LOCKED, "A": EMPTY}
TURN_LEFT, TURN_RIGHT, FORWARD, PICK_UP, DROP, TOGGLE = range(6)  # actions; 6 does nothing
FROM_MAP, FOUR_ROOMS, DOOR_KEY = range(3)
LAYOUTS = ("empty", "empty_random", "four_rooms", "door_key")


@njit
def find_free(state, rng, width, height):
    """Draw an empty cell (row, column) of the upper left part, other than the player's."""
    while True:
        x, y = integers(rng, width), integers(rng, height)
        if state.grid[y, x] == EMPTY and not (x == state.x and y == state.y):
            return y, x


@njit
def put_player(state, rng, width, height):
    """Put the player into an empty cell of the upper left part, with a random direction."""
    state.x = state.y = -1
    state.y, state.x = find_free(state, rng, width, height)
    state.direction = integers(rng, 4)


@njit
def open_rooms(state, rng):
    """Make a gap in each of the walls between four rooms, then put player and goal anywhere."""
    size = state.grid.shape[0]
    half = size // 2
    for y in (0, half):
        for x in (0, half):
            if x == 0:
                state.grid[y + 1 + integers(rng, half - 1), half] = EMPTY
            if y == 0:
                state.grid[half, x + 1 + integers(rng, half - 1)] = EMPTY
    put_player(state, rng, size, size)
    y, x = find_free(state, rng, size, size)
    state.grid[y, x] = GOAL


@njit
def lock_goal(state, rng):
    """Build a wall with a locked door between player and goal; the key is on the player's side."""
    size = state.grid.shape[0]
    column = 2 + integers(rng, size - 4)
    for y in range(size):
        state.grid[y, column] = WALL
    put_player(state, rng, column, size)
    state.grid[1 + integers(rng, size - 3), column] = LOCKED
    y, x = find_free(state, rng, column, size)
    state.grid[y, x] = KEY


def reset(state, rng, params):
    """Build the world anew."""
    state.has_key, state.num_steps = False, 0
    for y in range(state.grid.shape[0]):
        for x in range(state.grid.shape[1]):
            state.grid[y, x] = params.map[y, x]
    if params.layout == FOUR_ROOMS:
        open_rooms(state, rng)
    elif params.layout == DOOR_KEY:
        lock_goal(state, rng)
    elif params.start_x >= 0:
        state.y, state.x, state.direction = params.start_y, params.start_x, 0
    else:
        put_player(state, rng, state.grid.shape[1], state.grid.shape[0])


@njit
def ahead(direction):
    """Return the step in x and y to the cell ahead: right, down, left, up."""
    return (direction == 0) * 1 - (direction == 2) * 1, (direction == 1) * 1 - (direction == 3) * 1


def step(state, action, rng, params):
    """Turn, go, or use the cell ahead; the goal is worth more the sooner it is reached."""
    state.num_steps += 1
    dx, dy = ahead(state.direction)
    x, y = state.x + dx, state.y + dy
    cell = state.grid[y, x]
    if action == TURN_LEFT:
        state.direction = (state.direction + 3) % 4
    elif action == TURN_RIGHT:
        state.direction = (state.direction + 1) % 4
    elif action == FORWARD:
        if cell in (EMPTY, GOAL, LAVA, OPEN):
            state.x, state.y = x, y
        if cell == GOAL:
            return 1.0 - 0.9 * (state.num_steps / params.max_steps), True, False
        if cell == LAVA:
            return 0.0, True, False
    elif action == PICK_UP:
        if cell == KEY and not state.has_key:
            state.grid[y, x], state.has_key = EMPTY, True
    elif action == DROP:
        if cell == EMPTY and state.has_key:
            state.grid[y, x], state.has_key = KEY, False
    elif action == TOGGLE:
        if cell == OPEN:
            state.grid[y, x] = CLOSED
        elif cell == CLOSED or (cell == LOCKED and state.has_key):
            state.grid[y, x] = OPEN
    return 0.0, False, False


@njit
def seen_cell(state, i, j):
    """Return the cell in column i and row j of the view; the player is below its middle."""
    dx, dy = ahead(state.direction)
    forward, right = VIEW - 1 - j, i - VIEW // 2
    x, y = state.x + forward * dx - right * dy, state.y + forward * dy + right * dx
    if 0 <= x < state.grid.shape[1] and 0 <= y < state.grid.shape[0]:
        return state.grid[y, x]
    return WALL


@njit
def spread(state, seen, j, is_rightwards):
    """Spread sight along row j, and from it into the row ahead; rows are bits of `seen`."""
    sign = 1 if is_rightwards else -1
    here, after = seen, 0
    for k in range(VIEW - 1):
        i = k if is_rightwards else VIEW - 1 - k
        cell = seen_cell(state, i, j)
        if (here >> i) & 1 and cell not in (WALL, CLOSED, LOCKED):
            here |= 1 << (i + sign)
            after |= (1 << i) | (1 << (i + sign))
    return here, after


def observe(state, out, params):
    """Write kind, color and state of the cells ahead, and zeros for those hidden by walls."""
    seen = 1 << (VIEW // 2)
    for j in range(VIEW - 1, -1, -1):
        seen, after = spread(state, seen, j, True)
        seen, more = spread(state, seen, j, False)
        for i in range(VIEW):
            cell = seen_cell(state, i, j)
            if i == VIEW // 2 and j == VIEW - 1:
                cell = KEY if state.has_key else EMPTY
            is_seen = params.see_through_walls or (seen >> i) & 1
            for k in range(3):
                out[i, j, k] = CODES[cell, k] if is_seen else 0
        seen = after | more


def draw(state, params):
    """Return a picture, a cell of 16 pixels each."""
    picture = enlarge(COLORS[np.asarray(state.grid)], 16, (40, 40, 40))
    for y, x in np.argwhere(np.asarray(state.grid) == KEY).tolist():
        draw_stroke(picture, (16 * x + 5, 16 * y + 8), (16 * x + 11, 16 * y + 8), 4, (230, 200, 50))
    dx, dy = ((1, 0), (0, 1), (-1, 0), (0, -1))[int(state.direction)]
    x, y = 16 * int(state.x) + 8, 16 * int(state.y) + 8
    draw_stroke(picture, (x - 3 * dx, y - 3 * dy), (x, y), 9, (220, 60, 50))
    draw_stroke(picture, (x, y), (x + 5 * dx, y + 5 * dy), 3, (220, 60, 50))
    return picture


@functools.lru_cache(maxsize=64)
def grid_kernels(height: int, width: int) -> EnvKernels:
    """Return the kernels of worlds of this size; the map is a parameter."""
    return EnvKernels(
        name="grid world",
        state_dtype=[
            *((name, np.int32) for name in ("x", "y", "direction", "num_steps")),
            ("has_key", np.bool_),
            ("grid", np.int8, (height, width)),
        ],
        observation_space=Box(0, 255, (VIEW, VIEW, 3), np.uint8),
        action_space=Discrete(7),
        reset=reset,
        step=step,
        observe=observe,
        render=draw,
    )


class GridWorldVectorEnv(JitVectorEnv):
    """Many worlds of square cells, by MiniGrid's rules.

    Observations are MiniGrid's `image`, uint8 (7, 7, 3), with the column first. Actions are
    MiniGrid's: turn left, turn right, forward, pick up, drop, toggle, nothing.

    Args:
        num_envs: Number of envs.
        layout: "empty": the player begins in the upper left corner, the goal is in the lower right
            one. "empty_random": the player begins anywhere. "four_rooms": with gaps, player and
            goal anywhere. "door_key": the goal is behind a locked door. Or a map, a list of strings
            of the signs ".", "#" (wall), "G" (goal), "L" (lava), "K" (key), "D" (locked door) and
            "A" (begin here, looking right; without it, anywhere), with walls all around.
        size: Edge of the world, walls included; ignored for a map.
        see_through_walls: Whether walls and closed doors hide nothing; None for MiniGrid's choice,
            yes in the two empty layouts.
        max_episode_steps: Truncate episodes at this length; also sets how fast the reward falls.
            None for MiniGrid's.
        **options: As for `JitVectorEnv`.

    Raises:
        ValueError: The layout is unknown, too small, or no map.
    """

    metadata: dict[str, Any] = PICTURES

    def __init__(
        self,
        num_envs: int = 1,
        layout: str | Sequence[str] = "empty",
        *,
        size: int = 8,
        see_through_walls: bool | None = None,
        max_episode_steps: int | None = None,
        **options: Any,
    ) -> None:
        rows = _rows_of(layout, size) if isinstance(layout, str) else list(layout)
        cells, start = _read_map(rows)
        kind, limit = FROM_MAP, 4 * cells.size
        if layout in ("four_rooms", "door_key"):
            is_key = layout == "door_key"
            kind, limit = (DOOR_KEY, 10 * cells.size) if is_key else (FOUR_ROOMS, 100)
        max_episode_steps = limit if max_episode_steps is None else max_episode_steps
        if see_through_walls is None:
            see_through_walls = layout in ("empty", "empty_random")
        params = pack_record(
            map=cells,
            layout=kind,
            start_y=start[0],
            start_x=start[1],
            see_through_walls=bool(see_through_walls),
            max_steps=max_episode_steps,
        )
        super().__init__(
            grid_kernels(*cells.shape),
            num_envs,
            params=params,
            max_episode_steps=max_episode_steps,
            **options,
        )

    def check_state(self, state: Any, states: np.ndarray) -> None:
        """Refuse players outside of the walls, and unknown cells."""
        height, width = states["grid"].shape[1:]
        is_inside = (states["x"] > 0) & (states["x"] < width - 1)
        is_inside &= (states["y"] > 0) & (states["y"] < height - 1)
        cells = states["grid"]
        if not is_inside.all() or cells.min() < EMPTY or cells.max() > LOCKED:
            raise ValueError("state['states'] has players outside of the walls, or unknown cells")

    def get_action_meanings(self) -> list[str]:
        """Return the names of the actions, as Atari's envs do."""
        return ["turn left", "turn right", "forward", "pick up", "drop", "toggle", "nothing"]


def _rows_of(layout: str, size: int) -> list[str]:
    """Return the map of a named layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}, or a map")
    least = 7 if layout == "four_rooms" else 5 if layout == "door_key" else 4
    size = read_count(f"size of {layout}", size, least, 127)
    if layout == "four_rooms" and size % 2 == 0:
        raise ValueError(f"size is {size}, expected an odd number for four rooms of equal size")
    cells = [["#", *"." * (size - 2), "#"] for _ in range(size)]
    cells[0] = cells[-1] = ["#"] * size
    if layout == "four_rooms":
        cells[size // 2] = ["#"] * size
        for row in cells:
            row[size // 2] = "#"
    else:
        cells[-2][-2] = "G"
    if layout == "empty":
        cells[1][1] = "A"
    return ["".join(row) for row in cells]


def _read_map(rows: list[str]) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the cells of a map, int8 (rows, columns), and where the player begins, or (-1, -1)."""
    if len(rows) < 3 or len({len(row) for row in rows}) != 1 or len(rows[0]) < 3:
        raise ValueError(f"the map {rows} must have three rows or more of one length, at least 3")
    if unknown := set("".join(rows)) - set(SIGNS):
        raise ValueError(
            f"the map has {sorted(unknown)}, expected the signs {' '.join(SIGNS)} only"
        )
    cells = np.array([[SIGNS[sign] for sign in row] for row in rows], np.int8)
    edge = np.concatenate([cells[0], cells[-1], cells[:, 0], cells[:, -1]])
    if (edge != WALL).any():
        raise ValueError("the map must have walls, '#', all around")
    starts = [(y, row.index("A")) for y, row in enumerate(rows) if "A" in row]
    if "".join(rows).count("A") > 1:
        raise ValueError("the map has several signs 'A', where the player begins; give one or none")
    if not starts and not (cells == EMPTY).any():
        raise ValueError("the map has no empty cell, '.', for the player to begin in")
    return cells, starts[0] if starts else (-1, -1)
