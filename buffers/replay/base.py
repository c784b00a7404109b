"""What the replay buffers have in common: adding, gathering, memory, states."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import (
    MAX_COUNT,
    as_array,
    check_count,
    read_columns,
    read_distinct_ids,
    read_row_ids,
    read_transitions,
    resolve_device,
    tree_leaves,
)
from buffers.core.columns import torch_dtype
from buffers.core.drawn import DrawnBuffer
from buffers.core.errors import BufferMemoryError, BufferMisuseError
from buffers.core.guard import Guard, exclusive
from buffers.core.memory import allocation, check_room
from buffers.core.rows import RowLayout, plan_view, view_fields
from buffers.core.sequences import (
    SequenceBatch,
    SequenceOptions,
    memory_of,
    read_sequences,
    read_states,
    zero_padding,
)
from buffers.core.state import FieldWatcher, LoadedState, Placed, Shapes, Wanted
from buffers.replay import layout as at
from buffers.replay.adding import PackedAdder
from buffers.replay.batches import BatchOptions, BatchSource, Draw, ReplayBatch, column_names
from buffers.replay.compiled_reader import CompiledReader
from buffers.replay.folder import Place, RowFolder, plan_place
from buffers.replay.frames import FrameStack
from buffers.replay.layout import ReplayOptions, RowOptions, new_state, plan_replay
from buffers.replay.sequences import SequenceIndex, SequenceMemory, sequence_bytes
from buffers.replay.state import (
    amended_integers,
    check_meta,
    checked_integers,
    describe,
    describe_rows,
    watch_fields,
)
from buffers.replay.storage import ReplayStorage, add_arrays
from buffers.replay.torch_reader import TorchReader

__all__ = ["ReplayBuffer"]

_KEPT = ("pending", "free", "slots")  # of observations stored once, besides the final ones


class ReplayBuffer(DrawnBuffer, BatchSource):
    """Transitions in packed rows; see the classes that say how rows are used again and drawn.

    The arguments are those of `SharedReplayBuffer`.
    """

    _draws_by = ("sample", "sample_sequences")
    _is_per_env = False  # a ring for each environment
    _has_weights = False  # batches have weights

    def __init__(
        self,
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        num_envs: int | None,
        n_step: int,
        gamma: float | None,
        store_next: bool,
        frame_stack: int | FrameStack | None,
        track_env: bool,
        track_episodes: bool,
        extra_columns: Mapping[str, Space] | None,
        device: torch.device | str,
        seed: int | None,
        staged: bool,
        storage: str,
        folder: str | os.PathLike[str] | None,
        read_only: bool,
    ):
        spaces = observation_space, action_space
        rows: RowOptions = {
            "n_step": n_step, "gamma": gamma, "store_next": store_next, "frame_stack": frame_stack,
            "track_env": track_env, "track_episodes": track_episodes,
            "extra_columns": extra_columns,
        }  # fmt: skip
        options = plan_replay(
            capacity, *spaces, num_envs=num_envs, is_per_env=self._is_per_env, **rows
        )
        self.observation_space, self.action_space = spaces
        self.capacity, self.device = options.capacity, resolve_device(device)
        self.num_envs = options.num_envs or None
        self.n_step, self.gamma = options.num_steps, options.gamma
        self._guard = Guard(self.device)
        self._kind, is_staged = type(self).__name__, staged or self.device.type != "cpu"
        where = plan_place(storage, folder, read_only, self.device, staged=staged)
        if where is None:
            check_room(self._kind, options.capacity, self._bytes_for(options), self.device)
        else:
            _check_files_can_hold(options)
        # Whether others may have written: another process, or a graph.
        self._has_news, self._sequences = False, None
        # The tensors outlive the mode they were made in.
        with self._allocation(options), torch.inference_mode(False):
            self._storage = ReplayStorage(
                options,
                self.device,
                staged=is_staged,
                busy=self._guard.flag,
                open_folder=None if where is None else partial(self._open_folder, where, options),
            )
            self._make_priorities(is_staged)
        if options.has_sequences:
            self._sequences = SequenceIndex(self._storage, options.capacity * options.num_rings)
        self._sequence_readers: dict[tuple[str, ...], Any] = {}
        self._large = ("rows",)
        if self._storage.successors is not None:
            self._large = ("finals", "rows")
        elif self._storage.frames is not None:
            self._large = ("frames", "rows")
        self._folder = self._storage.folder
        self._reader = self._make_reader(is_staged, seed)
        if self._folder is not None:
            self._large = ()
            self._reader.go_on_with(self._folder)
        self._state, self._table = self._storage.state, self._storage.table
        self._takes_arrays, self._no_ids = self._storage.takes_arrays, np.zeros(0, np.int64)
        self._column_names = column_names(self._storage.layout, has_weights=self._has_weights)
        self._adder = PackedAdder.of(self._storage)
        # On the CPU values are looked at, which costs little there.
        self._takes_tensors = self.device.type != "cpu" and self._storage.takes_tensors
        self._takes_tensors &= self._sequences is None
        self._where = self._storage.addresses.words
        maker, own = self._made_anew()
        self._remember(
            maker, capacity, *spaces, **own,
            num_envs=num_envs, device=self.device, staged=staged, **rows,
        )  # fmt: skip

    def _made_anew(self) -> tuple[type[ReplayBuffer], Mapping[str, Any]]:
        """The class of ours whose constructor copies call, and what it alone takes."""
        raise NotImplementedError

    def _open_folder(self, place: Place, options: ReplayOptions, state: np.ndarray) -> RowFolder:
        layout, self._has_news = options.layout, place.read_only
        settings = {"n_step": self.n_step, "gamma": self.gamma, **self._own_settings()}
        own = describe_rows(self._kind, layout, state, settings)
        empty = state.copy()

        def check(meta: Mapping[str, Any]) -> None:
            is_prioritized = meta.get("kind") == "PrioritizedReplayBuffer"
            if place.read_only and is_prioritized and self._kind == "SharedReplayBuffer":
                meta = {**meta, "kind": self._kind}  # drawn alike by a reader
            check_meta(meta, own)

        return RowFolder(
            place, own, state, layout.stride, self._num_sums(options.capacity),
            check=check, amend=partial(amended_integers, layout, empty),
        )  # fmt: skip

    def _num_sums(self, capacity: int) -> int:
        """Nodes of a tree of priorities."""
        return 0

    @classmethod
    def nbytes_for(
        cls,
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        num_envs: int | None = None,
        **options: Unpack[RowOptions],
    ) -> int:
        """Bytes the constructor would allocate with these arguments; allocates nothing.

        >>> from buffers import SharedReplayBuffer
        >>> from gymnasium.spaces import Box, Discrete
        >>> SharedReplayBuffer.nbytes_for(500_000, Box(-1, 1, (52,)), Discrete(7))
        224000240
        """
        spaces = observation_space, action_space
        plan = plan_replay(
            capacity, *spaces, num_envs=num_envs, is_per_env=cls._is_per_env, **options
        )
        return cls._bytes_for(plan)(plan.capacity)

    @classmethod
    def _bytes_for(cls, options: ReplayOptions) -> Callable[[int], int]:
        """Bytes by capacity."""
        if not options.has_sequences:
            return options.nbytes
        rings, envs = options.num_rings, options.num_envs
        return lambda capacity: (
            options.nbytes(capacity) + sequence_bytes(capacity * rings, rings, envs)
        )

    def _allocation(self, options: ReplayOptions) -> AbstractContextManager[None]:
        """Around what allocates memory in the constructor."""
        needed = self._bytes_for(options)(options.capacity)
        return allocation(
            self._kind, needed, self.device, "use a smaller capacity", is_checked=True
        )

    def _make_priorities(self, is_staged: bool) -> None:
        """Allocate what the class has besides rows."""

    def _make_reader(self, is_staged: bool, seed: int | None) -> Any:
        num_steps = min(self.n_step, self.capacity)  # no window is longer
        batches = BatchOptions(num_steps, self.gamma, self._has_weights)
        return (TorchReader if is_staged else CompiledReader)(self._storage, batches, seed)

    @property
    def _generator(self) -> Any:
        return self._reader.generator

    def __len__(self) -> int:
        """Number of transitions held."""
        self._refresh()
        return int(self._state[at.COUNT])

    @property
    def num_added(self) -> int:
        """Number of transitions ever added."""
        self._refresh()
        return int(self._state[at.ADDED])

    def _refresh(self) -> None:
        """Know of what others have written since: to a folder, or a graph in which `add` is."""
        if self._has_news:
            self._take_news()

    @exclusive
    def _take_news(self) -> None:
        self._refresh_now()

    def _refresh_now(self) -> None:
        """The same in a call that is exclusive; raise if the folder was closed."""
        if self._folder is not None:
            self._folder.check_usable()
            if self._folder.read_only:
                self._folder.refresh(self._state)
        ring = self._storage.ring
        if ring is not None and ring.is_captured and not self._storage.is_capturing():
            ring.read_state()

    @exclusive
    def flush(self) -> None:
        """With storage="memmap", wait until all is on the disk, where a power loss leaves it.

        Raises:
            OSError: The disk fails; call again, or make room.
        """
        if self._folder is not None:
            self._folder.flush(self._state)

    @exclusive
    def close(self) -> None:
        """With storage="memmap", flush, and let another buffer write to the folder.

        Later calls are refused. Twice does no harm, and a buffer in memory needs no closing.
        """
        if self._folder is not None:
            self._folder.close(self._state)

    def memory(self) -> dict[str, int]:
        """Bytes held now, by what they are for, host and device together; batches not included."""
        sizes = self._storage.memory()
        return sizes if self._sequences is None else {**sizes, "sequences": self._sequences.nbytes}

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
        valid: Any = None,
        **extras: Any,
    ) -> None:
        """Add K transitions, any number of them; all are copied.

        The quickest are C-contiguous NumPy arrays of the dtypes of the spaces. In a buffer on a
        GPU also tensors there, of these dtypes, with float32 rewards and bool flags: they are
        copied on the device, nothing waits, and their values are not looked at. If rows follow one
        another (n_step > 1, store_next=False) or say whose they are, they have to be a whole step
        of all environments, without env_ids. Such an add, other than the first, can be captured in
        a CUDA graph; the buffer then asks the device where it has to know how many rows it holds.

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
            valid: bool (K,), the rows to store, as of agents that acted; None for all. In a row
                that is left out its environment has no episode: what was open is cut, as by
                `cut_episodes`, and its next row begins another.
            extras: The extra columns, (K, ...).

        Raises:
            BufferMisuseError: A column is missing, unknown, of the wrong shape or dtype, or has a
                reward that is not finite, or an env id is out of range. Nothing was changed.
            BufferMemoryError: More memory is needed, and missing. Nothing was changed.
            BufferMisuseError: More final observations than there is room for, which a CUDA graph
                reads; see `reserve_final_obs`. Nothing was changed.
        """
        if self._guard.ahead is not None:
            self._guard.settle()
        if (
            self._takes_arrays
            and not extras
            and valid is None
            and obs.__class__
            is next_obs.__class__
            is actions.__class__
            is rewards.__class__
            is terminations.__class__
            is truncations.__class__
            is np.ndarray
            and (env_ids is None or (env_ids.__class__ is np.ndarray and env_ids.size))
        ):
            ids = self._no_ids if env_ids is None else env_ids
            if add_arrays(
                self._where, id(ids), id(obs), id(next_obs), id(actions), id(rewards),
                id(terminations), id(truncations),
            ):  # fmt: skip
                if self._sequences is not None:
                    self._follow(ids, terminations, truncations)
                return
        columns = {
            "obs": obs,
            "next_obs": next_obs,
            "actions": actions,
            "rewards": rewards,
            "terminations": terminations,
            "truncations": truncations,
        }
        if self._adder is not None and valid is None and self._adder.add(columns, extras, env_ids):
            if self._sequences is not None:
                ids = self._no_ids if env_ids is None else env_ids
                self._follow(ids, terminations, truncations)
            return
        given = {name: column for name, column in columns.items() if column is not None}
        if self._takes_tensors and valid is None and isinstance(rewards, torch.Tensor):
            tensors = self._tensors_of({**given, **extras})
            if tensors is not None and self._add_tensors(tensors, env_ids):
                return
        self._add_checked({**given, **extras}, env_ids, valid)

    @property
    def takes_tensors(self) -> bool:
        """Whether `add` takes tensors on the buffer's device as they are, without the host."""
        return self._takes_tensors

    def _tensors_of(self, columns: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
        """Columns by path, if all are tensors on the device and as they are stored; else None."""
        layout, count = self._storage.layout, len(columns["rewards"])
        flags = ("terminations", "truncations")
        names = {"obs", "next_obs", "actions", "rewards", *flags, *layout.extras}
        if columns.keys() != names or not count:
            return None
        found: dict[str, Any] = {name: columns[name] for name in names - {"obs", "next_obs"}}
        fields = dict(layout.fields)
        for prefix in ("", "next_"):
            leaves = tree_leaves(layout.observation_space, columns[f"{prefix}obs"], f"{prefix}obs")
            paths = [prefix + path for path in layout.obs]
            found |= dict(zip(paths, leaves, strict=True))
            fields |= {prefix + path: layout.fields[path] for path in layout.obs}
        for path, tensor in found.items():
            field = fields[path]
            if not (
                isinstance(tensor, torch.Tensor)
                and tensor.device == self.device
                and tensor.dtype == torch_dtype(field.dtype)
                and tensor.shape == (count, *field.shape)
            ):
                return None
            found[path] = tensor.detach()
        return found

    def _add_tensors(self, tensors: Mapping[str, torch.Tensor], env_ids: Any) -> bool:
        """Add them on the device; return whether that could be done."""
        count, num_envs = len(tensors["rewards"]), self.num_envs or 0
        ids = read_row_ids(env_ids, count, num_envs, self.device)
        is_one_each = self._is_per_env and count == num_envs and not len(ids)
        if count > self.capacity and not is_one_each:  # rows would be overwritten by others of it
            return False
        return self._write_tensors(tensors, ids if num_envs else self._no_ids)

    @exclusive
    def _write_tensors(self, tensors: Mapping[str, torch.Tensor], ids: np.ndarray) -> bool:
        is_written = self._storage.write_tensors(tensors, ids)
        self._has_news = not self._storage.are_counts_known
        return is_written

    def _add_checked(self, columns: Mapping[str, Any], env_ids: Any, valid: Any) -> None:
        layout, num_envs = self._storage.layout, self.num_envs or 0
        self._write(*read_transitions(columns, layout, env_ids, valid, num_envs, self.device))

    @exclusive
    def _write(
        self,
        arrays: Mapping[str, np.ndarray],
        ids: np.ndarray,
        stops: np.ndarray | None = None,
        cuts: np.ndarray | None = None,
    ) -> None:
        self._storage.write(arrays, ids, stops, cuts)
        if self._sequences is not None:
            flags = [arrays["terminations"], arrays["truncations"]]
            self._note_sequences(ids, *flags, *([] if stops is None else [stops]), cuts=cuts)

    @exclusive
    def _follow(self, ids: np.ndarray, terminations: np.ndarray, truncations: np.ndarray) -> None:
        self._note_sequences(ids, terminations, truncations)

    def _note_sequences(
        self, ids: np.ndarray, *flags: np.ndarray, cuts: np.ndarray | None = None
    ) -> None:
        """Let the sequences know of an add; one of `flags` bool (K,) says where episodes end."""
        assert self._sequences is not None
        if cuts is not None:
            self._sequences.cut(cuts)
        if len(flags[0]) > self.capacity:
            envs = self._storage.envs_of(ids, len(flags[0]))
            self._sequences.pass_over(envs, np.logical_or.reduce(flags))
        self._sequences.follow(self._new_sequence_value())

    def _new_sequence_value(self) -> float:
        """What sequences get that nobody has given a priority yet."""
        return 1.0

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
        if self._folder is not None:
            self._folder.check_writable()
        self._mark_cut(read_distinct_ids(env_ids, self.num_envs, self.device))

    @exclusive
    def _mark_cut(self, ids: np.ndarray) -> None:
        self._storage.cut(ids)
        if self._sequences is not None:
            self._sequences.cut(ids)

    @exclusive
    def reserve_final_obs(self, number: int) -> None:
        """Make room for the observations episodes end with, where `store_next` is False.

        With `frame_stack` it is room for frames besides one for each row and 64th row.
        Needed before `sample` is captured in a CUDA graph: the memory does not move afterwards, and
        an `add` that needs more of it is refused. As many as the buffer has rows, and those of one
        add, are always enough. A graph captured before must be captured again.

        Args:
            number: Observations there is to be room for; nothing is done if there is.

        Raises:
            BufferMemoryError: They would not fit into free memory; nothing was changed.
        """
        storage, number = self._storage, check_count("number", number, MAX_COUNT)
        kept: Any = storage.successors if storage.frames is None else storage.frames
        if kept is None or number <= len(kept.finals if storage.frames is None else kept.extra):
            return
        before, kept.is_captured = kept.is_captured, False
        storage.settle()
        try:
            kept.resize(number)
        except BufferMemoryError:
            kept.is_captured = before
            raise
        storage.push()

    def sample(self, batch_size: int, out: ReplayBatch | None = None) -> ReplayBatch:
        """Draw transitions; see the classes."""
        raise NotImplementedError

    def _batch(
        self, batch_size: int, out: ReplayBatch | None, columns: Iterable[str] | None = None
    ) -> ReplayBatch:
        """The batch to fill.

        Raises:
            BufferMisuseError: The buffer is empty, or an argument does not fit.
        """
        if self._folder is not None:
            self._refresh()
            self._folder.check_usable()
        if not self._state[at.COUNT] and not len(self):  # which may know better
            raise BufferMisuseError("the buffer is empty; add transitions before sampling")
        return self._read_batch(batch_size, out, columns)

    @exclusive
    def _fill(self, batch: ReplayBatch, draw: Draw) -> None:
        """Draw rows and gather them, where the reader cannot do it at once."""
        if draw == "distinct":
            self._refresh_now()
            self._check_distinct(batch.size)
        self._reader.fill(batch, draw)

    @exclusive
    def _gather(self, batch: ReplayBatch) -> None:
        self._reader.gather(batch)

    def _require_sequences(self) -> SequenceIndex:
        if self._sequences is None:
            raise BufferMisuseError(
                "sample_sequences needs track_episodes=True in the constructor, which keeps what "
                "follows on what"
            )
        return self._sequences

    @exclusive
    def _sample_sequences(
        self,
        batch_size: int,
        options: SequenceOptions,
        initial_states: Sequence[str] | str,
        columns: Iterable[str] | None,
        beta: float | None = None,
    ) -> SequenceBatch:
        index, layout = self._require_sequences(), self._storage.layout
        batch_size = check_count("batch_size", batch_size, MAX_COUNT)
        check_count("batch_size * sequence_length", batch_size * options.length, MAX_COUNT)
        names = read_states(initial_states, layout.extras)
        chosen = read_columns(columns, (*SequenceBatch._fields, *layout.extras))
        index.prepare(options, self._new_sequence_value())
        rows, steps, weights, memory = index.draw(self._host_words(), batch_size, beta or 0.0)
        indices, steps = torch.from_numpy(rows), torch.from_numpy(steps)
        mask = indices >= 0
        reader = self._sequence_reader(names)
        drawn = reader.new(
            rows.size, chosen and (chosen - {*names}).intersection(self._column_names)
        )
        # What has run out is read from the first row, and set to zero below.
        drawn.indices.copy_(torch.where(mask, indices, indices[:, :1]).view(-1))
        reader.gather(drawn)
        is_short, whole = not bool(mask.all()), self.rows() if names else {}
        indices, steps, mask, starts = (
            tensor.to(self.device) for tensor in (indices, steps, mask, indices[:, 0])
        )

        def shaped(tensors: Any) -> Any:
            if isinstance(tensors, torch.Tensor):
                return tensors.unflatten(0, rows.shape)
            if isinstance(tensors, dict):
                return {name: shaped(tensor) for name, tensor in tensors.items()}
            return tuple(map(shaped, tensors))

        drawn_names = [n for n in SequenceBatch._fields if n in ReplayBatch._fields]
        fields = {n: shaped(getattr(drawn, n)) for n in drawn_names if not chosen or n in chosen}
        extras = shaped({n: drawn.extras[n] for n in drawn.extras if n not in names})
        if is_short:
            zero_padding((fields, extras), mask)
        if not chosen or "boundaries" in chosen:
            none = torch.zeros((), dtype=torch.bool, device=self.device)
            fields["boundaries"] = none.expand(mask.shape)
        return SequenceBatch._made_of(
            {
                **fields,
                "steps": steps,
                "mask": mask,
                "extras": extras,
                **options.masks(mask, steps),
                "indices": indices,
                "weights": None if beta is None else torch.from_numpy(weights).to(self.device),
                "initial_states": {n: whole[n].index_select(0, starts) for n in names},
                "memory": memory,
            }
        )

    def _host_words(self) -> np.ndarray:
        """State of a generator for kernels, uint64 (2,), which moves the buffer's own on."""
        words = getattr(self._reader, "words", None)
        if words is not None:
            return words
        key = torch.empty(1, dtype=torch.int64, device=self.device)
        key.random_(generator=self._reader.generator.torch)
        return np.array([int(key), 0], np.uint64)

    def _sequence_reader(self, without: tuple[str, ...]) -> Any:
        """A reader whose batches are without some of the extra columns, if that saves copies."""
        if not isinstance(self._reader, CompiledReader):
            return self._reader
        if without not in self._sequence_readers:
            layout = self._storage.layout
            fields = {name: f for name, f in layout.fields.items() if name not in without}
            extras = [name for name in layout.extras if name not in without]
            shorter = layout._replace(fields=fields, extras=extras)
            reader = CompiledReader(self._storage, BatchOptions(1, None, False), 0, shorter)
            self._sequence_readers[without] = reader
        return self._sequence_readers[without]

    def _check_sequences(self, batch: Any) -> SequenceMemory:
        memory, index = memory_of(batch, self._sequences), self._sequences
        assert index is not None
        if memory.version != index.version:
            raise BufferMisuseError(
                "batch was drawn before a state was loaded, or sequences of other options were "
                "drawn; draw anew"
            )
        return memory

    def _alive_steps(self, batch: SequenceBatch, memory: SequenceMemory) -> torch.Tensor:
        assert self._sequences is not None
        rows = batch.indices.reshape(-1).cpu().numpy()
        steps = np.flatnonzero(rows >= 0)
        steps = steps[self._sequences.are_alive(rows[steps], memory)]
        return torch.from_numpy(steps).to(self.device)

    def _columns_of_rows(self) -> tuple[RowLayout, dict[str, Any]]:
        return self._storage.layout, self.rows()

    def _check_distinct(self, batch_size: int) -> None:
        count = int(self._state[at.COUNT])
        if batch_size > count:
            raise BufferMisuseError(
                f"batch_size is {batch_size} without replacement, but the buffer holds "
                f"{count} transitions; add more or draw fewer"
            )

    def rows(self) -> dict[str, Any]:
        """Views of all rows by column: (num_rows, ...) tensors of the one allocation, not copies.

        Without observations whose frames are stored once, which are in no row; see `get`.

        Rows that hold nothing yet are zero. `order` tells which hold transitions.
        """
        layout = self._storage.layout
        found = view_fields(self._storage.rows, [plan_view(f) for f in layout.fields.values()])
        views = dict(zip(layout.fields, found, strict=True))
        if layout.frames is not None:
            return {name: views[name] for name in views if name not in ("link", "frame_ids")}
        named = {"obs": layout.build_obs([views[path] for path in layout.obs])}
        if not layout.has_successors:
            named["next_obs"] = layout.build_obs([views[path] for path in layout.next_obs])
        others = set(views) - {*layout.obs, *layout.next_obs, "link"}
        return {**named, **{name: views[name] for name in views if name in others}}

    @exclusive
    def order(self) -> torch.Tensor:
        """int64 (len,) on the CPU: the rows that hold transitions, oldest first in each ring."""
        self._refresh_now()
        return self._storage.oldest_first()

    def get(self, indices: Any, columns: Iterable[str] | None = None) -> ReplayBatch:
        """The transitions in given rows, as `sample` would return them; all weights are 1.

        Args:
            indices: int (B,), rows that hold transitions.
            columns: As in `sample`.

        Raises:
            BufferMisuseError: A row is out of range or holds nothing.
        """
        given = as_array("indices", indices, self.device)
        fits = given.ndim == 1 and len(given) > 0 and given.dtype.kind in "iu"
        rows = np.array(given, np.int64) if fits else np.zeros(0, np.int64)  # nobody else's
        chosen = self._read_columns(columns)
        batch = self._get(rows, chosen) if fits else None
        if batch is None:
            raise BufferMisuseError(
                f"indices is {given}, expected rows that hold transitions, (B,); see order()"
            )
        return batch

    @exclusive
    def _get(self, rows: np.ndarray, columns: frozenset[str] | None) -> ReplayBatch | None:
        """The transitions in rows int64 (B,), or None if one is out of range or holds nothing."""
        state, capacity = self._state, int(self._state[at.CAPACITY])
        self._refresh_now()
        if rows.min() < 0 or rows.max() >= len(self._storage.rows):
            return None
        if (rows % capacity >= state[state[at.TOTALS] + rows // capacity]).any():
            return None
        batch = self._reader.new(len(rows), columns)
        batch.indices.copy_(torch.from_numpy(rows))
        if batch.weights is not None:
            batch.weights.fill_(1.0)
        self._reader.gather(batch)
        folder = self._folder
        if folder is not None and folder.read_only and not folder.are_there(rows, state):
            return None
        return batch

    def _check_copyable(self) -> None:
        if self._folder is not None:
            raise BufferMisuseError(
                "a buffer with storage='memmap' is not copied or pickled; give other processes the "
                "folder, to be opened with read_only=True"
            )

    def _own_settings(self) -> dict[str, Any]:
        """Further settings that a state must share with the buffer it is loaded into."""
        return {}

    def _described(self) -> dict[str, Any]:
        settings = {"n_step": self.n_step, "gamma": self.gamma, **self._own_settings()}
        if self._sequences is not None:
            settings["track_episodes"] = True
        return describe(self._kind, self._storage, settings)

    def _check_described(self, meta: Mapping[str, Any]) -> None:
        check_meta(meta, self._described())

    def _saved_arrays(self) -> dict[str, Any]:
        self._storage.settle()
        kept = self._storage.successors
        if self._folder is not None:  # the rest is in there
            self._folder.flush(self._storage.state)
        arrays = {"state": [self._storage.state], "generator": [self._reader.generator.get_state()]}
        if kept is not None:
            arrays |= {name: [getattr(kept, name)] for name in (*_KEPT, "finals")}
        if self._sequences is not None:
            self._sequences.follow(self._new_sequence_value())
            arrays |= self._sequences.saved(self._has_weights)
        if self._folder is not None:
            return arrays
        if self._storage.frames is not None:
            arrays["heads"] = [self._storage.frames.heads]
            arrays["frames"] = self._storage.frames.blocks()
        return {**arrays, "rows": self._storage.live_blocks()}

    def _wanted_arrays(self) -> Wanted:
        wanted: Wanted = {
            name: (block.dtype, block.shape)
            for name, (block, *_) in self._saved_arrays().items()
            if name not in ("rows", "frames")
        }
        if self._storage.frames is not None:
            stride = self._storage.frames.main.shape[1]
            wanted["frames"] = np.dtype(np.uint8), (None, stride)
        for name in ("finals", "free"):
            if name in wanted:
                dtype, shape = wanted[name]
                wanted[name] = dtype, (None, *shape[1:])
        if self._folder is not None:
            return wanted
        return {**wanted, "rows": (np.dtype(np.uint8), (None, self._storage.layout.stride))}

    def _watchers(self, shapes: Shapes) -> dict[str, FieldWatcher]:
        return {} if self._folder is not None else watch_fields(self._storage, shapes["rows"][0])

    def _check_arrays(self, state: LoadedState) -> None:
        self._check_generator(state.small["generator"])
        if self._folder is not None:
            self._folder.check_writable()
            found = amended_integers(self._storage.layout, self._state, state.small["state"])
            # Rows added since then stay: what they have overwritten is gone. Episodes don't go on.
            own = self._state.copy()
            rings, envs = (
                slice(own[place], own[place] + own[count])
                for place, count in ((at.TOTALS, at.NUM_RINGS), (at.STOPPED, at.NUM_ENVS))
            )
            if (found[rings] == own[rings]).all():
                own[envs] = found[envs]
            if (found[rings] > own[rings]).any():
                warnings.warn(
                    f"the folder has had {own[rings].sum()} rows added, fewer than the "
                    f"{found[rings].sum()} when the state was taken: it is another folder, or the "
                    "power was lost; the rows that it has are kept",
                    stacklevel=4,
                )
            state.small["state"] = own  # else as it is, as the rows are what the folder has
            return
        state.small["state"] = checked_integers(self._storage, state)
        if self._sequences is not None:
            self._sequences.check(state.small, state.shapes["rows"][0], read_sequences)

    def _place(self, state: LoadedState) -> Placed:
        storage, kept = self._storage, self._storage.successors
        storage.settle()
        small = state.small
        num_finals = state.shapes["finals"][0] if kept is not None else 0
        if kept is not None and num_finals > len(kept.finals):
            kept.resize(num_finals)
        targets, frames = {}, storage.frames
        num_frames = state.shapes["frames"][0] if frames is not None else 0
        if frames is not None:
            targets["frames"] = frames.reserve_blocks(num_frames)
        storage.state[:] = small["state"]
        self._reader.generator.set_state(small["generator"])
        if self._folder is not None:
            return {}, lambda: None
        if frames is not None:
            frames.heads[:] = small["heads"]
        if kept is not None:
            for name in _KEPT:
                getattr(kept, name)[: len(small[name])] = small[name]
            kept.add_slots(num_finals)
            targets["finals"] = [kept.finals[:num_finals]]

        def finish() -> None:
            if kept is not None:
                kept.refresh_device()
            if storage.staging is not None:
                storage.staging.refresh()
            storage.push()
            if frames is not None:
                storage.recount_frames(num_frames)
            if self._sequences is not None:
                self._sequences.restore(small)

        return {**targets, "rows": storage.live_blocks()}, finish

    def _forget(self) -> None:
        storage, kept = self._storage, self._storage.successors
        own = storage.state
        own[:] = new_state(storage.layout, *own[[at.CAPACITY, at.NUM_RINGS, at.NUM_ENVS]].tolist())
        if kept is not None:
            kept.slots[:] = 0
            kept.add_slots(0)
        if storage.frames is not None:
            storage.frames.heads[:] = -1
            storage.recount_frames(0)
        if storage.staging is not None:
            storage.staging.refresh()
        storage.push()
        if self._sequences is not None:
            self._sequences.reset()


def _check_files_can_hold(options: ReplayOptions) -> None:
    """Refuse what the files of `storage="memmap"` do not keep."""
    if options.layout.frames is not None:
        raise BufferMisuseError(
            "frame_stack needs storage='memory': files hold every observation whole"
        )
    if options.layout.has_successors:
        raise BufferMisuseError(
            "storage='memmap' needs store_next=True: observations that no row has are kept apart, "
            "in memory"
        )
    if options.has_sequences:
        raise BufferMisuseError(
            "track_episodes needs storage='memory': files do not keep what sequences need"
        )
