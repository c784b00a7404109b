"""Adding transitions that are on a device without the host: it knows there where they go.

The integers of a buffer (see `layout`) have a twin on the device, and so has what says where next
observations are that no row has. An add there reads and writes these only, by kernels of our own
and operations of torch, so it waits for nothing, and in a captured CUDA graph the next replay goes
on behind the last one.

Of an add the host counts along what does not depend on values, so that it knows what rows there
are. What does (which episodes are over, which observations were kept) it learns when it needs it:
`DeviceRing.settle`. Once an add was captured it no longer knows how many there were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from buffers.core.errors import BufferMisuseError
from buffers.core.memory import allocation
from buffers.core.rows import RowLayout, as_words, plan_view, view_fields
from buffers.core.staging import LateNumbers, StagingBlocks
from buffers.replay import layout as at
from buffers.replay.device_kernels import MAX_COLUMNS, add_kernel, count_kernel
from buffers.replay.successors import Successors

__all__ = ["DeviceRing"]

_ADVICE = "add arrays of the host instead"


class DeviceRing:
    """The twin of a buffer's integers on its device, and adds by it.

    Made of what the host knows, which is up to date then.

    Args:
        layout: Of a row.
        state: int64, see `layout`; the host's.
        rows: uint8 (num_rows, stride) on the device.
        counts: int64 (R,) on the device, live rows of each ring.
        successors: Of the buffer, if observations are stored once.

    Attributes:
        is_captured: Whether an add was captured in a CUDA graph.
        is_linked: Whether rows say whose they are, or what follows them.
        added: int64 (K,) on the device, the rows of the last add.
    """

    def __init__(
        self,
        layout: RowLayout,
        state: np.ndarray,
        rows: torch.Tensor,
        counts: torch.Tensor,
        successors: Successors | None,
    ):
        self._layout, self._host, self._rows, self._counts = layout, state, rows, counts
        self._kept, device = successors, rows.device
        self._capacity, self._num_rings, self._num_envs = (
            int(state[place]) for place in (at.CAPACITY, at.NUM_RINGS, at.NUM_ENVS)
        )
        self.is_linked = bool({"link", "env_ids"} & layout.fields.keys())
        self._has_links = "link" in layout.fields
        num_slots = len(rows) if successors is not None else 0
        what = "the places of rows"
        with (
            allocation(what, 8 * len(state) + 12 * num_slots, device, _ADVICE),
            torch.inference_mode(False),
        ):
            self._state = torch.zeros(len(state), dtype=torch.int64, device=device)
            self._slots = torch.zeros(num_slots, dtype=torch.int32, device=device)
            self._free = torch.zeros(0, dtype=torch.int64, device=device)
        self._blocks = StagingBlocks(device, _ADVICE)
        self._num_free, self._is_ahead, self.is_captured = LateNumbers(device), False, False
        self.added: torch.Tensor | None = None
        fields = layout.fields
        views = view_fields(rows, [plan_view(field) for field in fields.values()])
        self._columns = dict(zip(fields, views, strict=True))
        with allocation("the plan of rows", 16 * layout.stride, device, _ADVICE):
            self._writer = RowWriter(layout, rows, self._capacity, self._num_rings)
        self._totals, self._pointers, self._last, self._stopped = (
            self._state[int(state[place]) :][: int(state[size])]
            for place, size in (
                (at.TOTALS, at.NUM_RINGS), (at.POINTERS, at.NUM_RINGS),
                (at.LAST, at.NUM_ENVS), (at.STOPPED, at.NUM_ENVS),
            )
        )  # fmt: skip
        self.push()

    @property
    def nbytes(self) -> int:
        """Bytes held, on host and device together."""
        on_device = self._state.nbytes + self._slots.nbytes + self._free.nbytes
        return on_device + self._writer.nbytes + self._blocks.nbytes

    @property
    def count(self) -> torch.Tensor:
        """int64 () on the device, view: live rows."""
        return self._state[at.COUNT]

    def fits(self, count: int, env_ids: np.ndarray) -> bool:
        """Whether an add of so many rows, of env_ids int64 (K,) or (0,), can be done here."""
        if self._num_rings == 1 and not self.is_linked:
            return count <= self._capacity
        return count == self._num_envs and not len(env_ids) and count <= self.num_rows

    @property
    def num_rows(self) -> int:
        """Of the table."""
        return len(self._rows)

    def push(self) -> None:
        """Take over what the host knows, after it was changed there."""
        with self._blocks.sent("the places of rows", self._host) as (state,):
            self._state.copy_(state)
            # Nothing is read back here: the counts follow from the totals.
            torch.clamp(self._totals, max=self._capacity, out=self._counts)
        kept = self._kept
        if kept is not None:
            self._slots.copy_(torch.from_numpy(kept.slots))
            if len(self._free) != len(kept.free) + 1:
                with torch.inference_mode(False):
                    self._free = torch.zeros(
                        len(kept.free) + 1, dtype=torch.int64, device=self._rows.device
                    )
            self._free[:-1].copy_(torch.from_numpy(kept.free))
            self._num_free.reset(int(self._host[at.NUM_FREE]))
        self._is_ahead = False

    def settle(self) -> None:
        """Tell the host all that adds on the device have changed; waits if there is something."""
        if not (self._is_ahead or self.is_captured):
            return
        self.read_state()
        if self._kept is not None:
            self._kept.take_back(self._slots, self._free[:-1])
            self._num_free.reset(int(self._host[at.NUM_FREE]))
        self._is_ahead = False

    def read_state(self) -> None:
        """Tell the host the integers alone; waits."""
        self._host[:] = self._state.cpu().numpy()
        self._host[at.IS_TALLIED] = 0

    def cut(self, env_ids: np.ndarray) -> None:
        """Let the next rows of env_ids int64 (K,) begin new episodes."""
        if len(env_ids):
            with self._blocks.sent("the numbers of envs", env_ids) as (ids,):
                self._stopped.index_fill_(0, ids, 1)

    def reserve(self, count: int, *, is_capturing: bool) -> None:
        """See to room for the final observations that an add of so many rows may need.

        Raises:
            BufferMemoryError: There is none; nothing was changed.
            BufferMisuseError: Room would have to be made later, while a graph is replayed, or a
                graph reads what would have to move.
        """
        kept = self._kept
        if kept is None:
            return
        if is_capturing:
            needed = self.num_rows + count
            if len(kept.finals) < needed:
                raise BufferMisuseError(
                    f"an add in a CUDA graph can't make room for final observations; call "
                    f"reserve_final_obs({needed}) before, which is always enough"
                )
            return
        if self.is_captured or self._num_free.at_least() >= count:
            return
        self.settle()
        if self._host[at.NUM_FREE] < count:
            kept.reserve(count)
            self.push()

    def add(self, columns: Mapping[str, torch.Tensor]) -> None:
        """Write transitions.

        Args:
            columns: Tensors (K, ...) by path on the device, of the dtypes of the layout; next
                observations by "next_" and the path of the observation, also if they are stored
                once. `fits` and `reserve` come before.
        """
        count, device = len(columns["rewards"]), self._rows.device
        plan: dict[str, Any] = {}
        # Views of this buffer's rows are copied first: writing one field must not change another.
        own = self._rows.untyped_storage().data_ptr()
        brought = {
            path: column.clone() if column.untyped_storage().data_ptr() == own else column
            for path, column in columns.items()
            if path in self._columns
        }
        if "env_ids" in self._columns:
            brought["env_ids"] = torch.arange(count, dtype=torch.int32, device=device)
        write = self._writer.prepare(brought)
        if write is None or self._has_links:
            rows, numbers, ends = self._next_rows(count)
            if self._has_links:
                plan = self._plan_links(columns, rows, numbers, ends)
        else:
            rows = torch.empty(count, dtype=torch.int64, device=device)  # the kernel says which
        # Nothing is allocated from here on, so that nothing fails half-way, but for the last
        # number, which is for the host.
        if write is not None:
            write(self._pointers, rows)
        else:
            for path, column in brought.items():
                self._columns[path].index_copy_(0, rows, column)
            if self._has_links:
                self._columns["link"].index_fill_(0, rows, 0)
        if self._has_links:
            self._commit_links(plan, rows)
        self._count(count)
        self.added, self._is_ahead = rows, self._is_ahead or self._has_links
        if self._kept is not None and not self.is_captured:
            self._num_free.note(self._state[at.NUM_FREE], count)

    def _count(self, count: int) -> None:
        """Count rows that were added."""
        totals, pointers, counts, state = self._totals, self._pointers, self._counts, self._state
        if self._num_rings == 1 and (launch := count_kernel().on(state.device)):
            live, added = state[at.COUNT :], state[at.ADDED :]
            launch(1, totals, pointers, counts, live, added, count, self._capacity)
            return
        totals.add_(count if self._num_rings == 1 else 1)
        torch.remainder(totals, self._capacity, out=pointers)
        torch.clamp(totals, max=self._capacity, out=counts)
        torch.sum(counts, 0, out=state[at.COUNT])
        state[at.ADDED].add_(count)

    def _next_rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows (K,), their numbers in the rings (K,), and rows added to each ring by then (R,)."""
        places = torch.arange(count, device=self._rows.device)
        if self._num_rings == 1:
            numbers = self._totals + places
            return numbers % self._capacity, numbers, self._totals + count
        numbers = self._totals.clone()
        return places * self._capacity + numbers % self._capacity, numbers, self._totals + 1

    def _plan_links(
        self,
        columns: Mapping[str, torch.Tensor],
        rows: torch.Tensor,
        numbers: torch.Tensor,
        ends: torch.Tensor,
    ) -> dict[str, Any]:
        """What has to be written besides the columns; see `storage.follow` and `keep_successor`.

        A row that this add overwrites needs no link: all rows are written at once.
        """
        before = self._last - 1
        is_there = (before >= 0) & (before >= ends - self._capacity)
        first = rows - numbers % self._capacity  # of the ring
        before_rows = first + before.clamp(min=0) % self._capacity
        is_joined = is_there & (self._stopped == 0)
        plan: dict[str, Any] = {
            "last": numbers + 1,
            "stopped": (columns["terminations"] | columns["truncations"]).long(),
        }
        codes = torch.where(is_joined, rows + 1, 0)
        if self._kept is not None:
            codes = self._plan_successors(plan, columns, rows, is_there, is_joined, before_rows)
        # Where nothing is to be written a row writes the link it has anyway, so all are distinct.
        plan["linked"] = torch.where(codes != 0, before_rows, rows)
        plan["links"] = codes.int()
        return plan

    def _plan_successors(
        self,
        plan: dict[str, Any],
        columns: Mapping[str, torch.Tensor],
        rows: torch.Tensor,
        is_there: torch.Tensor,
        is_joined: torch.Tensor,
        before_rows: torch.Tensor,
    ) -> torch.Tensor:
        """The same of observations stored once; return the codes of the rows before (K,)."""
        kept, free = self._kept, self._free
        assert kept is not None
        plan["pending"] = kept.pack_tensors(columns, "next_")
        newest, given = as_words(kept.device_pending, kept.pack_tensors(columns, ""))
        is_same = is_joined & (newest == given).all(1)
        is_kept = is_there & ~is_same
        freed = self._slots.index_select(0, rows).long()  # of the rows that are overwritten
        is_freed, popped = freed > 0, is_kept.cumsum(0)
        # What is taken comes off the stack first: there are as many free as rows, see `reserve`.
        num_free, nowhere = self._state[at.NUM_FREE], len(free) - 1
        slot = free.index_select(0, (num_free - popped).clamp(min=0))
        pushed = num_free - popped[-1] + is_freed.cumsum(0)
        plan["freed"] = torch.where(is_freed, pushed - 1, nowhere), freed - 1
        plan["finals"] = torch.where(is_kept, slot, len(kept.finals))
        plan["slots"] = (
            torch.where(is_kept, before_rows, rows),
            torch.where(is_kept, slot + 1, 0).int(),
        )
        plan["num_free"] = pushed[-1]
        return torch.where(is_same, rows + 1, torch.where(is_kept, -1 - slot, 0))

    def _commit_links(self, plan: dict[str, Any], rows: torch.Tensor) -> None:
        links, kept = self._columns["link"], self._kept
        links.index_copy_(0, plan["linked"], plan["links"])
        self._last.copy_(plan["last"])
        self._stopped.copy_(plan["stopped"])
        if kept is None:
            return
        finals, newest = as_words(kept.device_finals_and_more, kept.device_pending)
        finals.index_copy_(0, plan["finals"], newest)
        kept.device_pending.copy_(plan["pending"])
        self._slots.index_fill_(0, rows, 0)
        self._slots.index_copy_(0, *plan["slots"])
        self._free.index_copy_(0, *plan["freed"])
        self._state[at.NUM_FREE].copy_(plan["num_free"])


