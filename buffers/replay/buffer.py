"""Replay buffers: the common base class, and the two buffers that draw uniformly.

`SharedReplayBuffer` has one ring for all environments, `PerEnvReplayBuffer` one for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import (
    MAX_COUNT,
    ColumnReader,
    as_array,
    check_count,
    read_distinct_ids,
    read_number,
    resolve_device,
    tree_leaves,
)
from buffers.core.batches import SequenceBatch, memory_of, read_sequences
from buffers.core.drawn import DrawnBuffer
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import DeviceGenerator
from buffers.core.memory import allocation, torch_dtype
from buffers.core.rows import RowLayout, view_fields
from buffers.replay.batches import Reader, ReplayBatch
from buffers.replay.draws import Draw, draw
from buffers.replay.folder import Files, Folder, plan_place
from buffers.replay.plan import (
    DEFAULTS,
    OLDER,
    ROW_DEFAULTS,
    Plan,
    ReplayOptions,
    RowOptions,
    plan_replay,
    read_options,
)
from buffers.replay.sequences import SequenceIndex, SequenceMemory, sequence_bytes
from buffers.replay.state import TableState, describe
from buffers.replay.table import ENVS, RINGS, Memory, Table

__all__ = ["Added", "PerEnvReplayBuffer", "ReplayBuffer", "SharedReplayBuffer"]

_DRAWS: dict[str, Draw] = {"transitions": "rows", "envs": "rings"}
_NO_ROWS = np.zeros(0, np.int64)


class Added:
    """Mixin with `add`, for buffers and writers; a class stores the columns in `_add`."""

    takes_steps = True  # rows without env_ids are whole steps; `add` checks its columns

    def _add(self, columns: dict[str, Any], env_ids: Any, valid: Any) -> None:
        raise NotImplementedError

    def add(
        self,
        *unnamed: Any,
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
        """Add K transitions, K >= 0; all columns are copied.

        Fastest are NumPy arrays of the dtypes of the spaces, and, for a buffer on a GPU, tensors on
        it of these dtypes, with float32 rewards and bool flags: the host neither waits nor checks
        their values. If the buffer tracks envs, such tensors must be whole steps of all envs,
        without env_ids and valid. Such an add, except the first, can be in a CUDA graph.

        Args:
            *unnamed: None; columns have names.
            obs: (K, *obs_shape), nested like the space.
            next_obs: Like obs: the true observation after the step; where the episode ended, the
                final observation, not that of the reset.
            actions: (K, *action_shape).
            rewards: float (K,), finite; stored as float32.
            terminations: bool (K,).
            truncations: bool (K,).
            env_ids: int (K,), the environment of each row. None if the rows are whole steps of all
                environments in order, or the buffer does not track environments.
            valid: bool (K,), the rows to store, such as those of agents that acted; None for all.
                Leaving a row out ends the episode of its environment: the next row begins another.
            extras: The extra columns, (K, ...).

        Raises:
            BufferMisuseError: A column is missing, unknown, or of the wrong shape or dtype, a
                reward is not finite, or an env id out of range. Nothing was changed.
            BufferMemoryError: Memory is missing. Nothing was changed, unless K is larger than a
                ring: then some of the rows may have been added.
            BufferClosedError: `ReplayWriter` only: the buffer was closed, or its process has ended.
        """
        columns = {
            "obs": obs, "next_obs": next_obs, "actions": actions, "rewards": rewards,
            "terminations": terminations, "truncations": truncations,
        }  # fmt: skip
        if unnamed:
            told = f"add got {len(unnamed)} arguments without a name, expected "
            raise BufferMisuseError(told + ", ".join(f"{name}=..." for name in columns))
        if extras:
            columns.update(extras)
        self._add(columns, env_ids, valid)


class ReplayBuffer(Added, TableState, DrawnBuffer):
    """Base class: transitions in a table of rows; subclasses define how they are drawn.

    The arguments are those of `SharedReplayBuffer`.

    Attributes:
        takes_tensors: Whether `add` stores tensors on the device without a copy through the host.
    """

    _is_per_env = False  # one ring per environment, instead of one for all
    _has_weights = False  # batches have weights

    def __init__(
        self,
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        num_envs: int | None = None,
        **options: Unpack[ReplayOptions],
    ):
        self._kind = type(self).__name__
        given = read_options(self._kind, options, DEFAULTS, type(self).__init__.__kwdefaults__)
        rows = {name: given[name] for name in options if name in ROW_DEFAULTS}
        spaces = observation_space, action_space
        plan = plan_replay(capacity, *spaces, rows, num_envs=num_envs, is_per_env=self._is_per_env)
        self.observation_space, self.action_space = spaces
        self.capacity, self.num_envs = plan.capacity, num_envs and plan.num_envs
        self.n_step, self.gamma = plan.n_step, plan.gamma
        self.device = resolve_device(given["device"])
        self._is_staged = given["staged"] or self.device.type != "cpu"
        self._random = DeviceGenerator(given["seed"], self.device)
        self._generator = self._random if self._is_staged else None
        self._folder: Folder | None = None
        place = plan_place(given, plan, is_staged=self._is_staged or self._has_weights)
        needed = self._bytes_of(plan) if place is None else 0
        what, advice = f"{self._kind} with capacity {plan.capacity}", "use a smaller capacity"
        # The tensors outlive the mode they were made in.
        with allocation(what, needed, self.device, advice), torch.inference_mode(False):
            if place is None:
                self._table = Table(plan, self.device, is_staged=self._is_staged)
            else:
                self._table = self._open_folder(place, plan)
            self._make_priorities(plan)
        self._reader = Reader(self._table, has_weights=self._has_weights)
        self._sequences: SequenceIndex | None = None
        if plan.has_sequences:
            alpha = self._own_settings().get("alpha", 0.0)
            self._sequences = SequenceIndex(self._table, self._reader, self._random.torch, alpha)
        # On the CPU, `add` checks values, which costs little there.
        is_on_host = self.device.type == "cpu" or plan.layout.frames is not None
        self.takes_tensors = not (is_on_host or plan.has_sequences)
        self._is_plain = self._table.is_plain and not (
            self._is_staged or self._folder or self._sequences or self._has_weights
        )
        self._columns = ColumnReader(plan.layout)
        maker = next(c for c in type(self).__mro__ if c.__module__.startswith("buffers.replay."))
        self._remember(
            maker, capacity, *spaces, **self._own_settings(), num_envs=num_envs,
            device=self.device, staged=given["staged"], **rows,
        )  # fmt: skip

    def _make_priorities(self, plan: Plan) -> None:
        """Allocate memory of the class besides the table."""

    def _open_folder(self, path: Path, plan: Plan) -> Table:
        """Make or open the files of the rows."""
        own = describe(self._kind, plan, self._own_settings())
        files: Files = {
            "rows": (np.dtype(np.uint8), (plan.num_rows, plan.layout.stride)),
            "rings": (RINGS, (plan.num_rings,)),
            "envs": (ENVS, (plan.num_envs,)),
        }
        self._folder = folder = Folder(path, own, plan, files)
        memory = Memory(
            torch.from_numpy(folder.arrays["rows"]), folder.arrays["rings"], folder.arrays["envs"]
        )
        table = Table(plan, self.device, is_staged=False, memory=memory)
        if folder.was_cut:
            table.mend()
        return table

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
        """Bytes that the constructor would allocate with these arguments; allocates nothing."""
        given = capacity, observation_space, action_space, options
        return cls._bytes_of(plan_replay(*given, num_envs=num_envs, is_per_env=cls._is_per_env))

    @classmethod
    def _bytes_of(cls, plan: Plan) -> int:
        return plan.nbytes + (sequence_bytes(plan) if plan.has_sequences else 0)

    def _counted(self) -> Table:
        """The table, after the host has got the counts of adds in CUDA graphs."""
        if self._folder is not None:
            self._folder.require_open()
        self._settle()
        return self._table

    def __len__(self) -> int:
        """Number of transitions held."""
        return len(self._counted())

    @property
    def num_added(self) -> int:
        """Number of transitions ever added."""
        return self._counted().num_added

    def memory(self) -> dict[str, int]:
        """Bytes held now, by purpose, on host and device together, without batches."""
        plan, sizes = self._table.plan, self._table.sizes
        return {**sizes, "sequences": sequence_bytes(plan)} if plan.has_sequences else sizes

    def _add(self, columns: dict[str, Any], env_ids: Any, valid: Any) -> None:
        if self.takes_tensors:
            # The host numbers the steps of episodes, before their rows are overwritten.
            is_plain = env_ids is None and valid is None and self._sequences is None
            if is_plain and (tensors := self._read_there(columns)) is not None:
                return self._add_there(tensors)
            if self._is_capturing():
                raise BufferMisuseError(
                    "an add in a CUDA graph takes tensors on the device, as they are stored, whole "
                    f"steps of all {self.num_envs} envs, without env_ids, valid and track_episodes"
                )
        num_envs = self.num_envs or 0
        read = self._columns.read_transitions(columns, env_ids, valid, num_envs, self.device)
        return self._table.add(*read) if self._is_plain else self._store(*read)

    def _read_there(self, columns: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
        """Columns by path; None unless all are tensors on the device that fit as they are."""
        plan, found = self._table.plan, {}
        layout, rewards = plan.layout, columns["rewards"]
        own = ("actions", "rewards", "terminations", "truncations", *layout.extras)
        if columns.keys() != {"obs", "next_obs", *own} or not isinstance(rewards, torch.Tensor):
            return None
        count, space = rewards.numel(), layout.observation_space
        has_ids = plan.is_linked or plan.num_rings > 1 or "env_ids" in layout.fields
        fits = count == self.num_envs if has_ids else 0 < count <= self.capacity
        fits = fits and not count % (self.num_envs or 1)
        given = [(name, name, columns[name]) for name in own]
        for prefix in ("", "next_"):
            leaves = tree_leaves(space, columns[f"{prefix}obs"], f"{prefix}obs")
            paths = zip(layout.obs, leaves, strict=True)
            given += [(prefix + path, path, leaf) for path, leaf in paths]
        for path, name, tensor in given:
            field = layout.fields[name]
            fits = fits and isinstance(tensor, torch.Tensor) and tensor.device == self.device
            fits = fits and tensor.dtype == torch_dtype(field.dtype)
            if not fits or tensor.shape != (count, *field.shape):
                return None
            found[path] = tensor.detach()
        return found

    def _add_there(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add whole steps that are on the device."""
        table, is_capturing = self._table, self._is_capturing()
        if is_capturing and table.once is not None:
            enough, slots = table.once.enough(len(tensors["rewards"])), table.once.num_slots
            if slots < enough:
                raise BufferMisuseError(
                    f"an add in a CUDA graph may need {enough} final observations, and there is "
                    f"room for {slots}; call reserve_final_obs({enough}) before"
                )
        table.is_captured |= is_capturing
        rows = table.add(tensors, _NO_ROWS)
        self._note_captured()
        self._note_rows(rows)

    def _note_rows(self, rows: Any) -> None:
        """Hook for subclasses, called with added rows: int64 (K,) on the device if staged."""

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _settle(self) -> None:
        """Update the counts of the host, if a CUDA graph adds rows."""
        if self._table.is_captured and not self._is_capturing():
            self._table.take_counts()

    def _store(self, *read: Any) -> None:
        """Add `Transitions`, in pieces of at most a ring, and of `Folder.limit` rows."""
        (arrays, ids, *_), folder = read, self._folder
        whole = self.capacity * self._table.plan.num_rings
        is_whole = not len(ids) and len(arrays["rewards"]) <= whole
        limit = whole if is_whole else self.capacity
        if folder is not None:
            folder.require_writable()
            limit = min(limit, folder.limit)
        for piece in self._table.pieces(read, limit):
            if folder is not None:
                folder.make_room(len(piece[0]["rewards"]))
            if self._sequences is not None and piece[3] is not None:
                self._sequences.follow()  # rows of an interrupted add
            self._note_rows(self._table.add(*piece))
            if self._sequences is not None:
                self._sequences.follow(piece[3])

    def flush(self) -> None:
        """With storage="memmap", wait until all data is on the disk and survives a power loss.

        Raises:
            OSError: Writing failed; make room on the disk, or call again.
        """
        if self._folder is not None:
            self._folder.flush()

    def close(self) -> None:
        """With storage="memmap", flush and unlock the folder; further calls do nothing."""
        if self._folder is not None:
            self._folder.close()

    def _check_copyable(self) -> None:
        if self._folder is not None:
            raise BufferMisuseError(
                "a buffer with storage='memmap' is not copied or pickled; give other processes the "
                "batches instead"
            )

    def cut_episodes(self, env_ids: Any = None) -> None:
        """Mark that environments were reset, or left, before their episodes ended.

        Their next rows begin new episodes. Not needed after a terminated or truncated row.

        Args:
            env_ids: int (K,), distinct, or a mask bool (N,); None for all.

        Raises:
            BufferMisuseError: An id is out of range or repeated; nothing was changed.
        """
        if self._folder is not None:
            self._folder.require_writable()
        if self.num_envs is not None:
            ids = read_distinct_ids(env_ids, self.num_envs, self.device)
            self._table.cut(ids)
            if self._sequences is not None:
                self._sequences.cut(ids)

    def reserve_final_obs(self, number: int) -> None:
        """Reserve memory for `number` final observations, with `store_next=False`.

        With `frame_stack`, for frames that no row holds. Needed before an `add` or a `sample` is
        captured in a CUDA graph, because the memory must not move afterwards. The number of rows of
        the buffer plus that of one add is always enough.

        Raises:
            BufferMemoryError: The memory is not free; nothing was changed.
        """
        number, once = check_count("number", number, MAX_COUNT), self._table.once
        if once is not None and number > once.num_slots:
            once.resize(number, is_asked=True)

    def new_batch(self, batch_size: int, columns: Iterable[str] | None = None) -> ReplayBatch:
        """Allocate a batch of these columns for `sample(batch_size, out=...)`; not initialised."""
        return self._reader.batch(batch_size, None, columns)

    def _batch(
        self, batch_size: int, out: ReplayBatch | None, columns: Iterable[str] | None
    ) -> ReplayBatch:
        """The batch that `sample` fills; raise BufferMisuseError if an argument does not fit."""
        if self._folder is not None:
            self._folder.require_open()
        if self._table.is_empty and not self._is_capturing() and not len(self):
            raise BufferMisuseError("the buffer is empty; add transitions before sampling")
        return self._reader.batch(batch_size, out, columns)

    def _fill(self, batch: ReplayBatch, kind: Draw) -> None:
        """Draw rows and gather them."""
        table, rows, span = self._table, batch.memory.indices, self._table.plan.span
        if not self._is_staged and table.plan.num_rings == 1 and kind == "rows":
            begin, end = table.live_of_one()
            if end - begin == span:  # every row holds a transition
                begin, end = 0, span
            rows.random_(begin, end, generator=self._random.torch)
            if end > span:  # the ring has wrapped, so numbers differ from rows
                rows.remainder_(span)
            return self._reader.fill(batch)
        self._note_captured()
        if kind == "distinct" and batch.size > len(table):
            raise BufferMisuseError(
                f"batch_size is {batch.size} without replacement, but the buffer holds "
                f"{len(table)} transitions; add more or draw fewer"
            )
        begin, end = table.live_there() if self._is_staged else map(torch.from_numpy, table.live())
        draw(kind, begin, end, span, self._random.torch, rows)
        return self._reader.fill(batch)

    def _note_captured(self) -> None:
        """During the capture of a CUDA graph, pin the memory that the graph will read."""
        if self._table.once is not None and self._is_capturing():
            self._table.once.is_captured = True

    def _index(self) -> SequenceIndex:
        if self._sequences is None:
            raise BufferMisuseError(
                "sample_sequences needs track_episodes=True in the constructor, which keeps what "
                "follows on what"
            )
        return self._sequences

    def sample_sequences(
        self,
        batch_size: int,
        sequence_length: int,
        *,
        burn_in: int = 0,
        overlap: int | None = None,
        pad: bool = False,
        initial_states: Sequence[str] | str = (),
        columns: Iterable[str] | None = None,
        beta: float | None = None,
    ) -> SequenceBatch:
        """Draw sequences of consecutive steps, each of one episode, uniformly or by priority.

        Sequence b comes from the b-th of B equal parts of the sum of priority ** alpha. Steps of
        unfinished episodes are included.

        Args:
            batch_size: B.
            sequence_length: L.
            burn_in: Steps at the start of a sequence that only update a recurrent state; False in
                `learn_mask`. Sequences that begin with their episode have none.
            overlap: Steps that a sequence shares with the next one of its episode: sequences begin
                at every (L - overlap)-th step. None lets them begin at any step.
            pad: Allow sequences that end early, with the episode or at the newest step; the rest is
                zero and False in `mask`. At least one step is left to learn from.
            initial_states: Names of extra columns with the policy's state before each step. The
                batch has only those of the first steps, (B, ...), and not in `extras`.
            columns: Names of the columns to draw, such as ("obs", "rewards"); None for all. `mask`,
                `steps`, `indices` and the other columns that locate steps are always there.
            beta: Exponent of `weights` float32 (B,) of a prioritized buffer; None takes its own.

        Raises:
            BufferMisuseError: An argument does not fit, there is no such sequence, or priorities
                were given to sequences of other options.
        """
        if beta is not None and not self._has_weights:
            raise BufferMisuseError(f"beta is {beta!r}, which a PrioritizedReplayBuffer takes")
        beta = getattr(self, "beta", None) if beta is None else beta
        exponent = None if beta is None else read_number("beta", beta, math.inf)
        options, index = read_sequences(sequence_length, burn_in, overlap, pad), self._index()
        return index.sample(batch_size, options, initial_states, columns, exponent)

    def _check_sequences(self, batch: Any) -> SequenceMemory:
        return memory_of(batch, self._sequences and self._sequences.key)

    def _alive_steps(self, batch: SequenceBatch, memory: SequenceMemory) -> torch.Tensor:
        return self._index().alive_steps(batch, memory)

    def rows(self) -> dict[str, Any]:
        """Views (num_rows, ...) of all rows, by column; rows not yet written are zero.

        `order` lists the rows that hold transitions. For frames that are stored once use `get`.
        """
        layout = self._table.plan.layout
        views = view_fields(self._table.rows, layout.fields)
        hidden = {*layout.obs, *layout.next_obs, "link", OLDER}
        found = {name: views[name] for name in views if name not in hidden}
        if layout.frames is None:
            found["obs"] = layout.build_obs([views[path] for path in layout.obs])
        if not self._table.plan.is_once:
            found["next_obs"] = layout.build_obs([views[path] for path in layout.next_obs])
        return found

    def order(self) -> torch.Tensor:
        """Rows that hold transitions, int64 (len,) on the CPU, oldest first in each ring."""
        return torch.from_numpy(self._counted().oldest_first())

    def get(self, indices: Any, columns: Iterable[str] | None = None) -> ReplayBatch:
        """Return the transitions of rows int (B,) as `sample` does; all weights are 1.

        Raises:
            BufferMisuseError: A row is out of range or holds nothing.
        """
        table, given = self._counted(), as_array("indices", indices, self.device)
        chosen = self._reader.read_columns(columns)
        rows = given.astype(np.int64) if given.ndim == 1 and given.dtype.kind in "iu" else _NO_ROWS
        is_there = len(rows) and rows.min() >= 0 and rows.max() < table.plan.num_rows
        if is_there and table.are_live(rows).all():
            batch = self._reader.new(len(rows), chosen)
            batch.memory.indices.copy_(torch.from_numpy(rows))
            if batch.memory.weights is not None:
                batch.memory.weights.fill_(1.0)
            self._reader.fill(batch)
            return batch
        raise BufferMisuseError(
            f"indices is {given}, expected rows that hold transitions, (B,); see order()"
        )

    def _columns_of_rows(self) -> tuple[RowLayout, dict[str, Any]]:
        return self._table.plan.layout, self.rows()


