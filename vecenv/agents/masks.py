"""Action masks of a group of agents: one row per agent, from whoever gives them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import Space

from vecenv.agents.grouping import Members
from vecenv.core.errors import ActionMaskError, NoActionMaskError
from vecenv.core.masks import (
    MASK_KEY,
    allow_something,
    can_be_masked,
    flat_mask,
    has_mask_part,
    mask_starts,
    mask_width,
)

__all__ = ["GroupMasks"]


class GroupMasks:
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
        self._members = members
        self._num_rows = num_games * len(members.agents)
        self._space: Space = members.action_space
        self._is_observed = can_be_masked(self._space) and has_mask_part(
            members.observation_space, self.width
        )
        self._observed: np.ndarray | None = None  # (num_rows, ...): the latest observations' part
        self._given: np.ndarray | None = None  # int8 (num_rows, width), from infos
        self._is_given = np.zeros(self._num_rows, np.bool_)

    @cached_property
    def width(self) -> int:
        """Length of a mask."""
        return mask_width(self._space)

    @cached_property
    def _starts(self) -> np.ndarray:
        return mask_starts(self._space)

    @property
    def is_there(self) -> bool:
        """Whether there are masks; those in infos are known by the first reset."""
        has_source = self._is_observed or self._given is not None or self.source is not None
        return can_be_masked(self._space) and (has_source or self._members.allowed is not None)

    def note(self, obs: Any, infos: dict[str, Any], rows: Any, alive: np.ndarray) -> None:
        """Take over the masks of a batch of results.

        Args:
            obs: Observations of the batch. They are referred to if `rows` is a slice of all.
            infos: Infos of the batch's rows.
            rows: Which rows these are: int64 (B,), or the slice of all.
            alive: bool (num_rows,), who acts next.

        Raises:
            ActionMaskError: A mask in the infos does not fit the action space; names game and
                agent.
        """
        if self._is_observed:
            part = obs[MASK_KEY].reshape(-1, self.width)
            if isinstance(rows, slice):
                self._observed = part
            else:
                before = self._observed
                latest = np.zeros((self._num_rows, self.width), part.dtype)
                self._observed = latest if before is None else before.copy()
                self._observed[rows] = part
        elif (found := infos.get(MASK_KEY)) is not None and can_be_masked(self._space):
            self._note_given(found, infos[f"_{MASK_KEY}"], np.arange(self._num_rows)[rows], alive)
        elif self._given is not None:
            self._is_given[rows] = False

    def _note_given(
        self, found: np.ndarray, is_given: np.ndarray, ids: np.ndarray, alive: np.ndarray
    ) -> None:
        if self._given is None:
            self._given = np.ones((self._num_rows, self.width), np.int8)
        self._is_given[ids] = is_given
        is_flat = found.dtype.kind in "bi" and found.shape[1:] == (self.width,)
        if is_flat and (found.dtype == np.bool_ or not (found & ~1).any()):
            self._given[ids[is_given]] = found[is_given]
            return
        for row, mask in zip(ids[is_given].tolist(), found[is_given], strict=True):
            try:
                self._given[row] = flat_mask(mask, self.width, self._space)
            except ActionMaskError as error:
                if alive[row]:
                    raise ActionMaskError(f"{self._name(row)}: {error}") from None

    def read(self, alive: np.ndarray, rows: Any) -> np.ndarray:
        """Return the masks of rows, int8 (B, width), the caller's; all 1 for agents not alive.

        Raises:
            NoActionMaskError: There are none.
            ActionMaskError: A mask is missing, has something else than 0 and 1, or allows nothing;
                names game and agent.
        """
        if not self.is_there:
            width = mask_width(self._space)  # raises where there are none for such actions
            raise NoActionMaskError(
                "the agents give no action masks; games that have them return them in the infos of "
                "each agent, as info['action_mask'], or have a part 'action_mask' in its Dict "
                f"observations; each mask is an array of {width} times 0 or 1"
            )
        ids = np.arange(self._num_rows)[rows]
        alive = alive[ids]
        bits = np.ones((len(ids), self.width), np.bool_)
        if self.source is not None:
            bits = self.source(ids).astype(np.bool_)
        elif self._is_observed and self._observed is not None:
            values = self._observed[ids]
            bits = values.astype(np.bool_)
            wrong = ((bits != values) & alive[:, None]).any(axis=1)
            if wrong.any():
                row = ids[wrong][0]
                raise ActionMaskError(
                    f"{self._name(row)}: the action mask is {values[wrong][0]}, expected 0 (not "
                    "allowed) and 1 (allowed)"
                )
        elif self._given is not None:
            if (missing := alive & ~self._is_given[ids]).any():
                raise ActionMaskError(
                    f"{self._name(ids[missing][0])} gave no infos['action_mask'] with its latest "
                    "results, as it or others did before; return one from every reset and step"
                )
            bits = self._given[ids].astype(np.bool_)
        if self._members.allowed is not None:
            bits &= self._members.allowed[ids % len(self._members.agents)]
        if (empty := alive & ~allow_something(bits, self._starts)).any():
            raise ActionMaskError(
                f"{self._name(ids[empty][0])}: the action mask allows no action, though the agent "
                "is alive; end its episode, or allow an action that does nothing"
            )
        bits[~alive] = True
        return bits.view(np.int8)

    def state(self) -> tuple[Any, ...]:
        """Return copies of what `restore` takes."""
        arrays = (self._observed, self._given, self._is_given)
        return tuple(None if array is None else array.copy() for array in arrays)

    def restore(self, observed: Any, given: Any, is_given: np.ndarray) -> None:
        """Go on from what `state` returned."""
        self._observed, self._given, self._is_given = observed, given, is_given.copy()

    def _name(self, row: Any) -> str:
        game, k = divmod(int(row), len(self._members.agents))
        return f"game {game}, agent {self._members.agents[k]!r}"
