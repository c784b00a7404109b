"""Replay buffers: what all have in common, and those whose transitions are drawn alike.

`SharedReplayBuffer` has one ring for all environments, `PerEnvReplayBuffer` one for each.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
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
    read_row_ids,
    resolve_device,
    tree_leaves,
)
from buffers.core.columns import torch_dtype
from buffers.core.drawn import DrawnBuffer
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import DeviceGenerator
from buffers.core.guard import Guard, exclusive
from buffers.core.memory import allocation, check_room
from buffers.core.rows import RowLayout, view_fields
from buffers.core.sequences import SequenceBatch, read_sequences
from buffers.replay.batches import Reader, ReplayBatch
from buffers.replay.draws import Draw, draw
from buffers.replay.folder import Files, Folder, Place, plan_place
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
from buffers.replay.sequences import SequenceDraws, SequenceIndex, sequence_bytes
from buffers.replay.state import TableState, check_described, describe
from buffers.replay.table import ENVS, RINGS, Memory, Table, fence, wait_for

__all__ = ["Added", "PerEnvReplayBuffer", "ReplayBuffer", "SharedReplayBuffer"]

_DRAWS: dict[str, Draw] = {"transitions": "rows", "envs": "rings"}
_NO_ROWS = np.zeros(0, np.int64)
_READ_TIMEOUT = 60.0  # seconds in which a reader has to find rows that are not overwritten


def read_tensors(
    columns: Mapping[str, Any], layout: RowLayout, device: torch.device
) -> dict[str, torch.Tensor] | None:
    """Columns by path, if all are tensors on the device and as they are stored; else None."""
    own = ("actions", "rewards", "terminations", "truncations", *layout.extras)
    if columns.keys() != {"obs", "next_obs", *own} or not len(columns["rewards"]):
        return None
    count, fields = len(columns["rewards"]), layout.fields
    found: dict[str, Any] = {}
    kinds = [(name, columns[name], fields[name]) for name in own]
    for prefix in ("", "next_"):
        leaves = tree_leaves(layout.observation_space, columns[f"{prefix}obs"], f"{prefix}obs")
        paired = zip(layout.obs, leaves, strict=True)
        kinds += [(prefix + path, leaf, fields[path]) for path, leaf in paired]
    for path, tensor, field in kinds:
        if not isinstance(tensor, torch.Tensor) or tensor.device != device:
            return None
        if tensor.dtype != torch_dtype(field.dtype) or tensor.shape != (count, *field.shape):
            return None
        found[path] = tensor.detach()
    return found


class Added:
    """Gives a buffer, or a writer of one, `add`; it says by `_add` where columns go."""

    takes_steps = True  # rows without env_ids are whole steps; `add` checks its columns

    def _add(self, columns: dict[str, Any], env_ids: Any, valid: Any) -> None:
        raise NotImplementedError

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

        The quickest are NumPy arrays of the dtypes of the spaces. In a buffer on a GPU also tensors
        there, of these dtypes, with float32 rewards and bool flags: they are copied on the device,
        nothing waits, and their values are not looked at. If rows follow one another (n_step > 1,
        store_next=False) or say whose they are, they have to be a whole step of all environments,
        without env_ids. Such an add, other than the first, can be captured in a CUDA graph; the
        buffer then asks the device where it has to know how many rows it holds.

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
            BufferMemoryError: More memory is needed, and missing. Nothing was changed, but that of
                more rows than a ring has some may have been added.
            BufferMisuseError: More final observations than there is room for, which a CUDA graph
                reads; see `reserve_final_obs`. Nothing was changed.
            BufferClosedError: Of a `ReplayWriter`: the buffer was closed, or its process has ended.
            TimeoutError: Of a `ReplayWriter`: the learner has drawn too little for so long, as the
                limit on samples per insert asks for. Nothing was added.
        """
        columns = {
            "obs": obs, "next_obs": next_obs, "actions": actions, "rewards": rewards,
            "terminations": terminations, "truncations": truncations,
        }  # fmt: skip
        if extras:
            columns.update(extras)
        self._add(columns, env_ids, valid)