class UniformReplayBuffer(ReplayBuffer):
    """Draws transitions with equal probability."""

    _draws: Draw = "rows"

    def sample(
        self,
        batch_size: int,
        out: ReplayBatch | None = None,
        *,
        replace: bool = True,
        columns: Iterable[str] | None = None,
    ) -> ReplayBatch:
        """Draw transitions uniformly, or by the `over` of a `PerEnvReplayBuffer`.

        Args:
            batch_size: B.
            out: A batch from `new_batch` or `sample`, to be overwritten; None makes a new one.
            replace: False draws B different transitions; needs over="transitions".
            columns: Names of the columns to draw, such as ("obs", "actions"); None for all. The
                choice does not change which rows are drawn; `indices` are always there.

        Raises:
            BufferMisuseError: The buffer is empty, replace is False and it holds fewer than B
                transitions, or an argument does not fit.
        """
        draw: Draw = self._draws
        if not replace:
            if draw != "rows":
                raise BufferMisuseError("replace=False needs over='transitions'")
            draw = "distinct"
        batch = self._batch(batch_size, out, columns)
        self._fill(batch, draw)
        return batch


class SharedReplayBuffer(UniformReplayBuffer):
    """The newest `capacity` transitions of all environments, in one ring.

    Args:
        capacity: Exact number of transitions held, of all environments together.
        observation_space: Of a single environment: Box, Discrete, MultiDiscrete, MultiBinary, or
            Dict and Tuple of these.
        action_space: Of a single environment: Box, Discrete, MultiDiscrete or MultiBinary.
        num_envs: Number of environments; required by n_step > 1, store_next=False, frame_stack,
            track_env and track_episodes.
        n_step: Number of steps over which rewards are summed. A window ends early with its episode,
            and at the newest transition of its environment; `discounts` of the batch has the right
            power of gamma.
        gamma: Discount per step; with it batches have `discounts`.
        store_next: False stores each observation once: the next observation is read from the row
            that follows, and final observations are kept apart.
        frame_stack: Number of frames that an observation, a Box, stacks along one axis. Each frame
            is stored once.
        track_env: Store the env id of each transition; batches have `env_ids`.
        track_episodes: Store which rows follow one another, for `sample_sequences`; batches have
            `env_ids`.
        extra_columns: Names and spaces of further values per transition.
        device: Where the transitions live and batches are made.
        seed: Seed of the generator; None takes entropy of the system.
        staged: Run the code for other devices on the CPU, for tests.
        storage: "memory", or "memmap": rows in files, which may be larger than memory.
        folder: Folder of "memmap". A missing one is made; the buffer of an existing one is resumed.

    Raises:
        BufferMisuseError: An argument does not fit.
        BufferMemoryError: More memory is needed than is free. Nothing was allocated.

    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> buffer = SharedReplayBuffer(1000, Box(-1, 1, (4,)), Discrete(2), seed=0)
    >>> obs, flags = np.zeros((3, 4), np.float32), np.zeros(3, bool)
    >>> step = {"obs": obs, "next_obs": obs, "actions": np.ones(3, int), "rewards": np.ones(3)}
    >>> buffer.add(**step, terminations=flags, truncations=flags)
    >>> batch = buffer.sample(256)
    >>> len(buffer), tuple(batch.obs.shape)
    (3, (256, 4))
    """


