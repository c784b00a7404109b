"""Gymnasium's toy texts as compiled environments: FrozenLake, CliffWalking and Taxi.

Gymnasium describes each as a table `P` of outcomes, made from its options. The same table is the
parameter of the kernels here, so rules and options are those of the Gymnasium that is installed.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.envs.toy_text.taxi import TaxiEnv
from gymnasium.spaces import Discrete

from vecenv.jit.bundled import BundledVectorEnv, draw_stroke, enlarge
from vecenv.jit.kernels import EnvKernels, pack_record
from vecenv.jit.random import uniform

NUM_OUTCOMES = 3  # minimum, so that slippery and other lakes share compiled code
CELL = 32  # pixels of an edge in pictures
TAXI_STOPS = {(0, 0): (230, 120, 110), (0, 4): (120, 200, 120), (4, 0): (230, 220, 110)}
TAXI_STOPS |= {(4, 3): (120, 150, 230)}


def reset(state, rng, params):
    """Begin in one of the starts, by their probabilities."""
    luck, k = uniform(rng), 0
    while k < params.starts.shape[0] - 1 and params.starts_up_to[k] <= luck:
        k += 1
    state.cell = params.starts[k]


def step(state, action, rng, params):
    """Take one of the outcomes of the action, by their probabilities."""
    luck, cell, k = uniform(rng), state.cell, 0
    while k < params.up_to.shape[2] - 1 and params.up_to[cell, action, k] <= luck:
        k += 1
    state.cell = params.after[cell, action, k]
    return params.rewards[cell, action, k], params.is_end[cell, action, k] != 0, False


def observe(state, out, params):
    """Write the number of the state."""
    out[0] = state.cell


def action_mask(state, out, params):
    """Write which actions change something, as the env says."""
    for action in range(out.shape[0]):
        out[action] = params.masks[state.cell, action] != 0


def draw_lake(state, params):
    """Return a picture, a cell of 32 pixels each."""
    picture = enlarge(params.colors, CELL, (200, 215, 230))
    _draw_player(picture, *divmod(int(state.cell), params.colors.shape[1]))
    return picture


def draw_taxi(state, params):
    """Return a picture, uint8 (160, 160, 3): walls, stops, taxi, passenger, and where they go."""
    picture = enlarge(params.colors, CELL)
    cell, goal = divmod(int(state.cell), 4)
    place, passenger = divmod(cell, 5)
    row, column = divmod(place, 5)
    for y, x in np.argwhere(params.walls):
        edge = (x + 1) * CELL
        draw_stroke(picture, (edge, y * CELL), (edge, (y + 1) * CELL), 3, (40, 40, 40))
    stops = list(TAXI_STOPS)
    x, y = _middle(*stops[goal])
    draw_stroke(picture, (x - 10, y - 10), (x - 10, y - 10), 8, (200, 30, 30))
    _draw_player(picture, row, column, (220, 180, 30))
    waits = (row, column) if passenger == 4 else stops[passenger]
    draw_stroke(picture, _middle(*waits), _middle(*waits), 9, (30, 30, 30))
    return picture


def _middle(row: float, column: float) -> tuple[float, float]:
    return (column + 0.5) * CELL, (row + 0.5) * CELL


def _draw_player(picture: np.ndarray, row: int, column: int, color: Any = (200, 60, 50)) -> None:
    draw_stroke(picture, _middle(row, column), _middle(row, column), 20, color)


@functools.lru_cache(maxsize=64)
def table_kernels(name: str, num_states: int, num_actions: int, draw: Any) -> EnvKernels:
    """Return the kernels of tables of this size; the table is a parameter."""
    return EnvKernels(
        name=name,
        state_dtype=[("cell", np.int64)],
        observation_space=Discrete(num_states),
        action_space=Discrete(num_actions),
        reset=reset,
        step=step,
        observe=observe,
        render=draw,
    )


def read_table(env: Any) -> dict[str, np.ndarray]:
    """Return the table of a toy text as arrays, by the names of the parameters.

    Args:
        env: Has `P[state][action]`, a list of (probability, state after, reward, terminated), and
            `initial_state_distrib`, a probability per state.
    """
    num_states, num_actions = len(env.P), len(env.P[0])
    rows = [env.P[state][action] for state in range(num_states) for action in range(num_actions)]
    shape = (num_states, num_actions, max(NUM_OUTCOMES, *map(len, rows)))
    up_to, after = np.full(shape, np.inf), np.zeros(shape, np.int64)
    rewards, is_end = np.zeros(shape), np.zeros(shape, np.int8)
    for k, row in enumerate(rows):
        place = divmod(k, num_actions)
        chances = [outcome[0] for outcome in row]
        # If rounding leaves a draw above all outcomes, Gymnasium takes the first.
        padded = [*row, *[row[0]] * (shape[2] - len(row))]
        up_to[place][: len(row)] = np.cumsum(chances)
        _, after[place], rewards[place], is_end[place] = zip(*padded, strict=True)
    chances = np.asarray(env.initial_state_distrib)
    starts = np.flatnonzero(chances)
    return {
        "starts": starts,
        "starts_up_to": np.cumsum(chances)[starts],
        "up_to": up_to,
        "after": after,
        "rewards": rewards,
        "is_end": is_end,
    }


class TableVectorEnv(BundledVectorEnv):
    """Many toy texts of Gymnasium; the base class of those below."""

    env_class: Any
    draw: Callable[..., Any]
    _extras: Callable[[Any], dict[str, np.ndarray]]  # further parameters of an env

    def __init__(self, num_envs: int = 1, **options: Any) -> None:
        known = set(inspect.signature(self.env_class).parameters) - {"render_mode"}
        table = self.world(**{name: options.pop(name) for name in known & options.keys()})
        name = self.env_class.__name__.removesuffix("Env")
        kernels = table_kernels(name, *table["up_to"].shape[:2], type(self).draw)
        if "masks" in (table.dtype.names or ()):
            kernels = dataclasses.replace(kernels, action_mask=action_mask)
        self.kind = kernels.having(params=table)
        super().__init__(num_envs, **options)

    @classmethod
    def world(cls, **options: Any) -> np.record:
        """Return the parameter record of an env with these options of Gymnasium's class.

        A vector env takes one for each env: ``params=[FrozenLakeVectorEnv.world(desc=map) for map
        in maps]``, of maps of one size, and `set_params` one for some of them.
        """
        env = cls.env_class(**options)
        return pack_record(**read_table(env), **cls._extras(env))

    def check_state(self, state: Any, states: np.ndarray) -> None:
        """Refuse cells that the table does not have."""
        num_states = self.single_observation_space.n  # type: ignore[attr-defined]  # a Discrete
        if states["cell"].min() < 0 or states["cell"].max() >= num_states:
            raise ValueError(f"state['states'] has cells outside of 0 to {num_states - 1}")


class FrozenLakeVectorEnv(TableVectorEnv):
    """Many lakes; options are those of Gymnasium's FrozenLake and of `JitVectorEnv`.

    Gymnasium's are `desc`, `map_name`, `is_slippery`, `success_rate` and `reward_schedule`. Maps
    of another size are compiled once more.
    """

    env_class = FrozenLakeEnv
    draw = staticmethod(draw_lake)
    length = 100

    @staticmethod
    def _extras(env: Any) -> dict[str, np.ndarray]:
        colors = np.full((*env.desc.shape, 3), (235, 245, 255), np.uint8)
        for letter, color in ((b"H", (60, 90, 140)), (b"G", (120, 200, 120))):
            colors[env.desc == letter] = color
        return {"colors": colors}


class CliffWalkingVectorEnv(TableVectorEnv):
    """Many cliffs; options are those of Gymnasium's (`is_slippery`) and of `JitVectorEnv`."""

    env_class = CliffWalkingEnv
    draw = staticmethod(draw_lake)

    @staticmethod
    def _extras(env: Any) -> dict[str, np.ndarray]:
        colors = np.full((4, 12, 3), (225, 215, 190), np.uint8)
        colors[3, 1:11] = (70, 60, 60)
        colors[3, 11] = (120, 200, 120)
        return {"colors": colors}


class TaxiVectorEnv(TableVectorEnv):
    """Many taxis; options are those of Gymnasium's Taxi and of `JitVectorEnv`.

    Its action masks are those of Gymnasium's infos.

    Raises:
        ValueError: `fickle_passenger` is set, which the table can't describe.
    """

    env_class = TaxiEnv
    draw = staticmethod(draw_taxi)
    length = 200

    def __init__(self, num_envs: int = 1, **options: Any) -> None:
        if options.get("fickle_passenger"):
            raise ValueError(
                "the compiled Taxi has no fickle_passenger; make Gymnasium's, by "
                "make_vec('Taxi-v4', fickle_passenger=True)"
            )
        super().__init__(num_envs, **options)

    @staticmethod
    def _extras(env: Any) -> dict[str, np.ndarray]:
        colors = np.full((5, 5, 3), (235, 235, 235), np.uint8)
        for place, color in TAXI_STOPS.items():
            colors[place] = color
        walls = np.array([[letter != b":" for letter in row[2:10:2]] for row in env.desc[1:6]])
        masks = np.array([env.action_mask(state) for state in range(len(env.P))], np.int8)
        return {"colors": colors, "walls": walls.astype(np.int8), "masks": masks}