class ReplayBuffer(Added, TableState, SequenceDraws, DrawnBuffer):
    """Transitions in a table of rows; see the classes that say how they are drawn.

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
        num_envs: int | None = None,
        **options: Unpack[ReplayOptions],
    ):
        self._kind = type(self).__name__
        given = read_options(self._kind, options, DEFAULTS)
        rows = {name: given[name] for name in options if name in ROW_DEFAULTS}
        spaces = observation_space, action_space
        plan = plan_replay(capacity, *spaces, rows, num_envs=num_envs, is_per_env=self._is_per_env)
        self.observation_space, self.action_space = spaces
        self.capacity, self.num_envs = plan.capacity, num_envs and plan.num_envs
        self.n_step, self.gamma = plan.n_step, plan.gamma
        self.device = resolve_device(given["device"])
        self._is_staged = given["staged"] or self.device.type != "cpu"
        self._guard = Guard(self.device)
        self._is_reader = bool(given["read_only"])
        self._random = DeviceGenerator(given["seed"], self.device)
        self._folder: Folder | None = None
        needed, bytes_for = self._bytes_of(plan), self._bytes_of
        place = plan_place(given, plan, is_staged=self._is_staged)
        if place is None:
            check_room(self._kind, plan.capacity, lambda n: bytes_for(plan.resized(n)), self.device)
        advice = "use a smaller capacity"
        # The tensors outlive the mode they were made in.
        with (
            allocation(self._kind, needed, self.device, advice, is_checked=True),
            torch.inference_mode(False),
        ):
            if place is None:
                self._table = Table(plan, self.device, is_staged=self._is_staged)
            else:
                self._table = self._open_folder(place, plan)
            self._make_priorities(plan)
        self._sequences = SequenceIndex(self._table) if plan.has_sequences else None
        # On the CPU values are looked at, which costs little there.
        can_take = plan.layout.frames is None and self._sequences is None
        self._takes_tensors = can_take and self.device.type != "cpu"
        self._there = self._table if self._is_staged else None
        self._is_plain = self._table.is_plain and not (
            self._is_staged or self._folder or self._sequences or self._has_weights
        )
        self._reader = Reader(self._table, has_weights=self._has_weights)
        self._columns = ColumnReader(plan.layout)
        maker = next(c for c in type(self).__mro__ if c.__module__.startswith("buffers.replay."))
        self._remember(
            maker, capacity, *spaces, **self._own_arguments(), num_envs=num_envs,
            device=self.device, staged=given["staged"], **rows,
        )  # fmt: skip

    def _own_arguments(self) -> Mapping[str, Any]:
        """Arguments of the class besides those of all replay buffers."""
        return {}

    def _own_files(self, plan: Plan) -> Files:
        """Further files of a folder."""
        return {}

    def _make_priorities(self, plan: Plan) -> None:
        """Allocate what the class has besides the table."""

    def _open_folder(self, place: Place, plan: Plan) -> Table:
        """Make or open the files of the rows, and go on with the generator in there."""
        own, state = describe(self._kind, plan, self._own_settings()), self._random.get_state()

        def check(header: Mapping[str, Any]) -> None:
            is_prioritized = header.get("kind") == "PrioritizedReplayBuffer"
            if place.read_only and is_prioritized and self._kind == "SharedReplayBuffer":
                header = {**header, "kind": self._kind}  # drawn alike by a reader
            check_described(header, own)

        files: Files = {
            "rows": (np.dtype(np.uint8), (plan.num_rows, plan.layout.stride)),
            "rings": (RINGS, (plan.num_rings,)),
            "envs": (ENVS, (plan.num_envs,)),
            "generator": (state.dtype, state.shape),
            **self._own_files(plan),
        }
        self._folder = folder = Folder(place, own, plan, files, check)
        with warnings.catch_warnings():  # a reader's can't be written to
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            rows = torch.from_numpy(folder.arrays["rows"])
        memory = Memory(rows, folder.arrays["rings"], folder.arrays["envs"])
        table = Table(plan, self.device, memory=memory, order=fence)
        if not folder.read_only:
            if folder.was_cut:
                table.mend()
            kept = folder.arrays["generator"]
            if not folder.is_new and self._random.accepts_state(kept):
                self._random.set_state(kept)
            self._keep_generator()
        return table

    def _keep_generator(self) -> None:
        if self._folder is not None and not self._is_reader:
            self._folder.arrays["generator"][...] = self._random.get_state()

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
        224000016
        """
        spaces = observation_space, action_space
        return cls._bytes_of(
            plan_replay(capacity, *spaces, options, num_envs=num_envs, is_per_env=cls._is_per_env)
        )

    @classmethod
    def _bytes_of(cls, plan: Plan) -> int:
        return plan.nbytes + (sequence_bytes(plan) if plan.has_sequences else 0)

    @property
    def _generator(self) -> DeviceGenerator:
        return self._random

    @property
    def generator(self) -> torch.Generator | None:
        """The generator on the device, to register with a CUDA graph; None on the CPU."""
        return self._random.torch if self._is_staged else None

    def _counted(self) -> Table:
        """The table, when the host knows how many rows there are."""
        self._require_open()
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
        """Bytes held now, by what they are for, host and device together; batches not included."""
        sizes = self._table.sizes
        return sizes if self._sequences is None else {**sizes, "sequences": self._sequences.nbytes}

    # Adding.

    def _add(self, columns: dict[str, Any], env_ids: Any, valid: Any) -> None:
        is_tensor = self._takes_tensors and isinstance(columns["rewards"], torch.Tensor)
        if is_tensor and valid is None:
            tensors = read_tensors(columns, self._table.plan.layout, self.device)
            if tensors is not None and self._add_tensors(tensors, env_ids):
                return
        num_envs = self.num_envs or 0
        read = self._columns.read_transitions(columns, env_ids, valid, num_envs, self.device)
        if self._is_plain:
            self._table.add(*read)
        else:
            self._store(*read)

    @property
    def takes_tensors(self) -> bool:
        """Whether `add` takes tensors on the buffer's device as they are, without the host."""
        return self._takes_tensors

    @exclusive
    def _add_tensors(self, tensors: Mapping[str, torch.Tensor], env_ids: Any) -> bool:
        """Add them on the device; return whether that could be done."""
        count, num_envs, table, once = (
            len(tensors["rewards"]), self.num_envs or 0, self._table, self._table.once
        )  # fmt: skip
        ids = read_row_ids(env_ids, count, num_envs, self.device)
        is_whole = count == num_envs and not len(ids)
        has_ids = table.plan.is_linked or table.plan.num_rings > 1
        has_ids |= "env_ids" in table.plan.layout.fields
        fits = (is_whole or not has_ids) and count <= self.capacity * table.plan.num_rings
        is_capturing = self._is_capturing()
        if is_capturing and not fits:
            raise BufferMisuseError(
                f"add of {count} rows in a CUDA graph: expected whole steps of all {num_envs} "
                "envs, without env_ids"
            )
        enough = 0 if once is None else once.enough(count)
        if is_capturing and once is not None and once.num_slots < enough:
            raise BufferMisuseError(
                f"an add in a CUDA graph may need {enough} final observations, and there is room "
                f"for {once.num_slots}; call reserve_final_obs({enough}) before"
            )
        if fits:
            rows = table.add(tensors, ids[:0], is_capturing=is_capturing)
            self._note_captured()
            self._note_rows(rows)
        return fits

    def _note_rows(self, rows: torch.Tensor) -> None:
        """Know of rows int64 (K,) that were added on the device."""

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _settle(self) -> None:
        """Let the host know how many rows were added on the device."""
        if self._table.is_captured and not self._is_capturing():
            self._table.take_counts()

    @exclusive
    def _store(self, *read: Any) -> None:
        """Add `Transitions`, in pieces if they are more than a ring has, or may be lost at once."""
        (arrays, ids, *_), folder = read, self._folder
        limit, whole = self.capacity, self.capacity * self._table.plan.num_rings
        if not len(ids) and len(arrays["rewards"]) <= whole:
            limit = whole
        if folder is not None:
            folder.require_writable()
            limit = min(limit, folder.limit)
        for piece in self._table.pieces(read, limit):
            if folder is not None:
                folder.make_room(len(piece[0]["rewards"]))
            self._table.add(*piece)
            if self._sequences is not None:
                if piece[3] is not None:
                    self._sequences.cut(piece[3])
                self._sequences.follow(self._new_sequence_value())

    @exclusive
    def flush(self) -> None:
        """With storage="memmap", wait until all is on the disk, where a power loss leaves it.

        Raises:
            OSError: The disk fails; call again, or make room.
        """
        if self._folder is not None:
            self._folder.flush()

    @exclusive
    def close(self) -> None:
        """With storage="memmap", flush, and let another buffer write to the folder.

        Later calls are refused. Twice does no harm, and a buffer in memory needs no closing.
        """
        if self._folder is not None:
            self._folder.close()

    def _require_open(self) -> None:
        if self._folder is not None:
            self._folder.require_open()

    def _check_copyable(self) -> None:
        if self._folder is not None:
            raise BufferMisuseError(
                "a buffer with storage='memmap' is not copied or pickled; give other processes the "
                "folder, to be opened with read_only=True"
            )

    def cut_episodes(self, env_ids: Any = None) -> None:
        """Say that environments were reset, or left, before their episodes ended.

        What is added for them next follows on nothing. Not needed after a row with a flag set, nor
        in a buffer that keeps no track of environments.

        Args:
            env_ids: int (K,), distinct, or a mask bool (N,); None for all.

        Raises:
            BufferMisuseError: An id is out of range or repeated; nothing was changed.
        """
        if self._folder is not None:
            self._folder.require_writable()
        if self.num_envs is not None:
            self._cut(read_distinct_ids(env_ids, self.num_envs, self.device))

    @exclusive
    def _cut(self, ids: np.ndarray) -> None:
        self._table.cut(ids)
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
        number, once = check_count("number", number, MAX_COUNT), self._table.once
        if once is not None and number > once.num_slots:
            once.resize(number, is_asked=True)

    # Drawing.

    def new_batch(self, batch_size: int, columns: Iterable[str] | None = None) -> ReplayBatch:
        """Memory for `sample(batch_size, out=...)`, not initialised.

        Args:
            batch_size: B.
            columns: What it is to have, as of `sample`.
        """
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
        """Draw rows and gather them; of files that another process writes until all are whole."""
        if self._is_staged:
            self._guard.enter()
        if not self._is_reader:
            self._draw_and_gather(batch, kind)
            self._keep_generator()
            return

        def is_whole() -> bool:
            committed = self._table.committed.copy()
            self._draw_and_gather(batch, kind)
            return self._table.were_whole(batch.memory.indices.numpy(), committed)

        wait_for(is_whole, _READ_TIMEOUT, lambda: (
            "the folder is written to faster than this reader can read a batch; draw fewer rows, "
            "or give the buffer more capacity"
        ))  # fmt: skip

    def _draw_and_gather(self, batch: ReplayBatch, kind: Draw) -> None:
        table, rows, count = self._table, batch.memory.indices, 0
        span, generator = table.plan.span, self._random.torch
        if kind == "distinct" and batch.size > (count := len(table)):
            raise BufferMisuseError(
                f"batch_size is {batch.size} without replacement, but the buffer holds "
                f"{count} transitions; add more or draw fewer"
            )
        if not self._is_staged and table.plan.num_rings == 1 and kind == "rows":
            begin, end = table.live_of_one()
            rows.random_(begin, end, generator=generator)
            if end > span:  # numbers are not rows any more
                rows.remainder_(span)
        elif self._is_staged:
            self._note_captured()
            # In a graph there may be another number of rows later.
            count = 0 if self._is_capturing() else count
            draw(kind, *table.live_there(), span, generator, rows, count)
        else:
            begins, ends = (torch.from_numpy(numbers) for numbers in table.live())
            draw(kind, begins, ends, span, generator, rows, count)
        self._reader.fill(batch)

    def _note_captured(self) -> None:
        """Let memory that a CUDA graph reads stay where it is, if one is being captured."""
        if self._table.once is not None and self._is_capturing():
            self._table.once.is_captured = True

    # Reading.

    def rows(self) -> dict[str, Any]:
        """Views of all rows by column: (num_rows, ...) tensors of the one allocation, not copies.

        Without observations whose frames are stored once, which are in no row; see `get`.

        Rows that hold nothing yet are zero. `order` tells which hold transitions.
        """
        layout = self._table.plan.layout
        views = view_fields(self._table.rows, layout.fields)
        named = {}
        if layout.frames is None:
            named["obs"] = layout.build_obs([views[path] for path in layout.obs])
        if not self._table.plan.is_once:
            named["next_obs"] = layout.build_obs([views[path] for path in layout.next_obs])
        others = set(views) - {*layout.obs, *layout.next_obs, "link", OLDER}
        return {**named, **{name: views[name] for name in views if name in others}}

    @exclusive
    def order(self) -> torch.Tensor:
        """int64 (len,) on the CPU: the rows that hold transitions, oldest first in each ring."""
        self._require_open()
        self._settle()
        return torch.from_numpy(self._table.oldest_first())

    @exclusive
    def get(self, indices: Any, columns: Iterable[str] | None = None) -> ReplayBatch:
        """The transitions in given rows, as `sample` would return them; all weights are 1.

        Args:
            indices: int (B,), rows that hold transitions.
            columns: As in `sample`.

        Raises:
            BufferMisuseError: A row is out of range or holds nothing.
        """
        self._require_open()
        self._settle()
        table, given = self._table, as_array("indices", indices, self.device)
        chosen, committed = self._reader.read_columns(columns), self._table.committed.copy()
        rows = given.astype(np.int64) if given.ndim == 1 and given.dtype.kind in "iu" else _NO_ROWS
        is_there = len(rows) and rows.min() >= 0 and rows.max() < table.plan.num_rows
        if is_there and table.are_live(rows).all():
            batch = self._reader.new(len(rows), chosen)
            batch.memory.indices.copy_(torch.from_numpy(rows))
            if batch.memory.weights is not None:
                batch.memory.weights.fill_(1.0)
            self._reader.fill(batch)
            if not self._is_reader or table.were_whole(rows, committed):
                return batch
        raise BufferMisuseError(
            f"indices is {given}, expected rows that hold transitions, (B,); see order()"
        )

    def _columns_of_rows(self) -> tuple[RowLayout, dict[str, Any]]:
        return self._table.plan.layout, self.rows()


