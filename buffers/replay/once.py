"""Observations stored once: which rows, or slots beside them, the next ones and stacks are in.

A *unit* is an observation, or a frame of a stack of F. Row k has unit k, the newest of its obs;
slot s beside the rows has unit num_rows + s. The link of a row leads to the unit that is the newest
of its next_obs: that of the row that follows, once that is there and begins with the same bytes,
else a slot of its own. With frames a row also has the units of the F - 1 older frames of its obs;
those of its next_obs are the same moved on by one. They are in the rows before it, or in slots that
belong to the row that begins an episode. Equal frames share a unit, and the first slot is zeros.

All is written once, for NumPy on hosts and torch on devices, in operations of fixed shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.errors import BufferMisuseError
from buffers.core.memory import allocation
from buffers.core.rows import FrameLayout
from buffers.core.state import check_bools, contradiction
from buffers.replay.plan import Plan

__all__ = ["Chosen", "Once", "Placed", "first_break"]

_MAX_SLOTS = 2**24  # links are 32-bit
_ADVICE = "use a smaller capacity, or store_next=True if most transitions end an episode"


class Placed(NamedTuple):
    """Where the K transitions of an add go, and what they follow; arrays, or tensors there."""

    ids: Any  # int64 (K,), environments
    numbers: Any  # int64 (K,), in their rings
    rows: Any  # int64 (K,)
    before_rows: Any  # int64 (K,), rows before of the same env, whatever if there is none
    previous: Any  # int64 (K,), the place of that in this add, or -1
    following: Any  # int64 (K,), the place of the next of the same env, or -1
    newest: Any  # int64 (K,), the place of the last of the same env
    is_over: Any  # bool (K,), what follows begins another episode
    is_open: Any  # bool (K,), the episode of the row before goes on
    is_joined: Any  # bool (K,), and that row is still there
    is_near: Any  # bool (K,), and so near that its frames are there as long as they are needed
    ends: Any  # int64 (R,), what `committed` will be


class Chosen(NamedTuple):
    """What an add of K rows is going to change."""

    is_joined: Any  # bool (K,), follows on the row before, which has the same unit
    codes: Any  # int32 (K,), links of the rows
    older: Any  # int32 (K, F - 1), units of the older frames of obs
    heads: Any  # uint8 (K, F, bytes), the stacks of next_obs
    number: Any  # of slots that are taken


class Once:
    """Slots beside the rows, and what links need to be made.

    Attributes:
        units: uint8 (P + 1, unit bytes), slots, on the device; the last is for what is not needed.
        free: int64 (P + 1,), a stack of free slots, and a place for what is not let go of.
        num_free: int64 (1,), how many there are.
        is_captured: A CUDA graph reads the slots where they are.
    """

    def __init__(self, plan: Plan, device: torch.device, xp: Any):
        frames, number = plan.layout.frames, plan.first_slots
        self._plan, self._device, self._frames, self._xp = plan, device, frames, xp
        self._num_frames = 1 if frames is None else frames.num_frames
        self._raw = plan.layout.obs_bytes if frames is None else frames.nbytes  # without padding
        self._first_slot = 0 if frames is None else 1  # of zeros
        self.units = self._new_units(number)
        self.free = self.there(np.append(np.arange(number, 0, -1) - 1, 0))
        self.num_free = self.there(np.array([number - self._first_slot]))
        shape = plan.num_envs if frames is not None else 0, self._num_frames, self._raw
        self._heads = self.there(np.zeros(shape, np.uint8))
        self._least_free = number - self._first_slot  # so many are, for certain
        self.is_captured = False

    def there(self, array: np.ndarray) -> Any:
        """The array where the rows are: itself, or a tensor."""
        return array if self._xp is np else torch.from_numpy(array).to(self._device)

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Zeros where the rows are, which a CUDA graph can make, too."""
        if self._xp is np:
            return np.zeros(shape, dtype)
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)

    def _new_units(self, number: int) -> torch.Tensor:
        shape = number + 1, self._plan.unit_bytes
        return torch.zeros(shape, dtype=torch.uint8, device=self._device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.units.nbytes + self.free.nbytes + self._heads.nbytes

    @property
    def num_slots(self) -> int:
        """P."""
        return len(self.units) - 1

    # Adding.

    def _pack(self, arrays: Mapping[str, Any], prefix: str) -> Any:
        """Observations as uint8 (K, F or 1, bytes): leaves where they are in a row, or frames."""
        layout, xp, count = self._plan.layout, self._xp, len(arrays["rewards"])
        uint8: Any = torch.uint8 if xp is torch else np.uint8
        if self._frames is not None:
            array = arrays[f"{prefix}obs"]
            return array.reshape(*array.shape[:2], -1).view(uint8)
        packed = self._zeros((count, 1, self._raw), "uint8")
        for path in layout.obs:
            field, leaf = layout.fields[path], arrays[prefix + path]
            begin = field.offset - layout.obs_at
            if field.nbytes and count:
                leaf = leaf.contiguous() if xp is torch else np.ascontiguousarray(leaf)
                flat = leaf.reshape(count, -1).view(uint8)
                packed[:, 0, begin : begin + field.nbytes] = flat
        return packed

    def choose(
        self, arrays: Mapping[str, Any], placed: Placed, links: Any, older: Any
    ) -> tuple[Chosen, dict[str, Any]]:
        """Compare observations with those before, and choose and write slots that are free still.

        Returns:
            See above, and columns of rows that differ from what was given.

        Raises:
            BufferMemoryError: There is no memory for more slots; nothing was changed.
            BufferMisuseError: A stack does not go on from the one before it; nothing was changed.
        """
        xp, frames, num_rows, last = (
            self._xp,
            self._frames,
            self._plan.num_rows,
            self._num_frames - 1,
        )
        previous, is_joined, columns = placed.previous, placed.is_joined, {}
        count, at_first = len(previous), placed.previous < 0
        if frames is not None:
            obs, heads = self.complete(frames, arrays, placed)
            columns["obs"] = self._framed(obs[:, -1], frames, arrays["obs"].dtype)
        else:
            obs, heads = self._pack(arrays, ""), self._pack(arrays, "next_")
            units = self.units if xp is torch else self.units.numpy()
            own = (links[placed.before_rows] - (num_rows + 1)).clip(0)
            before = xp.where(at_first[:, None], units[own][:, : self._raw], heads[previous, 0])
            is_joined = is_joined & (obs[:, 0] == before).all(1)
        goes_on = is_joined & placed.is_near
        is_other = (obs[:, :-1] != obs[:, 1:]).any(2)
        is_needed = is_other & (obs[:, :-1] != 0).any(2) & ~goes_on[:, None]
        is_followed = (placed.following >= 0) & is_joined[placed.following]
        needed = xp.concatenate([is_needed.reshape(-1), ~is_followed])
        ranks = needed.cumsum(0)
        self._reserve(len(needed) if xp is torch else int(ranks[-1]))
        slots = self.free[(self.num_free - ranks).clip(0)]
        of_frames, of_next = slots[: count * last].reshape(count, last), slots[count * last :]
        codes = xp.where(is_followed, placed.rows[placed.following], of_next + num_rows) + 1
        unit, found = placed.rows, [placed.before_rows] * last
        for k in range(last - 1, -1, -1):
            own = xp.where(is_needed[:, k], of_frames[:, k] + num_rows, num_rows)
            unit = xp.where(is_other[:, k], own, unit)
            before = placed.before_rows
            if k + 1 < last:
                of_row = older[placed.before_rows][:, k + 1]
                before = xp.where(at_first, of_row, found[k + 1][previous])
            found[k] = xp.where(goes_on, before, unit)
        new_older = self._zeros((count, last), "int32")
        for k, column in enumerate(found):
            new_older[:, k] = column
        contents = xp.concatenate([obs[:, :-1].reshape(-1, self._raw), heads[:, -1]])
        targets = xp.where(needed, slots, self.num_slots)
        if xp is np:
            targets, contents = targets[needed], contents[needed]
        self.write(targets, contents)
        int32 = codes.int() if xp is torch else codes.astype(np.int32)
        return Chosen(is_joined, int32, new_older, heads, ranks[-1]), columns

    def _framed(self, frames: Any, layout: FrameLayout, dtype: Any) -> Any:
        """Bytes (K, bytes) as frames (K, *shape)."""
        whole = frames.contiguous() if self._xp is torch else np.ascontiguousarray(frames)
        return whole.view(dtype).reshape(len(frames), *layout.shape)

    def complete(
        self, frames: FrameLayout, arrays: Mapping[str, Any], placed: Placed
    ) -> tuple[Any, Any]:
        """The whole stacks of obs and next_obs, uint8 (K, F, bytes), where frames were given.

        Raises BufferMisuseError if a stack does not go on from the one before it.
        """
        xp, number = self._xp, self._num_frames
        given, following = self._pack(arrays, ""), self._pack(arrays, "next_")
        size, after = given.shape[1], following.shape[1]
        if size < after:
            raise BufferMisuseError(
                "next_obs has stacks, but obs the newest frames alone; give stacks of both, or "
                "frames of both"
            )
        previous, heads, found = placed.previous, self._heads[placed.ids], []
        at_first, is_open = (flags[:, None] for flags in (previous < 0, placed.is_open))
        for k in range(number - 1, -1, -1):
            if after == number or not found:
                inner = following[previous][:, k if after == number else 0]
            else:
                inner = found[0][previous]
            first = given[:, k if size == number else 0]
            if size < number and frames.pads_zeros and k + 1 < number:
                first = first & 0
            before = xp.where(at_first, heads[:, k], inner)
            found.insert(0, xp.where(is_open, before, first))
        whole = xp.stack(found, 1)
        moved = following if after == number else xp.concatenate([whole[:, 1:], following], 1)
        if frames.is_checked:
            is_off = (given != whole[:, number - size :]).any(2) & is_open
            self._check(is_off, placed, lambda frame: (
                f"frame {frame + number - size} of obs is not that of the next_obs added before, "
                "in the same episode. If the env was reset, call cut_episodes; else give what the "
                "env returned, step by step"
            ))  # fmt: skip
            is_off = (moved[:, :-1] != whole[:, 1:]).any(2)
            self._check(is_off, placed, lambda frame: _not_moved_on(frames, frame))
        return whole, moved

    def _check(self, is_off: Any, placed: Placed, why: Callable[[int], str]) -> None:
        """Raise BufferMisuseError for the first frame that is wrong, of bool (K, F)."""
        if bool(is_off.any()):
            found = is_off if self._xp is np else is_off.cpu().numpy()
            row, frame = np.argwhere(found)[0].tolist()
            raise BufferMisuseError(f"row {row}, env {int(placed.ids[row])}: {why(frame)}")

    def write(self, slots: Any, contents: Any) -> None:
        """Write slots that are free still, int64 (M,)."""
        units = self.units if self._xp is torch else self.units.numpy()
        units[slots, : self._raw] = contents

    def let_go(self, placed: Placed, chosen: Chosen, links: Any, older: Any) -> tuple[Any, Any]:
        """Slots int64 (M,), and which of them nothing leads to behind the add, bool (M,)."""
        xp, num_rows, rows, old = self._xp, self._plan.num_rows, placed.rows, older[placed.rows]
        is_outer = chosen.is_joined & (placed.previous < 0)
        slots = [links[rows] - 1, links[placed.before_rows] - 1, old.reshape(-1)]
        newest = old[:, -1:]  # of rows that began an episode; equal frames share a slot
        is_own = ((newest == rows[:, None]) | (newest >= num_rows)) & (old > num_rows)
        is_own[:, :-1] &= old[:, :-1] != old[:, 1:]
        is_free = slots[0] >= num_rows, is_outer, is_own.reshape(-1)
        return xp.concatenate(slots) - num_rows, xp.concatenate(is_free)

    def commit(self, placed: Placed, chosen: Chosen, freed: Any, is_free: Any) -> None:
        """Take slots, and let go of others; see `let_go`."""
        left = self.num_free - chosen.number
        places = self._xp.where(is_free, left + is_free.cumsum(0) - 1, self.num_slots)
        self.free[places] = freed if self._xp is np else freed.long()
        self.num_free[...] = left + is_free.sum()
        if len(self._heads):
            self._heads[placed.ids] = chosen.heads[placed.newest]

    # Room.

    def _reserve(self, number: int) -> None:
        """See to it that so many slots are free; raise as `resize`."""
        if self._xp is np:
            self._least_free = int(self.num_free[0])
        elif self.num_slots >= self.enough(number // self._num_frames):
            return
        elif self._least_free < number:
            self._least_free = int(self.num_free)  # waits for the device
        if (missing := number - self._least_free) > 0:
            self.resize(self.num_slots + max(missing, self.num_slots))
        self._least_free -= number

    def enough(self, count: int) -> int:
        """Slots of which there are some free for any add of so many rows, one ring's at most.

        An add takes those of its rows before it lets go of those of the rows that it overwrites.
        """
        return self._first_slot + self._num_frames * (self._plan.num_rows + count)

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
        what = "final observations" if self._frames is None else "further frames"
        size = number * (self._plan.unit_bytes + 8)
        with allocation(f"{number} {what}", size, self._device, _ADVICE):
            units = self._new_units(number)
            units[:before] = self.units[:before]
            new = self.there(np.arange(number, before, -1) - 1)
            free = self._xp.concatenate([new, self.free])  # those that were are taken first
        self.units, self.free, self.is_captured = units, free, False
        self.num_free += number - before
        self._least_free += number - before

    # States.

    def state(self) -> dict[str, Any]:
        """What does not follow from the rows."""
        heads = {"heads": self._heads} if self._frames is not None else {}
        return {"units": self.units[:-1], "free": self.free[: int(self.num_free[0])], **heads}

    def check(self, state: Mapping[str, np.ndarray], links: np.ndarray, older: np.ndarray) -> None:
        """Raise BufferMisuseError if the same of a state does not fit.

        `links` int32 (num_rows,) and `older` int32 (num_rows, F - 1) are 0 where nothing is held.
        """
        units, layout = state["units"], self._plan.layout
        if not self._plan.first_slots <= len(units) <= _MAX_SLOTS:
            raise contradiction(f"it has {len(units)} observations beside its rows")
        for field in (layout.fields[path] for path in layout.obs):
            if field.dtype == np.bool_:
                begin = field.offset - layout.obs_at
                for name in ("units", "heads"):
                    if name in state:
                        check_bools(name, [state[name][..., begin : begin + field.nbytes]])
        if older.size and not 0 <= older.min() <= older.max() < self._plan.num_rows + len(units):
            raise contradiction("it has frames that lead to none")
        used = self._used(links, older)
        if len(np.unique(used)) < len(used):
            raise contradiction("two rows lead back to the same frame")
        free = state["free"]
        if free.size and not 0 <= free.min() <= free.max() < len(units):
            raise contradiction("it has free places that there are not")

    def _used(self, links: np.ndarray, older: np.ndarray) -> np.ndarray:
        """Slots that belong to rows, int64: to what they lead to, or their older frames."""
        num_rows = self._plan.num_rows
        found = [links[links > num_rows].astype(np.int64) - 1 - num_rows]
        if older.size:
            own = older[(older[:, -1] >= num_rows) | (older[:, -1] == np.arange(num_rows))]
            is_own = own > num_rows  # behind the one of zeros
            is_own[:, :-1] &= own[:, 1:] != own[:, :-1]
            found.append(own[is_own].astype(np.int64) - num_rows)
        return np.concatenate(found)

    def make_room(self, number: int) -> None:
        """See to it that there are so many slots; raise as `resize`."""
        if number > self.num_slots:
            self.resize(number)

    def take(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what was checked, for which there is room; see `check`. `recount` follows."""
        number = len(state["units"])
        self.units.zero_()
        self.units[:number].copy_(torch.from_numpy(np.array(state["units"])))
        if "heads" in state:
            self._heads[...] = self.there(np.array(state["heads"]))

    def recount(
        self, links: np.ndarray, older: np.ndarray, order: np.ndarray | None = None
    ) -> None:
        """Find out which slots are free, from links and units as of `check`.

        `order` int64 (M,), as of a state, is that in which they are taken, the last first.
        """
        is_free, ranks = np.ones(self.num_slots, np.bool_), np.zeros(self.num_slots, np.int64)
        is_free[: self._first_slot] = is_free[self._used(links, older)] = False
        free = np.flatnonzero(is_free)[::-1]
        if order is not None:
            ranks[order] = np.arange(1, len(order) + 1)
        free = free[np.argsort(ranks[free], kind="stable")]
        self.free[: len(free)] = self.there(free)
        self.num_free[...] = self._least_free = len(free)


def _not_moved_on(layout: FrameLayout, frame: int) -> str:
    return (
        f"frame {frame} of next_obs is not frame {frame + 1} of obs. Stacks of {layout.num_frames} "
        f"frames, oldest first along axis {layout.axis} of {layout.stack_shape}, move on by one "
        "frame per step; name their axis, or make the buffer without frame_stack"
    )


def first_break(layout: FrameLayout, stacks: np.ndarray) -> tuple[int, str] | None:
    """Find the first step of an episode whose next stack is not its own, moved on by a frame.

    Of stacks (T + 1, *stack_shape), of the dtype of frames: the step and what is wrong, or None.
    """
    frames: Any = np.ascontiguousarray(layout.split(stacks))
    frames = frames.reshape(*frames.shape[:2], -1).view(np.uint8)
    is_same = (frames[1:, :-1] == frames[:-1, 1:]).all(2)
    if is_same.all():
        return None
    step, frame = np.argwhere(~is_same)[0].tolist()
    return step, _not_moved_on(layout, frame)
