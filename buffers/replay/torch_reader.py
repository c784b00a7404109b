"""Drawing of batches on devices other than the CPU, by torch operations and a kernel of our own.

Nothing here reads a value back from the device: counts of live rows, links and flags stay there, so
the host never waits, and `sample(out=...)` can be captured in a CUDA graph (register the
buffer's `generator` with the graph).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple, assert_never

import torch

from buffers.core.columns import torch_dtype
from buffers.core.generator import DeviceGenerator
from buffers.core.memory import check_fits
from buffers.core.rows import Field, FrameLayout, RowLayout, as_words, plan_view, view_fields
from buffers.replay import layout as at
from buffers.replay.batches import BatchOptions, Draw, ReplayBatch
from buffers.replay.device_kernels import gather_kernel
from buffers.replay.storage import ReplayStorage

__all__ = ["TorchReader"]

_NO_MATTER_BYTES = 1 << 26  # that may be there without looking
_FEW_OF = 4  # times as many rows, from which on distinct ones are found without all rows
_MORE = 64  # rows drawn for these


class TorchMemory(NamedTuple):
    """Memory of one batch on a device."""

    own: torch.Tensor  # uint8 (B, stride), the rows drawn
    last: torch.Tensor  # uint8 (B, stride), the last rows of their windows; maybe the same
    successors: torch.Tensor | None  # uint8 (B, S), if observations are stored once
    rewards: torch.Tensor | None  # float32 (B,), discounted sums
    discounts: torch.Tensor | None  # float32 (B,)
    indices: torch.Tensor  # int64 (B,)
    weights: torch.Tensor | None  # float32 (B,)
    stacks: dict[str, TorchStack]  # of obs and next_obs, if their frames are stored once
    owner: object
    columns: frozenset[str] | None  # those that were asked for


class TorchStack(NamedTuple):
    """Memory of the stacks of a batch."""

    ids: torch.Tensor  # int32 (B, F), view of the rows drawn
    frames: torch.Tensor  # uint8 (B * F, bytes of a frame)
    parts: torch.Tensor  # (B, F, *shape), view of `frames`
    target: torch.Tensor | None  # (B, *stack_shape), if that is no view of `parts`


class TorchReader:
    """Draws rows and gathers batches on the device of the storage.

    Args:
        storage: Where from; staged.
        options: Of batches.
        seed: Of the generator.

    Attributes:
        generator: What rows are drawn by, on the device.
        owner: What the batches belong to.
    """

    def __init__(self, storage: ReplayStorage, options: BatchOptions, seed: int | None):
        assert storage.staging is not None
        self._storage, self._layout = storage, storage.layout
        self.owner = self
        self._counts = storage.staging.counts
        self._num_steps, self._gamma, self._has_weights = options
        self._num_rings, self._capacity = len(self._counts), int(storage.state[at.CAPACITY])
        self.generator = DeviceGenerator(seed, storage.device)
        names = ("rewards", "terminations", "truncations", "link", "env_ids")
        fields = {name: f for name, f in self._layout.fields.items() if name in names}
        self._columns = _views(storage.rows, fields)

    def new(self, size: int, columns: frozenset[str] | None = None) -> ReplayBatch:
        """A batch of B transitions in memory of its own, not initialised; of some columns only."""
        chosen: Any = {*ReplayBatch._fields, "env_ids", *self._layout.extras}
        chosen = chosen if columns is None else columns
        device, layout = self._storage.device, self._layout

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((size, *shape), dtype=dtype, device=device)

        needed = 3 * size * layout.stride
        if layout.frames is not None:
            copies = 4 if layout.frames.is_interleaved else 2
            needed += copies * size * layout.frames.num_frames * layout.frames.nbytes
        if needed > _NO_MATTER_BYTES:
            check_fits(f"a batch of {size}", needed, device, "draw fewer at once")
        floats = torch.float32
        own = empty(layout.stride, dtype=torch.uint8)
        is_long, has_sums = self._num_steps > 1, self._gamma is not None
        last = empty(layout.stride, dtype=torch.uint8) if is_long else own
        has_once = layout.has_successors and "next_obs" in chosen
        once = empty(layout.obs_bytes, dtype=torch.uint8) if has_once else None
        sums = [empty(dtype=floats) if has_sums else None for _ in range(2)]
        weights = empty(dtype=floats) if self._has_weights else None
        indices = empty(dtype=torch.int64)
        stacks = {}
        if layout.frames is not None:
            ids = layout.fields["frame_ids"]
            stacks = {
                name: _new_stack(ids, layout.frames, rows, begin)
                for begin, (name, rows) in enumerate((("obs", own), ("next_obs", last)))
                if name in chosen
            }
        memory = TorchMemory(
            own, last, once, sums[0], sums[1], indices, weights, stacks, self, columns
        )
        return _shape_batch(memory, layout, size, chosen)

    def fill_at_once(self, batch: ReplayBatch, draw: Draw) -> bool:
        """False: on a device nothing takes one call only."""
        return False

    def gather_at_once(self, batch: ReplayBatch) -> bool:
        """False, as above."""
        return False

    def fill(self, batch: ReplayBatch, draw: Draw) -> None:
        """Draw rows and gather them."""
        indices = batch.memory.indices
        if draw == "rows":
            self._draw_uniform(indices)
        elif draw == "rings":
            self._draw_by_ring(indices)
        elif draw == "distinct":
            self._draw_distinct(indices)
        else:
            assert_never(draw)
        self.gather(batch)

    def _words(self, target: torch.Tensor) -> torch.Tensor:
        return target.random_(generator=self.generator.torch)  # 0 .. 2**63 - 1

    def _draw_uniform(self, indices: torch.Tensor) -> None:
        self._words(indices)
        if self._num_rings == 1:
            indices.remainder_(self._counts)
            return
        ends = self._counts.cumsum(0)
        indices.remainder_(ends[-1:])
        indices.copy_(self._live_rows(indices, ends))

    def _live_rows(self, numbers: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Rows int64 (B,) of the live rows with these numbers, counted through the rings."""
        rings = torch.searchsorted(ends, numbers, right=True)
        starts = ends.index_select(0, rings) - self._counts.index_select(0, rings)
        return rings * self._capacity + numbers - starts

    def _draw_by_ring(self, indices: torch.Tensor) -> None:
        ends = (self._counts > 0).cumsum(0)
        chosen = self._words(torch.empty_like(indices)).remainder_(ends[-1:])
        rings = torch.searchsorted(ends, chosen, right=True)
        self._words(indices).remainder_(self._counts.index_select(0, rings))
        indices.add_(rings * self._capacity)

    def _draw_distinct(self, indices: torch.Tensor) -> None:
        count, size = int(self._storage.state[at.COUNT]), len(indices)
        # A captured graph may draw from another number of rows later.
        if count >= _FEW_OF * size and not self._is_capturing():
            self._draw_few(indices)
            return
        num_rows = len(self._storage.rows)
        device = indices.device
        keys = torch.rand(
            num_rows, generator=self.generator.torch, device=device, dtype=torch.float64
        )
        places = torch.arange(num_rows, device=device)
        is_live = places % self._capacity < self._counts.index_select(0, places // self._capacity)
        keys.masked_fill_(~is_live, -1.0)
        indices.copy_(keys.topk(len(indices)).indices)  # sorted, else the order is not random

    def _draw_few(self, indices: torch.Tensor) -> None:
        """Draw distinct rows that are few of all: the first different ones of more that are drawn.

        Of twice as many, and some more, drawn from four times as many, enough are different but
        with a probability below 2 ** -128.
        """
        size = len(indices)
        drawn = torch.empty(2 * size + _MORE, dtype=torch.int64, device=indices.device)
        self._draw_uniform(drawn)
        rows, places = drawn.sort(stable=True)
        is_again = torch.zeros_like(rows, dtype=torch.bool)
        torch.eq(rows[1:], rows[:-1], out=is_again[1:])
        places.masked_fill_(is_again, len(drawn) - 1)  # behind all others
        torch.index_select(drawn, 0, places.sort().values[:size], out=indices)

    def gather(self, batch: ReplayBatch) -> None:
        """Fill a batch from the rows it lists."""
        memory = batch.memory
        if not self._gather_at_once(memory):
            self._gather_in_steps(memory)
        if memory.successors is not None and self._is_capturing():
            kept = self._storage.successors
            assert kept is not None
            kept.is_captured = True
        for stack in memory.stacks.values():
            self._stack(stack)

    def _gather_at_once(self, memory: TorchMemory) -> bool:
        """Do it by one kernel, if there is one and more to do than to copy rows.

        Returns:
            Whether that was done.
        """
        if self._gamma is None and memory.successors is None:
            return False
        layout, kept, table = self._layout, self._storage.successors, self._storage.rows
        word, once = torch.int64, [0, 0, 0]
        obs_words = obs_at = 0
        if memory.successors is not None:
            assert kept is not None
            begin = int(self._storage.state[at.OBS_AT])
            observations, *once = as_words(
                table[:, begin : begin + layout.obs_bytes],
                kept.device_finals,
                kept.device_pending,
                memory.successors,
            )
            word, obs_words = observations.dtype, observations.shape[1]
            obs_at = begin // word.itemsize
        launch = gather_kernel(str(word).removeprefix("torch.")).on(table.device)
        if launch is None:
            return False
        fields, row_words = layout.fields, layout.stride // 8
        size, is_long = len(memory.indices), memory.last is not memory.own
        last_words = row_words if is_long else 0
        found = (fields.get(name) for name in ("rewards", "link", "env_ids"))
        places = [0 if field is None else field.offset // 4 for field in found]
        launch(
            size * (row_words + last_words + obs_words),
            *(table,) * 5, *once[:2],
            memory.indices, memory.own, memory.last if is_long else 0, once[2],
            *(0 if sums is None else sums for sums in (memory.rewards, memory.discounts)),
            size, row_words, last_words, obs_words, layout.stride // word.itemsize, obs_at,
            *places, fields["terminations"].offset, self._num_steps,
            self._gamma is not None, memory.successors is not None, self._gamma or 0.0,
        )  # fmt: skip
        return True

    def _gather_in_steps(self, memory: TorchMemory) -> None:
        """The same by torch operations."""
        rows, own, last = as_words(self._storage.rows, memory.own, memory.last)
        torch.index_select(rows, 0, memory.indices, out=own)
        lasts = memory.indices
        if self._gamma is not None:
            lasts = self._walk(memory)
        if self._num_steps > 1:
            torch.index_select(rows, 0, lasts, out=last)
        if memory.successors is not None:
            self._find_successors(lasts, memory.successors)

    def _walk(self, memory: TorchMemory) -> torch.Tensor:
        """Sum rewards along each window; return the last rows int64 (B,)."""
        columns, gamma = self._columns, float(self._gamma or 0.0)
        assert memory.rewards is not None and memory.discounts is not None
        row, factor = memory.indices, 1.0
        goes_on = torch.ones_like(row, dtype=torch.bool)
        memory.rewards.zero_()
        for step in range(self._num_steps):
            reward = columns["rewards"].index_select(0, row)
            memory.rewards.add_(torch.where(goes_on, factor * reward, 0.0))
            is_terminated = columns["terminations"].index_select(0, row)
            discount = torch.where(is_terminated, 0.0, factor * gamma)
            if step == 0:
                memory.discounts.copy_(discount)
            else:
                memory.discounts.copy_(torch.where(goes_on, discount, memory.discounts))
            if step + 1 < self._num_steps:
                link = columns["link"].index_select(0, row)
                is_over = is_terminated | columns["truncations"].index_select(0, row)
                goes_on = goes_on & ~is_over & (link > 0)
                row = torch.where(goes_on, link.long() - 1, row)
            factor *= gamma
        return row

    def _stack(self, stack: TorchStack) -> None:
        """Gather the frames of stacks from where they are kept."""
        kept = self._storage.frames
        assert kept is not None
        ids = stack.ids.reshape(-1).long()
        main, extra, frames = as_words(kept.main, kept.extra, stack.frames)
        torch.index_select(main, 0, ids.clamp(max=kept.num_main - 1), out=frames)
        if self._is_capturing():
            kept.is_captured = True
        if len(extra):
            others = extra.index_select(0, (ids - kept.num_main).clamp_(min=0))
            is_main = (ids < kept.num_main)[:, None]
            torch.where(is_main, frames, others, out=frames)
        if stack.target is not None:
            kept.layout.split(stack.target).copy_(stack.parts)

    def _is_capturing(self) -> bool:
        return self._storage.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _find_successors(self, lasts: torch.Tensor, target: torch.Tensor) -> None:
        kept, state = self._storage.successors, self._storage.state
        assert kept is not None
        begin = int(state[at.OBS_AT])
        observations, finals, pending, target = as_words(
            self._storage.rows[:, begin : begin + self._layout.obs_bytes],
            kept.device_finals,
            kept.device_pending,
            target,
        )
        link = self._columns["link"].index_select(0, lasts).long()
        env = self._columns["env_ids"].index_select(0, lasts)
        followed = observations.index_select(0, (link - 1).clamp_(min=0))
        final = finals.index_select(0, (-1 - link).clamp_(min=0))
        newest = pending.index_select(0, env)
        link = link[:, None]
        torch.where(link > 0, followed, torch.where(link < 0, final, newest), out=target)


def _shape_batch(
    memory: TorchMemory, layout: RowLayout, size: int, chosen: Set[str]
) -> ReplayBatch:
    """Name the fields of packed rows that are in the chosen columns."""
    own, last = _views(memory.own, layout.fields), _views(memory.last, layout.fields)
    found: dict[str, Any] = {}
    if layout.frames is not None:
        join = layout.frames.join
        for name, stack in memory.stacks.items():
            found[name] = join(stack.parts) if stack.target is None else stack.target
    else:
        found["obs"] = layout.build_obs([own[path] for path in layout.obs])
        if memory.successors is not None:
            views = [plan_view(layout.fields[path], layout.obs_at) for path in layout.obs]
            found["next_obs"] = layout.build_obs(view_fields(memory.successors, views))
        elif not layout.has_successors:
            found["next_obs"] = layout.build_obs([last[path] for path in layout.next_obs])
    found |= {name: own[name] for name in ("actions", "rewards", "env_ids") if name in own}
    found |= {name: last[name] for name in ("terminations", "truncations")}
    if memory.rewards is not None:
        found |= {"rewards": memory.rewards, "discounts": memory.discounts}
    elif "discounts" in chosen:
        chosen = {*chosen, "terminations"}  # they follow from these
    found = {name: column for name, column in found.items() if name in chosen}
    found |= {"indices": memory.indices, "weights": memory.weights}
    extras = {name: own[name] for name in layout.extras if name in chosen}
    return ReplayBatch(found, extras, size, memory)


def _new_stack(field: Field, frames: FrameLayout, rows: torch.Tensor, begin: int) -> TorchStack:
    """Memory of stacks whose frames have the ids of a field from number `begin` on."""
    place, count, device = field.offset + 4 * begin, frames.num_frames, rows.device
    ids = rows[:, place : place + 4 * count].view(torch.int32)
    size, kind = len(rows), torch_dtype(frames.dtype)
    pages = torch.empty((size * count, frames.nbytes), dtype=torch.uint8, device=device)
    parts = pages.view(kind).view(size, count, *frames.shape)
    target = None
    if frames.is_interleaved:
        target = torch.empty((size, *frames.stack_shape), dtype=kind, device=device)
    return TorchStack(ids, pages, parts, target)


def _views(rows: torch.Tensor, fields: Mapping[str, Field]) -> dict[str, torch.Tensor]:
    """Fields (B, *shape) of packed rows uint8 (B, stride), by path; not copies."""
    views = view_fields(rows, [plan_view(field) for field in fields.values()])
    return dict(zip(fields, views, strict=True))