class UniformReplayBuffer(ReplayBuffer):
    """Draws transitions with equal probability; see the classes below."""

    _draws: Draw = "rows"

    def sample(
        self,
        batch_size: int,
        out: ReplayBatch | None = None,
        *,
        replace: bool = True,
        columns: Iterable[str] | None = None,
    ) -> ReplayBatch:
        """Draw transitions, all equally likely, or as `over` of a `PerEnvReplayBuffer` says.

        Args:
            batch_size: B.
            out: A batch that `new_batch` or `sample` returned, to be overwritten; else a new one.
            replace: False draws B different ones; only over transitions.
            columns: Names of the columns to draw, such as ("obs", "actions"); None for all. The
                same rows are drawn, and copied in part; `indices` are always there.

        Raises:
            BufferMisuseError: The buffer is empty, or holds fewer than B and replace is False, or
                an argument does not fit.
        """
        draw: Draw = self._draws
        if not replace:
            if draw != "rows":
                raise BufferMisuseError("replace=False needs over='transitions'")
            draw = "distinct"
        batch = self._batch(batch_size, out, columns)
        self._fill(batch, draw)
        return batch

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
    ) -> SequenceBatch:
        """Draw sequences of steps of one episode each, all that there are equally likely.

        As of priorities that are all the same: the b-th of a batch comes from the b-th of B equal
        parts of the rows. Steps of episodes that are not over count as well. The first call, and
        each with other options than the one before, goes through all rows once.

        Args:
            batch_size: B.
            sequence_length: L.
            burn_in: Number of steps at the start of a sequence that only bring a recurrent state up
                to date; False in `learn_mask`. Sequences that begin with their episode have none.
            overlap: Number of steps that a sequence shares with the next of its episode; they
                begin at every (L - overlap)-th step. None lets them begin at any step.
            pad: Let sequences run out with the episode, or at the newest step; the rest is zero and
                False in `mask`. At least one step is left to learn from. Otherwise all are full.
            initial_states: Names of extra columns with the state of the policy before each step: a
                batch has those of the first steps only, (B, ...), in `initial_states` instead of
                `extras`.
            columns: Names of the columns to draw, such as ("obs", "rewards"); None for all. The
                sequences are the same; what says which steps they are (`mask`, `steps`, `indices`
                and the like) is always there.

        Raises:
            BufferMisuseError: An argument does not fit, there is no such sequence, or the buffer
                has track_episodes=False or over="envs".
        """
        options = read_sequences(sequence_length, burn_in, overlap, pad)
        return self._sample_sequences(batch_size, options, initial_states, columns)


