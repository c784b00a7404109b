"""What a rollout buffer consists of, as arithmetic: names, shapes, dtypes, bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from buffers.core.arguments import check_count
from buffers.core.columns import ColumnSpec, spec_bytes
from buffers.core.errors import BufferMisuseError
from buffers.core.spaces import Leaf, action_leaf, extra_leaves, space_leaves
from vecenv.core.arguments import read_autoreset_mode

__all__ = ["RolloutLayout", "parse_autoreset_mode", "plan_rollout"]

_MAX_ROWS = 2**31 - 1  # the shuffle draws 32-bit words

_BOOL = np.dtype(np.bool_)
_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)
_INT64 = np.dtype(np.int64)

# Names that no extra column may have: of columns, of other entries of batches and `memory`, and of
# the step in `put(t, ...)`.
_TAKEN = frozenset((
    "obs", "actions", "log_probs", "values", "rewards", "terminations", "truncations", "valid",
    "final_values", "advantages", "returns", "rows", "over_before", "running_returns",
    "running_lengths", "episode_returns", "episode_lengths", "has_final", "indices", "extras",
    "minibatches", "memory", "size", "self", "t", "weights", "is_first", "initial_states",
))  # fmt: skip


class RolloutLayout(NamedTuple):
    """Sizes and columns of a rollout buffer; nothing is allocated yet."""

    num_steps: int
    num_envs: int
    observation_space: Space
    obs_leaves: list[Leaf]
    action: Leaf
    extras: list[Leaf]
    games: list[Leaf]  # of the columns with one row per game
    agents_per_game: int  # rows of a step that share one of these
    autoreset_mode: AutoresetMode
    columns: list[ColumnSpec]

    @property
    def uses_final_values(self) -> bool:
        """Whether values of final observations must be given, as the next row has another."""
        return self.autoreset_mode is not AutoresetMode.NEXT_STEP

    def nbytes(self, staged: bool) -> int:
        """Bytes of all columns on host and device together."""
        return sum(spec_bytes(self.columns, staged))


def plan_rollout(
    num_steps: int,
    num_envs: int,
    observation_space: Space,
    action_space: Space,
    autoreset_mode: AutoresetMode | str,
    extra_columns: Mapping[str, Space] | None = None,
    *,
    game_columns: Mapping[str, Space] | None = None,
    agents_per_game: int | None = None,
) -> RolloutLayout:
    """Plan the columns of a rollout buffer.

    Raises:
        BufferMisuseError: A size that is no positive integer, a space that has no arrays of fixed
            size, an unknown autoreset mode, a name of an extra column that is taken, a number of
            agents that does not divide that of envs.
    """
    num_steps = check_count("num_steps", num_steps)
    num_envs = check_count("num_envs", num_envs)
    if num_steps * num_envs > _MAX_ROWS:
        raise BufferMisuseError(
            f"num_steps * num_envs is {num_steps * num_envs}, expected at most {_MAX_ROWS}; "
            "use shorter rollouts"
        )
    leaves = space_leaves(observation_space, "obs")
    if not leaves:
        raise BufferMisuseError(f"observation_space {observation_space} holds no array at all")
    action = action_leaf(action_space)
    extras = extra_leaves(extra_columns, _TAKEN)
    agents = _read_agents(num_envs, game_columns, agents_per_game)
    taken = _TAKEN | {leaf.path for leaf in extras}
    games = extra_leaves(game_columns, taken, "game column")
    mode = parse_autoreset_mode(autoreset_mode)
    columns = _rollout_columns(num_steps, num_envs, leaves, action)
    columns += [
        ColumnSpec(leaf.path, (num_steps, num_envs, *leaf.shape), leaf.dtype, "device")
        for leaf in extras
    ]
    columns += [
        ColumnSpec(leaf.path, (num_steps, num_envs // agents, *leaf.shape), leaf.dtype, "device")
        for leaf in games
    ]
    if mode is not AutoresetMode.NEXT_STEP:
        columns += [
            ColumnSpec("final_values", (num_steps, num_envs), _FLOAT32, "device"),
            ColumnSpec("has_final", (num_steps, num_envs), _BOOL, "host"),
        ]
    return RolloutLayout(
        num_steps, num_envs, observation_space, leaves, action, extras, games, agents, mode, columns
    )


def _read_agents(
    num_envs: int, game_columns: Mapping[str, Space] | None, agents_per_game: int | None
) -> int:
    """How many rows of a step are one game."""
    if agents_per_game is None:
        if game_columns:
            raise BufferMisuseError(
                "game_columns needs agents_per_game, the number of agents whose rows share one of "
                "a game column; pass it too"
            )
        return 1
    agents = check_count("agents_per_game", agents_per_game)
    if num_envs % agents:
        raise BufferMisuseError(
            f"agents_per_game is {agents}, which does not divide num_envs = {num_envs}; expected "
            "num_envs to be the number of games times that of agents of each"
        )
    return agents


def _rollout_columns(
    num_steps: int, num_envs: int, leaves: list[Leaf], action: Leaf
) -> list[ColumnSpec]:
    steps, num_rows = (num_steps, num_envs), num_steps * num_envs
    obs = [
        ColumnSpec(leaf.path, (num_steps + 1, num_envs, *leaf.shape), leaf.dtype, "both", True)
        for leaf in leaves
    ]
    return [
        *obs,
        ColumnSpec("actions", (*steps, *action.shape), action.dtype, "both", True),
        ColumnSpec("rewards", steps, _FLOAT32, "both", True),
        ColumnSpec("terminations", steps, _BOOL, "both", True),
        ColumnSpec("truncations", steps, _BOOL, "both", True),
        ColumnSpec("valid", steps, _BOOL, "both"),
        ColumnSpec("is_first", (num_steps + 1, num_envs), _BOOL, "both"),
        ColumnSpec("log_probs", steps, _FLOAT32, "device"),
        ColumnSpec("values", (num_steps + 1, num_envs), _FLOAT32, "device"),
        ColumnSpec("advantages", steps, _FLOAT32, "device"),
        ColumnSpec("returns", steps, _FLOAT32, "device"),
        ColumnSpec("rows", (num_rows,), _INT64, "both"),
        ColumnSpec("over_before", (num_envs,), _BOOL, "host"),
        ColumnSpec("running_returns", (num_envs,), _FLOAT64, "host"),
        ColumnSpec("running_lengths", (num_envs,), _INT64, "host"),
        ColumnSpec("episode_returns", (num_rows,), _FLOAT64, "host"),
        ColumnSpec("episode_lengths", (num_rows,), _INT64, "host"),
    ]


def parse_autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """Return the mode of an enum member, or of its name or value in any spelling.

    Raises:
        BufferMisuseError: There is no such mode.
    """
    try:
        return read_autoreset_mode(mode)
    except ValueError as error:
        raise BufferMisuseError(
            f'{error}; pass envs.metadata["autoreset_mode"] of the vector env that fills the buffer'
        ) from None