class PerEnvReplayBuffer(UniformReplayBuffer):
    """The newest `capacity` transitions of each environment, in a ring of its own.

    Args:
        capacity: Number of transitions held of each environment.
        observation_space, action_space: As in `SharedReplayBuffer`.
        num_envs: Number of environments.
        over: "transitions" draws all transitions with equal probability. "envs" first draws one of
            the environments that have transitions, then one of its transitions.
        options: As in `SharedReplayBuffer`.

    Raises:
        BufferMisuseError: An argument does not fit.
        BufferMemoryError: More memory is needed than is free. Nothing was allocated.
    """

    _is_per_env = True

    def __init__(
        self,
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        num_envs: int,
        over: str = "transitions",
        **options: Unpack[ReplayOptions],
    ):
        if not isinstance(over, str) or over not in _DRAWS:
            raise BufferMisuseError(f"over is {over!r}, expected one of {sorted(_DRAWS)}")
        self.over, self._draws = over, _DRAWS[over]
        super().__init__(capacity, observation_space, action_space, num_envs=num_envs, **options)

    def _own_settings(self) -> dict[str, Any]:
        return {"over": self.over}

    @property
    def counts(self) -> np.ndarray:
        """Transitions held of each environment, int64 (num_envs,); a copy."""
        begin, end = self._table.live()
        return end - begin
