"""Observations stored once: which rows, or slots beside them, the next ones and stacks are in.

A *unit* is an observation, or a frame of a stack of F. Row k has unit k, the newest of its obs;
slot s beside the rows has unit num_rows + s. The link of a row leads to the unit that is the newest
of its next_obs: that of the row that follows, once that is there and begins with the same bytes,
else a slot of its own. With frames `back` leads from each unit to the one before it in its stack,
or to itself where an episode begins: so a stack is F - 1 steps back, of obs from the row on, of
next_obs from where its link leads. A unit of zeros, the first slot, is what zero padding leads to.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.errors import BufferMisuseError
from buffers.core.memory import allocation
from buffers.core.rows import FrameLayout
from buffers.core.state import check_bools, contradiction
from buffers.replay.plan import Plan

__all__ = ["Once", "Placed", "Prepared", "first_break"]

MAX_SLOTS = 2**24  # links are 32-bit
_ADVICE = "use a smaller capacity, or store_next=True if most transitions end an episode"


class Placed(NamedTuple):
    """Where the K transitions of an add go, and what they follow."""

    ids: np.ndarray  # int64 (K,), environments
    rows: np.ndarray  # int64 (K,)
    numbers: np.ndarray  # int64 (K,), in their rings
    previous: np.ndarray | None  # int64 (K,), the one before of the same env in the add, or -1
    before: np.ndarray  # int64 (K,), number of the row before of the same env, or -1
    before_rows: np.ndarray  # int64 (K,), that row, whatever it is where there is none
    is_open: np.ndarray  # bool (K,), the episode of the row before goes on
    is_joined: np.ndarray  # bool (K,), and that row is still there
    is_over: np.ndarray  # bool (K,), the next row begins another episode
    ends: np.ndarray  # int64 (R,), what `committed` will be
    envs: np.ndarray  # ENVS (N,), what the environments will be


class Prepared(NamedTuple):
    """What an add of K rows is going to change."""

    is_joined: np.ndarray  # bool (K,), follows on the row before, which has the same unit
    codes: np.ndarray  # int32 (K,), links to the slots of next_obs; 0 where the next row is in it
    newest: Mapping[str, np.ndarray]  # columns of rows that differ from what was given
    slots: np.ndarray  # int64 (M,), to be written
    units: list[np.ndarray]  # uint8 (?, bytes) each, together (M, bytes)
    back_from: np.ndarray  # int64, units whose `back` is set
    back_to: np.ndarray
    released: np.ndarray  # int64, slots that are free then
    num_free: int  # before
    heads: np.ndarray  # uint8 (K, F, bytes), the stacks of next_obs


class Once:
    """Slots beside the rows, and what links need to be made.

    Attributes:
        units: uint8 (P, unit bytes), slots, on the device.
        back: int32 (num_rows + P,), see above; of length 0 without frames.
        is_captured: A CUDA graph reads the slots where they are.
    """

    def __init__(self, table: Any, plan: Plan):
        layout = plan.layout
        self._table = weakref.proxy(table)  # which has this
        self._plan, self._frames = plan, layout.frames
        self._num_frames = 1 if layout.frames is None else layout.frames.num_frames
        self._raw = layout.obs_bytes  # of a unit, without padding
        if layout.frames is not None:
            self._raw = layout.frames.nbytes
        num_slots = plan.first_slots
        self.units = self._new_units(num_slots)
        self.back = np.zeros(0, np.int32)
        if layout.frames is not None:
            self.back = np.arange(plan.num_rows + num_slots, dtype=np.int32)
        self._first_slot = 0 if layout.frames is None else 1  # of zeros
        self._free = np.arange(num_slots, 0, -1) - 1
        self._num_free = num_slots - self._first_slot
        self._heads = np.zeros((plan.num_envs, self._num_frames, self._raw), np.uint8)
        self.is_captured = False
        self.back_twin: torch.Tensor | None = None  # on the device
        if table.is_staged and layout.frames is not None:
            self.back_twin = torch.from_numpy(self.back).to(table.device, copy=True)

    @property
    def nbytes(self) -> int:
        """Bytes held; frames count their rows' bookkeeping."""
        held = self.units.nbytes + self.back.nbytes + self._free.nbytes + self._heads.nbytes
        return held + (0 if self.back_twin is None else self.back_twin.nbytes)

    @property
    def num_slots(self) -> int:
        """P."""
        return len(self.units)

    @property
    def leads_back(self) -> torch.Tensor:
        """`back` where the rows are."""
        return torch.from_numpy(self.back) if self.back_twin is None else self.back_twin

    def _new_units(self, number: int) -> torch.Tensor:
        shape = number, self._plan.unit_bytes
        return torch.zeros(shape, dtype=torch.uint8, device=self._table.device)

    def _pack(self, arrays: Mapping[str, np.ndarray], prefix: str) -> np.ndarray:
        """Observations as uint8 (K, F or 1, bytes): leaves where they are in a row, or frames."""
        layout = self._plan.layout
        if self._frames is not None:
            array = arrays[f"{prefix}obs"]
            return array.reshape(*array.shape[:2], self._raw // array.itemsize).view(np.uint8)
        if len(layout.obs) == 1:
            array = np.ascontiguousarray(arrays[prefix + layout.obs[0]])
            return array.reshape(len(array), 1, -1).view(np.uint8)
        packed = np.zeros((len(arrays["rewards"]), 1, self._raw), np.uint8)
        for path in layout.obs:
            field, leaf = layout.fields[path], np.ascontiguousarray(arrays[prefix + path])
            begin = field.offset - layout.obs_at
            if leaf.size:
                flat = leaf.reshape(len(leaf), -1).view(np.uint8)
                packed[:, 0, begin : begin + field.nbytes] = flat
        return packed

    def prepare(self, arrays: Mapping[str, np.ndarray], placed: Placed) -> Prepared:
        """Compare observations with those before, and choose slots; nothing is changed but room.

        Raises:
            BufferMemoryError: There is no memory for more slots; nothing was changed.
            BufferMisuseError: A stack does not go on from the one before it; nothing was changed.
        """
        newest: dict[str, np.ndarray] = {}
        if self._frames is not None:
            obs, heads = self.complete(self._frames, arrays, placed)
            following = heads
            frame = np.ascontiguousarray(obs[:, -1]).view(self._frames.dtype)
            newest = {"obs": frame.reshape(len(obs), *self._frames.shape)}
            is_joined = placed.is_joined
        else:
            obs, following = self._pack(arrays, ""), self._pack(arrays, "next_")
            heads = following
            is_joined = placed.is_joined & self._are_equal(obs, following, placed)
        count, previous, num_rows = len(obs), placed.previous, self._plan.num_rows
        is_needed = np.ones(count, np.bool_)
        if previous is not None:
            is_needed[previous[is_joined & (previous >= 0)]] = False
        needed = np.flatnonzero(is_needed)
        starts = self._starts(placed, is_joined) if self._frames is not None else needed[:0]
        self.reserve(len(needed) + len(starts) * (self._num_frames - 1))
        slots = self._free[self._num_free - len(needed) : self._num_free]
        codes = np.zeros(count, np.int32)
        codes[needed] = num_rows + 1 + slots
        units, back_from, back_to = [following[needed, -1]], slots[:0], slots[:0]
        if self._frames is not None:
            slots, back_from, back_to = self._lead_back(obs, placed, starts, needed, slots, units)
        released = self._released(placed, is_joined)
        return Prepared(
            is_joined, codes, newest, slots, units, back_from, back_to, released, self._num_free,
            heads,
        )  # fmt: skip

    def _are_equal(self, obs: np.ndarray, following: np.ndarray, placed: Placed) -> np.ndarray:
        """Whether each observation is, byte for byte, the next one of the row before."""
        before = self._heads[placed.ids]
        if (previous := placed.previous) is not None:
            has = previous >= 0
            before[has] = following[previous[has]]
        return (obs == before).all((1, 2))

    def _released(self, placed: Placed, is_joined: np.ndarray) -> np.ndarray:
        """Slots of rows that are overwritten, and of rows before that are followed now."""
        table, num_rows = self._table, self._plan.num_rows
        rows = placed.rows
        links = table.links[rows].astype(np.int64) - 1
        found = [links[links >= num_rows] - num_rows]
        follows = is_joined if placed.previous is None else is_joined & (placed.previous < 0)
        found.append(table.envs["slot"][placed.ids[follows]].astype(np.int64))
        if self._frames is not None:
            found += self._chains(self.back, rows)
        return np.concatenate(found)

    def _chains(self, back: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """Slots that lead back from rows which are the first of their stacks; int64 each."""
        found, num_rows = [], self._plan.num_rows
        units = back[rows].astype(np.int64)
        for _ in range(self._num_frames - 1):
            units = units[units > num_rows]  # behind the one of zeros
            if not len(units):
                break
            found.append(units - num_rows)
            before = back[units].astype(np.int64)
            units = before[before != units]
        return found

    def check_links(self, found: Mapping[str, np.ndarray], links: np.ndarray) -> None:
        """Raise BufferMisuseError if two rows of a state have the same slot.

        Args:
            found: See `check`.
            links: int64 (num_rows,), 0 in rows that hold nothing.
        """
        if "back" not in found:
            return
        num_rows = self._plan.num_rows
        used = [links[links > num_rows] - 1 - num_rows]
        used += self._chains(found["back"], np.flatnonzero(links))
        slots = np.concatenate(used)
        if len(np.unique(slots)) < len(slots):
            raise contradiction("two rows lead back to the same frame")

    def reserve(self, number: int) -> None:
        """See to it that so many slots are free; raise as `resize`."""
        missing = number - self._num_free
        if missing > 0:
            self.resize(self.num_slots + max(missing, self.num_slots))

    def resize(self, number: int, *, is_asked: bool = False) -> None:
        """Grow to a number of slots; the new ones are free.

        Raises:
            BufferMemoryError: They would not fit into free memory; nothing was changed.
            BufferMisuseError: They would have to move, and a graph reads them; nothing was changed.
        """
        before = self.num_slots
        if self.is_captured and not is_asked:
            raise BufferMisuseError(
                f"{number} final observations have to be kept, but a CUDA graph was captured "
                f"that reads the {before} there is room for where they lie; call "
                "reserve_final_obs(number) before the capture, or now, and capture again"
            )
        size = number * (self._plan.unit_bytes + 8)
        what = "final observations" if self._frames is None else "further frames"
        with allocation(f"{number} {what}", size, self._table.device, _ADVICE):
            units = self._new_units(number)
            units[:before] = self.units
            free = np.zeros(number, np.int64)
            back, twin = self.back, self.back_twin
            if self._frames is not None:
                back = np.arange(self._plan.num_rows + number, dtype=np.int32)
                back[: len(self.back)] = self.back
                twin = None if twin is None else torch.from_numpy(back).to(twin.device, copy=True)
        added = number - before
        free[:added] = np.arange(number, before, -1) - 1  # below those that are taken first
        free[added : added + self._num_free] = self._free[: self._num_free]
        self.units, self.back, self.back_twin, self.is_captured = units, back, twin, False
        self._free, self._num_free = free, added + self._num_free

    def write(self, prepared: Prepared) -> Mapping[str, np.ndarray]:
        """Write slots and ways back; return the columns of rows that differ from those given."""
        units = prepared.units
        packed = units[0] if len(units) == 1 else np.concatenate(units)
        if self._table.is_staged:
            whole = np.zeros((len(packed), self.units.shape[1]), np.uint8)
            whole[:, : self._raw] = packed
            where = torch.from_numpy(prepared.slots).to(self.units.device)
            values = torch.from_numpy(whole.view(np.int64)).to(self.units.device)
            self.units.view(torch.int64).index_copy_(0, where, values)
        else:
            self.units[:, : self._raw].numpy()[prepared.slots] = packed
        if len(prepared.back_from):
            self.back[prepared.back_from] = prepared.back_to
            if self.back_twin is not None:
                where = torch.from_numpy(prepared.back_from).to(self.back_twin.device)
                values = torch.from_numpy(prepared.back_to.astype(np.int32))
                self.back_twin.index_copy_(0, where, values.to(self.back_twin.device))
        return prepared.newest

    def finish(self, prepared: Prepared, ids: np.ndarray) -> None:
        """Take slots off the free ones; heads are those after the add. Twice does no harm."""
        left = prepared.num_free - len(prepared.slots)
        stop = left + len(prepared.released)
        self._free[left:stop] = prepared.released
        self._num_free = stop
        self._heads[ids] = prepared.heads  # of equal ids the last stays

    # On the device, without frames.

    def pack_there(self, columns: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
        """As `_pack`, of tensors on the device: int64 (K, words)."""
        layout, count = self._plan.layout, len(columns["rewards"])
        shape = count, self.units.shape[1]
        packed = torch.zeros(shape, dtype=torch.uint8, device=self.units.device)
        for path in layout.obs:
            field, leaf = layout.fields[path], columns[prefix + path]
            begin = field.offset - layout.obs_at
            if field.nbytes:
                flat = leaf.reshape(count, -1).contiguous().view(torch.uint8)
                packed[:, begin : begin + field.nbytes] = flat
        return packed.view(torch.int64)

    def free_slots(self) -> tuple[np.ndarray, int]:
        """The stack of free slots int64 (P,), and how many there are."""
        return self._free, self._num_free

    def take_back(self, free: np.ndarray, num_free: int, slots: torch.Tensor) -> None:
        """Take over the stack, and the newest observations of environments from their slots."""
        self._free[...], self._num_free = free, num_free
        newest = self.units.index_select(0, slots)[:, : self._raw]
        self._heads[:, 0] = newest.cpu().numpy()

    # Frames.

    def _starts(self, placed: Placed, is_joined: np.ndarray) -> np.ndarray:
        """Which of the K rows do not lead back to the row before."""
        gap = placed.numbers - placed.before
        return np.flatnonzero(~(is_joined & (gap <= self._plan.max_gap)))

    def complete(
        self, frames: FrameLayout, arrays: Mapping[str, np.ndarray], placed: Placed
    ) -> tuple[np.ndarray, np.ndarray]:
        """The whole stacks of obs and next_obs, uint8 (K, F, bytes), where frames were given.

        Raises:
            BufferMisuseError: A stack does not go on from the one before it.
        """
        obs, following = self._pack(arrays, ""), self._pack(arrays, "next_")
        number, given, after = self._num_frames, obs.shape[1], following.shape[1]
        if given < after:
            raise BufferMisuseError(
                "next_obs has stacks, but obs the newest frames alone; give stacks of both, or "
                "frames of both"
            )
        whole = obs if frames.is_checked else obs.copy()
        if given < number:
            whole = np.empty((len(obs), number, self._raw), np.uint8)
            whole[:, : number - 1] = 0 if frames.pads_zeros else obs
            whole[:, -1] = obs[:, 0]
        heads = following if after == number else np.empty_like(whole)
        previous = placed.previous
        waves = [slice(None)] if previous is None else _waves(previous)
        for wave in waves:
            before = self._heads[placed.ids[wave]]
            if previous is not None and wave is not waves[0]:
                before = heads[previous[wave]]
            is_open = placed.is_open[wave]
            if given < number or not frames.is_checked:
                part = whole[wave]
                part[is_open] = before[is_open]  # the newest is the same if that is checked
                whole[wave] = part
            if frames.is_checked:
                is_same = (obs[wave] == before[:, number - given :]).all(2)
                wrong = is_open & ~is_same.all(1)
                if wrong.any():
                    k = int(np.argmax(wrong))
                    row = int(np.arange(len(obs))[wave][k])
                    frame = number - given + int(np.argmin(is_same[k]))
                    raise BufferMisuseError(
                        f"row {row}, env {placed.ids[row]}: frame {frame} of obs is not that of "
                        "the next_obs added before, in the same episode. If the env was reset, "
                        "call cut_episodes; else give what the env returned, step by step"
                    )
            if after < number:
                part = heads[wave]
                part[:, :-1], part[:, -1] = whole[wave][:, 1:], following[wave][:, 0]
                heads[wave] = part
        if frames.is_checked and after == number > 1:
            is_same = (following[:, :-1] == whole[:, 1:]).all(2)
            if not is_same.all():
                row, frame = np.argwhere(~is_same)[0].tolist()
                raise BufferMisuseError(
                    f"row {row}, env {placed.ids[row]}: {_not_moved_on(frames, frame)}"
                )
        return whole, heads

    def _lead_back(
        self,
        stacks: np.ndarray,
        placed: Placed,
        starts: np.ndarray,
        needed: np.ndarray,
        slots: np.ndarray,
        units: list[np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lead from each new row and slot to the frame before; frames before rows get slots, too.

        Returns:
            All slots that are to be written, and from where to where `back` leads.
        """
        num_rows, number = self._plan.num_rows, self._num_frames
        leads_back = np.ones(len(stacks), np.bool_)
        leads_back[starts] = False
        found_from = [placed.rows[leads_back], num_rows + slots]
        found_to = [placed.before_rows[leads_back], placed.rows[needed]]
        taken = self._num_free - len(needed)
        more: list[int] = []
        for k in starts.tolist():
            stack, unit = stacks[k], int(placed.rows[k])
            chain = [unit]
            oldest = number - 1  # of the frames that are stored
            first = 0
            while first + 1 < number and (stack[first] == stack[first + 1]).all():
                first += 1
            is_zero = first < number - 1 and not stack[first].any()
            while oldest > first + is_zero:
                oldest -= 1
                taken -= 1
                slot = int(self._free[taken])
                more.append(slot)
                units.append(stack[oldest][None])
                chain.append(num_rows + slot)
            chain.append(num_rows if is_zero else chain[-1])
            found_from.append(np.array(chain[:-1]))
            found_to.append(np.array(chain[1:]))
        slots = np.concatenate([slots, np.array(more, np.int64)])
        return slots, np.concatenate(found_from), np.concatenate(found_to)

    # States, and putting right.

    def state(self) -> dict[str, np.ndarray]:
        """What does not follow from the rows."""
        found = {"units": self.units.cpu().numpy(), "heads": self._heads}
        return {**found, "back": self.back} if self._frames is not None else found

    def check(self, state: Mapping[str, np.ndarray]) -> None:
        """Raise BufferMisuseError if the same of a state does not fit."""
        num_slots, back = len(state["units"]), state.get("back")
        if not self._plan.first_slots <= num_slots <= MAX_SLOTS:
            raise contradiction(f"it has {num_slots} observations beside its rows")
        if back is not None and (
            len(back) != self._plan.num_rows + num_slots
            or not 0 <= back.min() <= back.max() < len(back)
        ):
            raise contradiction("it has frames that lead to none")
        self._check_bools(state)

    def _check_bools(self, found: Mapping[str, np.ndarray]) -> None:
        layout = self._plan.layout
        for field in (layout.fields[path] for path in layout.obs):
            if field.dtype == np.bool_:
                begin = field.offset - layout.obs_at
                for name in ("units", "heads"):
                    check_bools(name, [found[name][..., begin : begin + field.nbytes]])

    def take(self, found: Mapping[str, np.ndarray]) -> None:
        """Take over what was checked; `recover` comes next."""
        number = len(found["units"])
        if number > self.num_slots:
            self.resize(number)
        self.units.zero_()
        self.units[:number].copy_(torch.from_numpy(np.array(found["units"])))
        self._heads[...] = found["heads"]
        if self._frames is not None:
            num_back = self._plan.num_rows + number
            self.back[:num_back] = found["back"]
            self.back[num_back:] = np.arange(num_back, len(self.back))
            if self.back_twin is not None:
                self.back_twin.copy_(torch.from_numpy(self.back))

    def recover(self, links: np.ndarray) -> None:
        """Find out which slots are free, when the links of rows are right.

        Args:
            links: int32 (num_rows,), 0 in rows that hold nothing.
        """
        num_rows, is_used = self._plan.num_rows, np.zeros(self.num_slots, np.bool_)
        is_used[: self._first_slot] = True
        led = links[links > num_rows].astype(np.int64) - 1 - num_rows
        is_used[led] = True
        if self._frames is not None:
            is_held, rows = links != 0, np.arange(num_rows, dtype=np.int32)
            # The slots of rows that hold nothing are free: their next add must not free them again.
            self.back[:num_rows] = np.where(is_held, self.back[:num_rows], rows)
            if self.back_twin is not None:
                self.back_twin.copy_(torch.from_numpy(self.back))
            for found in self._chains(self.back, rows[is_held]):
                is_used[found] = True
        free = np.flatnonzero(~is_used)[::-1]
        self._free[: len(free)], self._num_free = free, len(free)


def _waves(previous: np.ndarray) -> list[np.ndarray]:
    """Places whose previous ones are in the wave before; the first have none."""
    depth = np.zeros(len(previous), np.int64)
    for k in np.flatnonzero(previous >= 0).tolist():
        depth[k] = depth[previous[k]] + 1
    order = np.argsort(depth, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(depth[order])) + 1)


def _not_moved_on(layout: FrameLayout, frame: int) -> str:
    return (
        f"frame {frame} of next_obs is not frame {frame + 1} of obs. Stacks of {layout.num_frames} "
        f"frames, oldest first along axis {layout.axis} of {layout.stack_shape}, move on by one "
        "frame per step; name their axis, or make the buffer without frame_stack"
    )


def first_break(layout: FrameLayout, stacks: np.ndarray) -> tuple[int, str] | None:
    """Find the first step of an episode whose next stack is not its own, moved on by a frame.

    Args:
        layout: Of frames and stacks.
        stacks: (T + 1, *stack_shape), of the dtype of frames.

    Returns:
        The step and what is wrong with it, or None.
    """
    frames: Any = np.ascontiguousarray(layout.split(stacks))
    frames = frames.reshape(*frames.shape[:2], -1).view(np.uint8)
    is_same = (frames[1:, :-1] == frames[:-1, 1:]).all(2)
    if is_same.all():
        return None
    step, frame = np.argwhere(~is_same)[0].tolist()
    return step, _not_moved_on(layout, frame)
