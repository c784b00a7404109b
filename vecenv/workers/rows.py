"""What lies in the shared memory: rows of results, actions and infos, and what envs publish.

Numbers in the infos of steps are there as most envs return the same keys each time. The caller sees
which in the first infos of a step, which come pickled as all others do, and tells the workers. From
then on an info of just these keys and types is written to the row of its env, and a flag says so;
whatever else comes is pickled as before. A simulator that returns four numbers per step costs a
fifth more without this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

from vecenv.core.autoreset import StepRows
from vecenv.core.batches import take_row
from vecenv.core.faults import shorten
from vecenv.core.rows import ObjectRows, ObservationRows, TreeRows, copy_batch
from vecenv.workers.memory import Memory

__all__ = ["Actions", "InfoKey", "InfoTable", "Layout", "Tables", "common_keys"]

_INFO_BYTES = 1024  # of one env


class Layout(NamedTuple):
    """What a process must know to allocate the tables, and to step envs.

    Attributes:
        begin: Where the tables begin in the memory.
        num_envs: Of the vector env.
        observation_space, action_space: Of one env.
        published: Named spaces of arrays that envs publish.
        autoreset_mode, restart_envs: Of the plan.
        caller_steps: Whether the caller steps envs, too.
    """

    begin: int
    num_envs: int
    observation_space: Space
    action_space: Space
    published: dict[str, Space]
    autoreset_mode: AutoresetMode
    restart_envs: bool
    caller_steps: bool


class Tables:
    """The rows of envs first, ..., last - 1 as 0, 1, ...; every process allocates the same tables.

    Attributes:
        rows: Results of a step.
        objects: Leaves of `rows.obs` without fixed shape: these are not shared.
        actions: None if some part of them has no fixed shape.
        published: Array (last - first, *shape) of every name that envs publish.
        infos, info_flags: Memory of an `InfoTable`.
        restarts: int64 (last - first,), how often each env was replaced.
    """

    def __init__(self, memory: Memory, layout: Layout, first: int, last: int) -> None:
        def take(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            return memory.allocate((layout.num_envs, *shape[1:]), dtype)[first:last]

        memory.used_bytes = layout.begin
        count = last - first
        self.rows = StepRows.make(layout.observation_space, count, take)
        leaves = [leaf for leaf, _ in _leaves(self.rows.obs)]
        self.objects = [leaf for leaf in leaves if isinstance(leaf, ObjectRows)]
        actions = ObservationRows.make(layout.action_space, count, take)
        leaves = [leaf for leaf, _ in _leaves(actions)]
        is_fixed = leaves and not any(isinstance(leaf, ObjectRows) for leaf in leaves)
        self.actions = Actions(layout.action_space, actions, count) if is_fixed else None
        self.published = {
            name: take((count, *(space.shape or ())), space.dtype)
            for name, space in layout.published.items()
        }
        self.restarts = take((count,), np.int64)
        self.infos = take((count, _INFO_BYTES), np.uint8)
        self.info_flags = take((count,), np.bool_)


def _leaves(rows: ObservationRows, batch: Any = None) -> Iterator[tuple[ObservationRows, Any]]:
    """Go through the leaves of nested rows and a batch, if given, in the order of the space."""
    if isinstance(rows, TreeRows):
        for name, child in rows.children.items():
            yield from _leaves(child, None if batch is None else batch[name])
    else:
        yield rows, batch


class Actions:
    """Rows of actions in shared memory: the caller writes checked ones, envs get copies.

    Args:
        space: Of one action.
        rows: Where they are written.
        num_envs: How many rows.
    """

    def __init__(self, space: Space, rows: ObservationRows, num_envs: int) -> None:
        self._space, self._rows = space, rows
        self._batched = batch_space(space, num_envs) if rows.array is None else None

    def write(self, actions: Any, env_ids: np.ndarray | None = None) -> bool:
        """Write one action per env, or one per entry of `env_ids`; return whether that was done.

        It is not if some have another dtype, which the envs are to get.
        """
        parts: Any = list(_leaves(self._rows, actions))
        if any(part.dtype != rows.array.dtype for rows, part in parts):
            return False
        for rows, part in parts:
            rows.array[slice(None) if env_ids is None else env_ids] = part
        return True

    def text(self, env_id: int) -> str:
        """Return a short text of the latest action of one env."""
        action = self.one(env_id)
        return shorten(str(action.tolist() if hasattr(action, "tolist") else action))

    def all(self) -> Any:
        """Return copies of the actions of all envs, as `SyncVectorEnv` has them: list or array."""
        array = self._rows.array
        if array is not None:
            return array if array.ndim == 1 else array.copy()  # its items are copies anyway
        return list(iterate(self._batched, copy_batch(self._rows.batch())))

    def one(self, index: int) -> Any:
        """Return a copy of the action of one env."""
        array = self._rows.array
        if array is not None:
            return array[index] if array.ndim == 1 else array[index].copy()
        return copy_batch(take_row(self._space, self._rows.batch(), index))


class InfoKey(NamedTuple):
    """What infos have under a key: its class, for numbers that of Python or NumPy."""

    key: str
    kind: type
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes in a row."""
        return -(-math.prod(self.shape) * np.dtype(self.dtype).itemsize // 8) * 8


def common_keys(infos: Sequence[Any]) -> list[InfoKey]:
    """Return the keys that all of these infos have, in order; none if they differ or don't fit."""
    found = _keys_of(infos[0])
    is_common = all(_keys_of(info) == found for info in infos[1:])
    return found if is_common and sum(key.size_bytes for key in found) <= _INFO_BYTES else []


def _keys_of(info: Any) -> list[InfoKey]:
    """Return what an info has; none if something is no number or array of numbers."""
    found: list[InfoKey] = []
    for key, value in info.items() if info.__class__ is dict else ():
        kind = value.__class__
        if kind not in (int, float, bool, np.ndarray) and not issubclass(kind, np.number):
            return []
        dtype, shape = (value.dtype, value.shape) if kind is np.ndarray else (np.dtype(kind), ())
        is_name = key.__class__ is str and key != "final_obs" and f"_{key}" not in info
        if not is_name or dtype.kind not in "biufc":
            return []
        found.append(InfoKey(key, kind, dtype.str, shape))
    return found


class InfoTable:
    """The infos' numbers of some envs, a row each.

    Args:
        keys: What an info has, see `common_keys`.
        memory: uint8 (envs, 1024), shared.
        flags: bool (envs,), shared: whether a row has the info of the env's latest step.
    """

    def __init__(self, keys: Sequence[InfoKey], memory: np.ndarray, flags: np.ndarray) -> None:
        self.flags = flags
        self._columns: list[tuple[str, type, np.ndarray]] = []
        begin = 0
        for entry in keys:
            strides = memory.strides[0], *np.zeros(entry.shape, entry.dtype).strides
            shape = len(memory), *entry.shape
            column = np.ndarray(shape, entry.dtype, memory, begin, strides)
            self._columns.append((entry.key, entry.kind, column))
            begin += entry.size_bytes

    def put(self, info: Any, index: int) -> bool:
        """Write the info of a step to a row, if it has these keys and nothing has been written."""
        if info.__class__ is not dict or len(info) != len(self._columns) or self.flags[index]:
            return False
        for (key, kind, column), (name, value) in zip(self._columns, info.items(), strict=True):
            if name != key or value.__class__ is not kind:
                return False
            if kind is np.ndarray and (value.dtype, value.shape) != (
                column.dtype,
                column.shape[1:],
            ):
                return False
            try:
                column[index] = value
            except OverflowError:  # an integer of more than 64 bits
                return False
        self.flags[index] = True
        return True

    def row(self, index: int) -> dict[str, Any]:
        """Return an info as its env has returned it; empty if it is not here."""
        row = {}
        for key, kind, column in self._columns if self.flags[index] else ():
            row[key] = column[index].copy() if kind is np.ndarray else kind(column[index])
        return row

    def batch(self, rows: slice | np.ndarray) -> dict[str, Any]:
        """Return the infos of some rows, as `add_info` would batch them."""
        flags = self.flags[rows].copy()
        infos, is_whole = dict[str, Any](), flags.all()
        for key, _, column in self._columns if flags.any() else ():
            values = infos[key] = column[rows].copy()
            if not is_whole:
                values[~flags] = 0
            infos[f"_{key}"] = flags.copy()
        return infos
