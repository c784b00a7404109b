"""What the replay buffers have in common: adding, gathering, memory and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from gymnasium import Space
from numba.core.errors import NumbaError

from buffers.core.arguments import (
    MAX_COUNT,
    as_array,
    check_count,
    read_distinct_ids,
    read_number,
    resolve_device,
)
from buffers.core.copies import Rebuilt
from buffers.core.errors import BufferMemoryError, BufferMisuseError
from buffers.core.guard import Guard, exclusive
from buffers.core.memory import allocation
from buffers.core.rows import RecordLayout, field_view, plan_records
from buffers.replay import indexing as at
from buffers.replay.batches import BatchPlanner, ReplayBatch
from buffers.replay.indexing import mark_cut
from buffers.replay.input import read_columns, read_row_ids
from buffers.replay.readers import CompiledReader
from buffers.replay.state import ReplayState
from buffers.replay.storage import ReplayStorage, check_room, storage_bytes
from buffers.replay.torch_reader import TorchReader

__all__ = ["ReplayBuffer", "ReplayOptions", "RowOptions", "plan_replay"]

_MAX_ROWS = 2**31 - 2  # links between rows are 32-bit, with a sign, like env ids


class ReplayOptions(NamedTuple):
    """Checked arguments of a constructor, and what follows from them."""

    layout: RecordLayout
    action_space: Space
    capacity: int  # rows of each ring
    num_rings: int
    num_envs: int  # 0 if no track of them is kept
    num_steps: int
    gamma: float | None

    def nbytes(self, capacity: int) -> int:
        """Bytes a buffer with these options and another capacity takes."""
        return storage_bytes(self.layout, capacity, self.num_rings, self.num_envs)


class RowOptions(TypedDict, total=False):
    """Arguments of replay buffers on which the bytes of a row depend."""

    n_step: int
    gamma: float | None
    store_next: bool
    track_env: bool
    extra_columns: Mapping[str, Space] | None


def plan_replay(
    capacity: int,
    observation_space: Space,
    action_space: Space,
    *,
    num_envs: int | None,
    is_per_env: bool = False,
    n_step: int = 1,
    gamma: float | None = None,
    store_next: bool = True,
    track_env: bool = False,
    extra_columns: Mapping[str, Space] | None = None,
) -> ReplayOptions:
    """Check the arguments of a replay buffer.

    Raises:
        BufferMisuseError: One of them is wrong, or two do not go together.
    """
    capacity, n_step = check_count("capacity", capacity), check_count("n_step", n_step, _MAX_ROWS)
    if gamma is not None:
        gamma = read_number("gamma", gamma)
    if n_step > 1 and gamma is None:
        raise BufferMisuseError(f"n_step={n_step} needs gamma, the discount per step")
    needs_envs = n_step > 1 or not store_next or track_env
    if needs_envs and num_envs is None:
        raise BufferMisuseError(
            "n_step > 1, store_next=False and track_env=True need num_envs, to tell which rows "
            "follow one another; with a single environment give num_envs=1"
        )
    is_untracked = num_envs is None and not is_per_env
    number = 0 if is_untracked else check_count("num_envs", num_envs, _MAX_ROWS)
    num_rings = number if is_per_env else 1
    if capacity * num_rings > _MAX_ROWS:
        raise BufferMisuseError(
            f"capacity {capacity} makes {capacity * num_rings} rows, expected at most {_MAX_ROWS}"
        )
    layout = plan_records(
        observation_space,
        action_space,
        extra_columns,
        store_next=store_next,
        is_linked=n_step > 1 or not store_next,
        has_env_ids=track_env or not store_next,
    )
    return ReplayOptions(layout, action_space, capacity, num_rings, number, n_step, gamma)


class ReplayBuffer(Rebuilt):
    """Transitions in packed rows; see the classes that say how rows are used again and drawn."""

    def __init__(
        self,
        options: ReplayOptions,
        *,
        device: torch.device | str,
        seed: int | None,
        staged: bool,
        has_weights: bool = False,
    ):
        layout = options.layout
        self.observation_space, self.action_space = layout.observation_space, options.action_space
        self.capacity, self.device = options.capacity, resolve_device(device)
        self.num_envs = options.num_envs or None
        self.n_step, self.gamma = options.num_steps, options.gamma
        self._guard = Guard()
        kind, is_staged = type(self).__name__, staged or self.device.type != "cpu"
        check_room(kind, options.capacity, self._bytes_for(options), self.device)
        # The tensors outlive the mode they were made in.
        with self._allocation(options), torch.inference_mode(False):
            self._storage = ReplayStorage(
                layout,
                options.capacity,
                options.num_rings,
                options.num_envs,
                self.device,
                staged=is_staged,
            )
        self._reader = self._make_reader(is_staged, seed, has_weights)
        settings = {"n_step": self.n_step, "gamma": self.gamma, **self._own_settings()}
        self._saved = ReplayState(
            kind, self._storage, self._reader, self._own_arrays, self._check_own_arrays, settings
        )
        self._state, self._table = self._storage.state, self._storage.table
        self._add_rows, self._no_ids = self._storage.add_rows, np.zeros(0, np.int64)
        self._busy = self._guard.flag

    def _allocation(self, options: ReplayOptions) -> AbstractContextManager[None]:
        """Around what allocates memory in the constructor."""
        kind, needed = type(self).__name__, self._bytes_for(options)(options.capacity)
        advice = "use a smaller capacity"
        return allocation(kind, needed, self.device, advice, is_checked=True)

    @staticmethod
    def _bytes_for(options: ReplayOptions) -> Any:
        """Bytes by capacity."""
        return options.nbytes

    def _make_reader(self, is_staged: bool, seed: int | None, has_weights: bool) -> Any:
        if is_staged:
            return TorchReader(
                self._storage,
                num_steps=min(self.n_step, self.capacity),
                gamma=self.gamma,
                has_weights=has_weights,
                seed=seed,
            )
        planner = BatchPlanner(
            self._storage.layout,
            num_steps=min(self.n_step, self.capacity),  # no window is longer
            has_discounts=self.gamma is not None,
            has_weights=has_weights,
        )
        gamma = 1.0 if self.gamma is None else self.gamma
        return CompiledReader(self._storage, planner, gamma, seed, self._guard)

    def __len__(self) -> int:
        """Number of transitions held."""
        return int(self._state[at.COUNT])

    @property
    def num_added(self) -> int:
        """Number of transitions ever added."""
        return int(self._state[at.ADDED])

    @property
    def generator(self) -> torch.Generator | None:
        """The generator on the device, to register with a CUDA graph; None on the CPU."""
        return getattr(self._reader.generator, "torch", None)

    def memory(self) -> dict[str, int]:
        """Bytes held now, by what they are for, host and device together; batches not included."""
        return self._storage.memory()

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(self.memory().values())

    def add(
        self,
        *,
        obs: Any = None,
        next_obs: Any = None,
        actions: Any = None,
        rewards: Any = None,
        terminations: Any = None,
        truncations: Any = None,
        env_ids: Any = None,
        **extras: Any,
    ) -> None:
        """Add K transitions, any number of them; all are copied.

        The quickest are C-contiguous NumPy arrays of the dtypes of the spaces.

        Args:
            obs: (K, *obs_shape), nested like the space.
            next_obs: The same: the true observation after the step, also where the episode ended
                (not that of a reset).
            actions: (K, *action_shape).
            rewards: float (K,), finite; stored as float32.
            terminations: bool (K,).
            truncations: bool (K,).
            env_ids: int (K,), where each row comes from. None if the rows are whole steps of all
                environments in order, or the buffer keeps no track of them.
            extras: The extra columns, (K, ...).

        Raises:
            BufferMisuseError: A column is missing, unknown, of the wrong shape or dtype, or has a
                reward that is not finite, or an env id is out of range. Nothing was changed.
            BufferMemoryError: More memory is needed, and missing. Nothing was changed.
            BufferMisuseError: More final observations than there is room for, which a CUDA graph
                reads; see `reserve_final_obs`. Nothing was changed.
        """
        if self._add_rows is not None and not extras:
            try:
                if self._add_rows(
                    self._table,
                    self._state,
                    self._busy,
                    self._no_ids if env_ids is None else env_ids,
                    obs,
                    next_obs,
                    actions,
                    rewards,
                    terminations,
                    truncations,
                ):
                    return
            except (TypeError, NumbaError):  # other types than those it was compiled for
                pass
        columns = {
            "obs": obs,
            "next_obs": next_obs,
            "actions": actions,
            "rewards": rewards,
            "terminations": terminations,
            "truncations": truncations,
        }
        given = {name: column for name, column in columns.items() if column is not None}
        self._add_checked({**given, **extras}, env_ids)

    def _add_checked(self, columns: Mapping[str, Any], env_ids: Any) -> None:
        arrays = read_columns(columns, self._storage.layout, self.device)
        num_envs = self.num_envs or 0
        ids = read_row_ids(env_ids, len(arrays["rewards"]), num_envs, self.device)
        self._write(arrays, ids if num_envs else self._no_ids)

    @exclusive
    def _write(self, arrays: Mapping[str, np.ndarray], ids: np.ndarray) -> None:
        self._storage.write(arrays, ids)

    def cut_episodes(self, env_ids: Any = None) -> None:
        """Say that environments were reset, or left, before their episodes ended.

        What is added for them next follows on nothing. Not needed after a row with a flag set, nor
        in a buffer that keeps no track of environments.

        Args:
            env_ids: int (K,), distinct, or a mask bool (N,); None for all.

        Raises:
            BufferMisuseError: An id is out of range or repeated; nothing was changed.
        """
        if self.num_envs is None:
            return
        ids = np.arange(self.num_envs) if env_ids is None else env_ids
        self._mark_cut(read_distinct_ids(ids, self.num_envs, self.device))

    @exclusive
    def _mark_cut(self, ids: np.ndarray) -> None:
        mark_cut(self._state, ids)

    @exclusive
    def reserve_final_obs(self, number: int) -> None:
        """Make room for the observations episodes end with, where `store_next` is False.

        Needed before `sample` is captured in a CUDA graph: the memory does not move afterwards, and
        an `add` that needs more of it is refused. As many as the buffer has rows, and those of one
        add, are always enough. A graph captured before must be captured again.

        Args:
            number: Observations there is to be room for; nothing is done if there is.

        Raises:
            BufferMemoryError: They would not fit into free memory; nothing was changed.
        """
        kept, number = self._storage.successors, check_count("number", number, MAX_COUNT)
        if kept is not None and number > len(kept.finals):
            before, kept.is_captured = kept.is_captured, False
            try:
                kept.resize(number)
            except BufferMemoryError:
                kept.is_captured = before
                raise

    def new_batch(self, batch_size: int) -> ReplayBatch:
        """Memory for `sample(batch_size, out=...)`, not initialised."""
        return self._reader.new(check_count("batch_size", batch_size, MAX_COUNT))

    def _batch(self, batch_size: int, out: ReplayBatch | None) -> ReplayBatch:
        """The batch to fill.

        Raises:
            BufferMisuseError: The buffer is empty, or an argument does not fit.
        """
        if not self._state[at.COUNT]:
            raise BufferMisuseError("the buffer is empty; add transitions before sampling")
        if type(batch_size) is not int or not 1 <= batch_size <= MAX_COUNT:
            batch_size = check_count("batch_size", batch_size, MAX_COUNT)
        return self._reader.new(batch_size) if out is None else self._reader.check(out, batch_size)

    @exclusive
    def _fill(self, batch: ReplayBatch, draw: str) -> None:
        """Draw rows and gather them, where the reader cannot do it at once."""
        if draw == "distinct":
            self._check_distinct(batch.size)
        self._reader.fill(batch, draw)

    @exclusive
    def _gather(self, batch: ReplayBatch) -> None:
        self._reader.gather(batch)

    def _check_distinct(self, batch_size: int) -> None:
        if batch_size > len(self):
            raise BufferMisuseError(
                f"batch_size is {batch_size} without replacement, but the buffer holds "
                f"{len(self)} transitions; add more or draw fewer"
            )

    def rows(self) -> dict[str, Any]:
        """Views of all rows by column: (num_rows, ...) tensors of the one allocation, not copies.

        Rows that hold nothing yet are zero. `order` tells which hold transitions.
        """
        layout = self._storage.layout
        views = {path: field_view(self._storage.rows, f) for path, f in layout.fields.items()}
        found = {"obs": layout.build_obs([views[path] for path in layout.obs])}
        if layout.next_obs:
            found["next_obs"] = layout.build_obs([views[path] for path in layout.next_obs])
        others = set(views) - {*layout.obs, *layout.next_obs, "link"}
        return {**found, **{name: views[name] for name in views if name in others}}

    @exclusive
    def order(self) -> torch.Tensor:
        """int64 (len,) on the CPU: the rows that hold transitions, oldest first in each ring."""
        return self._storage.oldest_first()

    def get(self, indices: Any) -> ReplayBatch:
        """The transitions in given rows, as `sample` would return them; all weights are 1.

        Args:
            indices: int (B,), rows that hold transitions.

        Raises:
            BufferMisuseError: A row is out of range or holds nothing.
        """
        given = as_array("indices", indices, self.device)
        fits = given.ndim == 1 and len(given) > 0 and given.dtype.kind in "iu"
        rows = np.array(given, np.int64) if fits else np.zeros(0, np.int64)  # nobody else's
        batch = self._get(rows) if fits else None
        if batch is None:
            raise BufferMisuseError(
                f"indices is {given}, expected rows that hold transitions, (B,); see order()"
            )
        return batch

    @exclusive
    def _get(self, rows: np.ndarray) -> ReplayBatch | None:
        """The transitions in rows int64 (B,), or None if one is out of range or holds nothing."""
        state, capacity = self._state, int(self._state[at.CAPACITY])
        if rows.min() < 0 or rows.max() >= len(self._storage.rows):
            return None
        if (rows % capacity >= state[state[at.TOTALS] + rows // capacity]).any():
            return None
        batch = self._reader.new(len(rows))
        batch.indices.copy_(torch.from_numpy(rows))
        if batch.weights is not None:
            batch.weights.fill_(1.0)
        self._reader.gather(batch)
        return batch

    def _own_settings(self) -> dict[str, Any]:
        """Further settings that a state must share with the buffer it is loaded into."""
        return {}

    def _own_arrays(self) -> dict[str, np.ndarray]:
        """Further arrays of a checkpoint."""
        return {}

    def _check_own_arrays(self, arrays: Mapping[str, np.ndarray], num_rows: int) -> None:
        """Raise BufferMisuseError if those of a state of so many transitions do not fit."""

    def _take_own_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore them."""

    def _forget_own_arrays(self) -> None:
        """Begin anew with them: the buffer is empty."""

    def _copied_state(self) -> dict[str, Any]:
        return self._saved.copied_state()

    def _take_copied_state(self, state: dict[str, Any]) -> None:
        self._take_own_arrays(self._saved.take_copied_state(state))

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """Transitions and generator, as copies: tensors, numbers, strings, lists, dicts."""
        return self._saved.state_dict()

    @exclusive
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the buffer stood that `state_dict` was called on.

        Raises:
            BufferMisuseError: The state is of another kind of buffer, version or device, or of one
                with other spaces, sizes, `n_step`, `gamma` or options, which are listed, or it
                contradicts itself; nothing was changed.
        """
        self._take_own_arrays(self._saved.load_state_dict(state))

    @exclusive
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write transitions and generator into a file, all or nothing.

        Raises:
            OSError: The disk is full or the folder is not there; a file that was there stays.
        """
        self._saved.save(path)

    @exclusive
    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue where the buffer stood that `save` was called on.

        Nothing in a file is believed: what contradicts itself is refused, so that no file can make
        the buffer read or write other memory. Others must not write to it meanwhile.

        Raises:
            BufferMisuseError: The file is damaged, cut off, or does not fit this buffer, as in
                `load_state_dict`; nothing was changed.
            BufferMemoryError: It has more final observations than there is memory for; nothing was
                changed.
            OSError: It cannot be opened, or reading fails at last: then the buffer is empty.
        """
        before = len(self)
        try:
            arrays = self._saved.load(path)
        except BaseException:
            if before and not len(self):
                self._forget_own_arrays()
            raise
        self._take_own_arrays(arrays)
