"""Action masks of a group of agents: one row per agent, from every source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vecenv.agents.grouping import Members
from vecenv.core.errors import NoActionMaskError
from vecenv.core.masks import MASK_KEY, LatestMasks, can_be_masked, has_mask_part, mask_width

__all__ = ["GroupMasks"]


class GroupMasks(LatestMasks):
    """The masks that came with the latest results of a group's rows.

    They are the part "action_mask" of Dict observations, or `infos["action_mask"]`. If actions are
    padded, the actions that an agent does not have are forbidden too.

    Args:
        members: The group.
        num_games: Number of games.

    Attributes:
        source: Function from rows, int64 (B,), to masks, bool or int8 (B, width), for games that
            compute masks on request; None for games that give them with their results.
    """

    source: Callable[[np.ndarray], np.ndarray] | None = None

    def __init__(self, members: Members, num_games: int) -> None:
        super().__init__(num_games * len(members.agents), members.action_space)
        self._members = members
        self._can_be_masked = can_be_masked(members.action_space)
        self._width = mask_width(members.action_space) if self._can_be_masked else 0
        self._is_observed = self._can_be_masked and has_mask_part(
            members.observation_space, self._width
        )
        self._observed: np.ndarray | None = None  # (num_rows, width), of the latest observations

    def name(self, row: int) -> str:
        """Return the name of a row in errors."""
        game, k = divmod(int(row), len(self._members.agents))
        return f"game {game}, agent {self._members.agents[k]!r}"

    @property
    def is_there(self) -> bool:
        """Whether there are masks; for masks in infos this is known after the first reset."""
        has_source = self._is_observed or self.values is not None or self.source is not None
        return self._can_be_masked and (has_source or self._members.allowed is not None)

    def note_rows(self, obs: Any, infos: dict[str, Any], rows: Any, alive: np.ndarray) -> None:
        """Record the masks of a batch of results.

        Args:
            obs: Observations of the batch; kept by reference if `rows` is a slice of all.
            infos: Infos of the batch's rows.
            rows: The rows: int64 (B,), or the slice of all.
            alive: bool (num_rows,), which agents act next.
        """
        if not self._is_observed:
            if self._can_be_masked:
                self.note(infos, rows)
            return
        part = obs[MASK_KEY].reshape(-1, self._width)
        if not isinstance(rows, slice):
            latest = np.zeros((len(alive), self._width), part.dtype)
            if self._observed is not None:
                latest[:] = self._observed
            latest[rows] = part
            part = latest
        self._observed = part

    def read_rows(self, alive: np.ndarray, rows: Any) -> np.ndarray:
        """Return masks of rows, int8 (B, width), owned by the caller; all 1 for agents not alive.

        Raises:
            NoActionMaskError: There are none.
            ActionMaskError: A mask is missing, has values other than 0 and 1, or allows nothing;
                names game and agent.
        """
        if not self.is_there:
            width = mask_width(self._members.action_space)  # raises if there can't be masks
            raise NoActionMaskError(
                "the agents give no action masks; games that have them return them in the infos of "
                "each agent, as info['action_mask'], or have a part 'action_mask' in its Dict "
                f"observations; each mask is an array of {width} times 0 or 1"
            )
        ids, is_given, allowed = np.arange(len(alive))[rows], None, self._members.allowed
        values: Any = np.ones((len(ids), self._width), np.int8)
        if self.source is not None:
            values = self.source(ids)
        elif self._is_observed and self._observed is not None:
            values = self._observed[ids]
        elif self.values is not None:
            values, is_given = self.values[ids], self._is_given[ids]
        if allowed is not None:
            allowed = allowed[ids % len(self._members.agents)]
        masks = self.checked(values, ids, ~alive[ids], is_given, allowed)
        masks[~alive[ids]] = 1
        return masks

    def state(self) -> tuple[Any, ...]:
        """Return copies for `restore`."""
        found = (*super().state(), self._observed)
        return tuple(None if array is None else array.copy() for array in found)

    def restore(self, values: Any, is_given: Any, observed: Any = None) -> None:
        """Restore what `state` returned."""
        self._observed = observed
        super().restore(values, is_given)
