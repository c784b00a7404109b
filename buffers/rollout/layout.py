"""What a rollout buffer consists of, as arithmetic: names, shapes, dtypes, places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from buffers.core.arguments import check_count
from buffers.core.columns import ColumnSpec
from buffers.core.errors import BufferMisuseError
from buffers.core.spaces import Leaf, action_leaf, extra_leaves, space_leaves
from vecenv.core.arguments import read_autoreset_mode

__all__ = ["RolloutLayout", "parse_autoreset_mode", "plan_rollout"]

_MAX_ROWS = 2**31 - 1  # the shuffle draws 32-bit words

# Names that no extra column may have: of columns, of other entries of batches and `memory`, and of
# the step in `put(t, ...)`.
_TAKEN = frozenset((
    "obs", "actions", "log_probs", "values", "rewards", "terminations", "truncations", "valid",
    "final_values", "advantages", "returns", "rows", "over_before", "running_returns",
    "running_lengths", "episodes", "has_final", "indices", "extras", "minibatches", "memory",
    "size", "self", "t", "weights", "is_first", "initial_states", "acting",
))  # fmt: skip


class RolloutLayout(NamedTuple):
    """Sizes and columns of a rollout buffer; nothing is allocated yet."""

    num_steps: int
    num_envs: int
    observation_space: Space
    obs_leaves: list[Leaf]
    extras: list[str]
    games: list[str]  # the columns with one row per game
    agents_per_game: int  # rows of a step that share one of these
    autoreset_mode: AutoresetMode
    columns: list[ColumnSpec]  # "host": where envs write; "device": where the tensors live


def plan_rollout(
    num_steps: int,
    num_envs: int,
    observation_space: Space,
    action_space: Space,
    *,
    autoreset_mode: AutoresetMode | str,
    extra_columns: Mapping[str, Space] | None,
    game_columns: Mapping[str, Space] | None,
    agents_per_game: int | None,
) -> RolloutLayout:
    """Plan the columns of a rollout buffer.

    Raises:
        BufferMisuseError: A size, space, mode or name that does not do.
    """
    num_steps, num_envs = check_count("num_steps", num_steps), check_count("num_envs", num_envs)
    if num_steps * num_envs > _MAX_ROWS:
        raise BufferMisuseError(
            f"num_steps * num_envs is {num_steps * num_envs}, expected at most {_MAX_ROWS}; "
            "use shorter rollouts"
        )
    obs = space_leaves(observation_space, "obs")
    if not obs:
        raise BufferMisuseError(f"observation_space {observation_space} holds no array at all")
    action = action_leaf(action_space)
    extras = extra_leaves(extra_columns, _TAKEN)
    agents = _read_agents(num_envs, game_columns, agents_per_game)
    taken = _TAKEN | {leaf.path for leaf in extras}
    games = extra_leaves(game_columns, taken, "game column")
    mode = parse_autoreset_mode(autoreset_mode)

    steps, later = (num_steps, num_envs), (num_steps + 1, num_envs)
    columns = [ColumnSpec(o.path, (*later, *o.shape), o.dtype, "both", True) for o in obs]
    columns.append(ColumnSpec("actions", (*steps, *action.shape), action.dtype, "both", True))

    def add(place: Any, dtype: Any, shape: tuple[int, ...], *names: str, is_shared: bool = False):
        columns.extend(ColumnSpec(n, shape, np.dtype(dtype), place, is_shared) for n in names)

    add("both", "f4", steps, "rewards", is_shared=True)
    add("both", "?", steps, "terminations", "truncations", is_shared=True)
    add("host", "?", steps, "acting", is_shared=True)
    add("both", "?", steps, "valid")
    add("both", "?", later, "is_first")
    add("device", "f4", steps, "log_probs", "advantages", "returns")
    add("device", "f4", later, "values")
    add("host", "i8", (num_steps * num_envs,), "rows")  # the valid ones
    add("host", "?", (num_envs,), "over_before")
    add("host", "f8", (num_envs,), "running_returns")
    add("host", "i8", (num_envs,), "running_lengths")
    # Returns and lengths where episodes ended, else zeros.
    add("host", "f8", (num_steps, 2, num_envs), "episodes")
    for leaf in (*extras, *games):
        count = num_envs if leaf in extras else num_envs // agents
        add("device", leaf.dtype, (num_steps, count, *leaf.shape), leaf.path)
    if mode is not AutoresetMode.NEXT_STEP:
        add("device", "f4", steps, "final_values")
        add("host", "?", steps, "has_final")
    own, shared = ([leaf.path for leaf in leaves] for leaves in (extras, games))
    return RolloutLayout(
        num_steps, num_envs, observation_space, obs, own, shared, agents, mode, columns
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