class RowWriter:
    """Writes all columns of an add by one kernel, launched for words of rows, and for other bytes.

    Column by column, as operations of torch do it, rows are written as often as they have columns,
    most of them few bytes that lie far apart. Links, which an add has no columns of, become 0.

    Args:
        layout: Of a row.
        rows: uint8 (num_rows, stride) on the device.
        capacity: Rows of a ring.
        num_rings: Rings of them.
    """

    def __init__(self, layout: RowLayout, rows: torch.Tensor, capacity: int, num_rings: int):
        self._rows, self._capacity, self._num_rings = rows, capacity, num_rings
        self._paths = [path for path in layout.fields if path != "link"]
        plans = {word_bytes: plan_units(layout, word_bytes) for word_bytes in (8, 4)}
        self._word_bytes = min(plans, key=lambda word_bytes: sum(map(len, plans[word_bytes])))
        words, parts = plans[self._word_bytes]
        self._aligned = set(words[:, 1].tolist()) - {-1}
        with torch.inference_mode(False):
            self._plans = [
                (unit, torch.from_numpy(plan).to(rows.device))
                for unit, plan in ((self._word_bytes, words), (1, parts))
                if len(plan)
            ]

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(plan.nbytes for _, plan in self._plans)

    def prepare(self, columns: Mapping[str, torch.Tensor]) -> Callable[..., None] | None:
        """How columns (K, ...) by path are written to where the rings go on, or None.

        Returns:
            Takes the pointers of the rings int64 (R,), and int64 (K,) for the rows written. None if
            operations of torch have to do: there is no kernel, columns are missing or too many,
            or begin in the middle of a word.
        """
        paths, count = self._paths, len(columns["rewards"])
        if not count or len(paths) > MAX_COLUMNS or any(path not in columns for path in paths):
            return None
        launches = [add_kernel(f"uint{8 * unit}").on(self._rows.device) for unit, _ in self._plans]
        if None in launches:
            return None
        given: list[Any] = [columns[path].contiguous() for path in paths]
        if any(given[place].data_ptr() % self._word_bytes for place in self._aligned):
            return None
        given += [0] * (MAX_COLUMNS - len(given))

        def write(pointers: torch.Tensor, rows: torch.Tensor) -> None:
            for launch, (unit, plan) in zip(launches, self._plans, strict=True):
                assert launch is not None
                shift = (len(plan) - 1).bit_length()
                launch(
                    (count + 3) // 4 << shift, *given, self._rows, plan, pointers, rows, count,
                    len(plan), shift, self._rows.shape[1] // unit, self._capacity, self._num_rings,
                )  # fmt: skip

        return write


def plan_units(layout: RowLayout, word_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """What `add_thread` needs to know of words and of other bytes, int32 (W, 4) and (B, 4).

    A field is copied in words if it begins with one and fills them. Bytes between fields are left.
    """
    words, parts = [np.zeros((0, 4), np.int32)], [np.zeros((0, 4), np.int32)]
    place = 0
    for path, field in layout.fields.items():
        is_whole = field.offset % word_bytes == field.nbytes % word_bytes == 0
        unit = word_bytes if is_whole else 1
        number = field.nbytes // unit
        plan = np.empty((number, 4), np.int32)
        plan[:, 0] = field.offset // unit + np.arange(number)
        plan[:, 1] = -1 if path == "link" else place
        plan[:, 2], plan[:, 3] = number, np.arange(number)
        (words if is_whole else parts).append(plan)
        place += path != "link"
    return np.concatenate(words), np.concatenate(parts)
