"""The tables in shared memory: rows of results, rows of actions, and arrays that envs publish."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

from vecenv.core.rows import ObservationRows, StepRows
from vecenv.core.spaces import leaves, short, take_row
from vecenv.workers.memory import Memory

__all__ = ["Actions", "Layout", "Tables"]


class Layout(NamedTuple):
    """What a process must know to allocate the tables and to step envs.

    Attributes:
        begin: Byte of the memory at which the tables begin.
        num_envs: Envs of the vector env.
        observation_space, action_space: Spaces of one env.
        published: Named spaces of arrays that envs publish.
        autoreset_mode, restart_envs: As in `Plan`.
        is_patient: Whether workers poll for a while before they sleep, see `patient`.
    """

    begin: int
    num_envs: int
    observation_space: Space
    action_space: Space
    published: dict[str, Space]
    autoreset_mode: AutoresetMode
    restart_envs: bool
    is_patient: bool


class Tables:
    """Views of the rows of envs first, ..., last - 1, as rows 0, 1, ... of this process.

    Attributes:
        rows: Results of a step.
        objects: Leaves of `rows.obs` without fixed shape: these are not shared.
        actions: Rows of actions; None if some part of an action has no fixed shape.
        published: Array (last - first, *shape) of every name that envs publish.
        restarts: int64 (last - first,), how often each env was replaced.
    """

    def __init__(self, memory: Memory, layout: Layout, first: int, last: int) -> None:
        # Every process allocates the rows of all envs, so that offsets agree, and keeps its part.
        def take(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            return memory.allocate((layout.num_envs, *shape[1:]), dtype)[first:last]

        memory.used_bytes = layout.begin
        count = last - first
        self.rows = StepRows.make(layout.observation_space, count, take)
        self.objects = [leaf for leaf in self.rows.obs.leaves if leaf.array is None]
        actions = ObservationRows(layout.action_space, count, take)
        is_fixed = actions.leaves and actions.is_fixed
        self.actions = Actions(layout.action_space, actions, count) if is_fixed else None
        self.published = {
            name: take((count, *(space.shape or ())), space.dtype)
            for name, space in layout.published.items()
        }
        self.restarts = take((count,), np.int64)


class Actions:
    """Rows of actions in shared memory: the caller writes checked actions, envs get copies.

    Args:
        space: Space of one action.
        rows: The rows in shared memory.
        num_envs: Number of rows.
    """

    def __init__(self, space: Space, rows: ObservationRows, num_envs: int) -> None:
        self._space, self._rows = space, rows
        self._batched = batch_space(space, num_envs) if rows.array is None else None

    def write(self, actions: Any, env_ids: np.ndarray | None = None) -> bool:
        """Write one action per env, or one per entry of `env_ids`, and return True.

        Return False and write nothing if some have another dtype: envs must get that dtype.
        """
        pairs: Any = list(zip(self._rows.leaves, leaves(actions, self._space), strict=True))
        if any(part.dtype != leaf.array.dtype for leaf, part in pairs):
            return False
        for leaf, part in pairs:
            leaf.array[slice(None) if env_ids is None else env_ids] = part
        return True

    def text(self, env_id: int) -> str:
        """Return a short text of the latest action of one env."""
        action = self.one(env_id)
        return short(action.tolist() if hasattr(action, "tolist") else action, 200)

    def all(self) -> Any:
        """Return copies of all actions, a list or array as `SyncVectorEnv` passes to its envs."""
        array = self._rows.array
        if array is not None:
            return array if array.ndim == 1 else array.copy()  # items of 1-D arrays are copies
        return list(iterate(self._batched, deepcopy(self._rows.batch())))

    def one(self, index: int) -> Any:
        """Return a copy of the action of one env."""
        array = self._rows.array
        if array is not None:
            return array[index] if array.ndim == 1 else array[index].copy()
        return deepcopy(take_row(self._space, self._rows.batch(), index))