class SharedReplayBuffer(UniformReplayBuffer):
    """The newest `capacity` transitions of all environments, in one ring.

    Args:
        capacity: Number of transitions held, exactly, however many environments there are.
        observation_space: Of a single environment: Box, Discrete, MultiDiscrete, MultiBinary, or
            Dict and Tuple of these.
        action_space: Of a single environment: Box, Discrete, MultiDiscrete or MultiBinary.
        num_envs: Number of environments; needed by the three options that follow.
        n_step: Length of the windows that rewards are summed over. A window ends early with its
            episode, and at the newest transition of its environment; `discounts` of the batch has
            the right power of gamma.
        gamma: Discount per step; with it batches have `discounts`.
        store_next: False stores observations once: the next observation is read from the row that
            follows. Those that episodes ended with are kept apart.
        frame_stack: Number of frames an observation, a Box, is a stack of along one axis. Each
            frame is stored once then; `add` takes stacks, or the newest frame of each alone.
        track_env: Keep the env id of each transition; batches have `env_ids`.
        track_episodes: Keep what follows on what, for `sample_sequences`; batches have `env_ids`.
        extra_columns: Names and spaces of further values per transition.
        device: Where the transitions live and batches are made.
        seed: Of the generator; None takes entropy of the system.
        staged: Do on the CPU what is done on other devices, to test it.
        storage: Where the rows are: "memory", or "memmap", files that may be larger than memory.
        folder: Of "memmap"; made if it is not there, else the buffer goes on where it was.
        read_only: Draw from a folder that another process may write to.

    Raises:
        BufferMisuseError: An argument that does not fit.
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
        observation_space: Of a single environment: Box, Discrete, MultiDiscrete, MultiBinary, or
            Dict and Tuple of these.
        action_space: Of a single environment: Box, Discrete, MultiDiscrete or MultiBinary.
        num_envs: Number of environments.
        over: "transitions" draws all transitions with equal probability, so that an environment
            counts by what it has; "envs" an environment that has some first, then one of its.
        options: As of `SharedReplayBuffer`.

    Raises:
        BufferMisuseError: An argument that does not fit.
        BufferMemoryError: More memory is needed than is free. Nothing was allocated.

    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> buffer = PerEnvReplayBuffer(100, Box(-1, 1, (4,)), Discrete(2), num_envs=3, seed=0)
    >>> obs, flags = np.zeros((3, 4), np.float32), np.zeros(3, bool)
    >>> step = {"obs": obs, "next_obs": obs, "actions": np.ones(3, int), "rewards": np.ones(3)}
    >>> buffer.add(**step, terminations=flags, truncations=flags)
    >>> buffer.counts.tolist(), tuple(buffer.sample(256).obs.shape)
    ([1, 1, 1], (256, 4))
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
        self.over = over
        super().__init__(capacity, observation_space, action_space, num_envs=num_envs, **options)

    @property
    def _draws(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _DRAWS[self.over]

    def _own_settings(self) -> dict[str, Any]:
        return {"over": self.over}

    _own_arguments = _own_settings

    def _require_sequences(self) -> SequenceIndex:
        if self.over != "transitions":
            raise BufferMisuseError("sample_sequences needs over='transitions'")
        return super()._require_sequences()

    @property
    def counts(self) -> np.ndarray:
        """int64 (num_envs,), transitions held of each environment; a copy."""
        begin, end = self._table.live()
        return end - begin
