"""Action masks of a group of agents: one row per agent, from whoever gives them."""

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

    They are the part "action_mask" of Dict observations, or `infos["action_mask"]`; of padded
    actions those that an agent does not have are forbidden besides.

    Args:
        members: The group.
        num_games: Number of games.

    Attributes:
        source: Function that returns the masks of rows int64 (B,), bool or int8 (B, width), of
            games that compute them when they are asked for; None for games that give them along.
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
        self._observed: np.ndarray | None = None  # (num_rows, width): the latest observations' part

    def name(self, row: int) -> str:
        """Return how errors call a row."""
        game, k = divmod(int(row), len(self._members.agents))
        return f"game {game}, agent {self._members.agents[k]!r}"

    @property
    def is_there(self) -> bool:
        """Whether there are masks; those in infos are known by the first reset."""
        has_source = self._is_observed or self.values is not None or self.source is not None
        return self._can_be_masked and (has_source or self._members.allowed is not None)

    def note_rows(self, obs: Any, infos: dict[str, Any], rows: Any, alive: np.ndarray) -> None:
        """Take over the masks of a batch of results.

        Args:
            obs: Observations of the batch. They are referred to if `rows` is a slice of all.
            infos: Infos of the batch's rows.
            rows: Which rows these are: int64 (B,), or the slice of all.
            alive: bool (num_rows,), who acts next.
        """
        if not self._is_observed:
            if self._can_be_masked and (self.is_used or MASK_KEY in infos):
                self.note(infos, ~alive[rows], rows)
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
        """Return the masks of rows, int8 (B, width), the caller's; all 1 for agents not alive.

        Raises:
            NoActionMaskError: There are none.
            ActionMaskError: A mask is missing, has something else than 0 and 1, or allows nothing;
                names game and agent.
        """
        if not self.is_there:
            width = mask_width(self._members.action_space)  # raises where there are none
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
        self.is_over[:] = ~alive
        masks = self.checked(values, ids, is_given, allowed)
        masks[~alive[ids]] = 1
        return masks

    def state(self) -> tuple[Any, ...]:
        """Return copies of what `restore` takes."""
        is_used, *arrays = super().state()
        found = (*arrays, self._observed)
        return is_used, *(None if array is None else array.copy() for array in found)

    def restore(
        self, is_used: bool, values: Any, is_given: Any, is_over: Any, observed: Any = None
    ) -> None:
        """Go on from what `state` returned."""
        self._observed = observed
        super().restore(is_used, values, is_given, is_over)
