"""Observations stored once: the rows, or slots beside the rows, that hold the next ones and stacks.

A *unit* is an observation, or a frame of a stack of F. Row k has unit k, the newest of its obs;
slot s beside the rows has unit num_rows + s. The link of a row leads to the newest unit of its
next_obs: the unit of the row that follows, once that row is there and begins with the same bytes,
else a slot of its own. With frames, a row also lists the units of the F - 1 older frames of its
obs; the list of its next_obs is the same, shifted by one. These units are in the rows before it, or
in slots that belong to the row that begins an episode. Equal frames share a unit; slot 0 is zeros.
A row whose obs differs from the next_obs of the row before it begins anew, like an episode.

One code path serves NumPy on hosts and torch on devices, with operations of fixed shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.errors import BufferMisuseError
from buffers.core.memory import allocation
from buffers.core.state import check_bools, contradiction
from buffers.replay.plan import Plan

__all__ = ["Chosen", "Once", "Placed"]

_MAX_SLOTS = 2**24  # links are 32-bit
_ADVICE = "use a smaller capacity, or store_next=True if most transitions end an episode"


class Placed(NamedTuple):
    """Rows of the K transitions of an add, and the rows before; arrays, or tensors if staged."""

    ids: Any  # int64 (K,), environments
    numbers: Any  # int64 (K,), in their rings
    rows: Any  # int64 (K,)
    before_rows: Any  # int64 (K,), the row before of the same env; undefined if there is none
    previous: Any  # int64 (K,), index in this add of the row before, or -1
    following: Any  # int64 (K,), index of the next row of the same env, or -1
    newest: Any  # int64 (K,), index of the last row of the same env
    is_over: Any  # bool (K,), the episode ends with this row
    is_open: Any  # bool (K,), the episode of the row before goes on
    is_joined: Any  # bool (K,), is_open, and the row before is still there
    is_near: Any  # bool (K,), is_joined, and frames of the row before outlast this row
    ends: Any  # int64 (R,), the new `committed`


class Chosen(NamedTuple):
    """Changes that an add of K rows will make."""

    is_joined: Any  # bool (K,), continues the row before, whose next_obs equals its obs
    codes: Any  # int32 (K,), links of the rows
    older: Any  # int32 (K, F - 1), units of the older frames of obs
    heads: Any  # uint8 (K, F, bytes), the stacks of next_obs
    number: Any  # slots taken


class Once:
    """Slots beside the rows, and the choice of links to them.

    Attributes:
        units: uint8 (P + 1, unit bytes), slots, on the device; unneeded writes go to the last.
        free: int64 (P + 1,), a stack of free slots; unneeded writes go to the last element.
        num_free: int64 (1,), number of free slots.
        is_captured: A CUDA graph reads the slots, so they must not move.
    """

    def __init__(self, plan: Plan, device: torch.device, xp: Any):
        self._plan, self._device, self._frames, self._xp = plan, device, plan.layout.frames, xp
        self._num_frames, self._raw = plan.num_frames, plan.raw_bytes  # without padding
        self._first_slot, number = int(self._frames is not None), plan.first_slots  # one of zeros
        self.units = self._new_units(number)
        self.free = self.there(np.append(np.arange(number, 0, -1) - 1, 0))
        self.num_free = self.there(np.array([number - self._first_slot]))
        # The newest next_obs of each env, whole stacks.
        self._heads = self.there(np.zeros((plan.num_envs, self._num_frames, self._raw), np.uint8))
        self._least_free = number - self._first_slot  # a lower bound, known to the host
        self.is_captured = False

    def there(self, array: np.ndarray) -> Any:
        """The array itself, or as a tensor on the device of the rows."""
        return array if self._xp is np else torch.from_numpy(array).to(self._device)

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Zeros where the rows are; a CUDA graph can capture this."""
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
        """Observations as uint8 (K, F or 1, bytes): leaves laid out as in a row, or frames."""
        layout, xp, count = self._plan.layout, self._xp, len(arrays["rewards"])
        uint8: Any = torch.uint8 if xp is torch else np.uint8
        if self._frames is not None:
            array = arrays[f"{prefix}obs"]
            return array.reshape(*array.shape[:2], -1).view(uint8)
        packed = self._zeros((count, 1, self._raw), "uint8")
        for path in layout.obs:
            field, leaf = layout.fields[path], arrays[prefix + path]
            begin = field.offset - layout.obs_at
            if field.nbytes:
                leaf = leaf.contiguous() if xp is torch else np.ascontiguousarray(leaf)
                flat = leaf.reshape(count, -1).view(uint8)
                packed[:, 0, begin : begin + field.nbytes] = flat
        return packed

    def choose(
        self, arrays: Mapping[str, Any], placed: Placed, older: Any
    ) -> tuple[Chosen, dict[str, Any]]:
        """Compare obs with the next_obs before; choose and write slots that are still free.

        Returns also the columns that replace given ones. Raises BufferMemoryError if there is no
        memory for more slots; nothing was changed then.
        """
        xp, num_rows, last = self._xp, self._plan.num_rows, self._num_frames - 1
        previous, count, at_first = placed.previous, len(placed.previous), placed.previous < 0
        columns = {} if self._frames is None else {"obs": arrays["obs"][:, -1]}
        obs, heads = self._pack(arrays, ""), self._pack(arrays, "next_")
        before = xp.where(at_first[:, None, None], self._heads[placed.ids], heads[previous])
        is_joined = placed.is_joined & (obs == before).reshape(count, -1).all(1)
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
            row = placed.before_rows
            if k + 1 < last:
                row = xp.where(at_first, older[row][:, k + 1], found[k + 1][previous])
            found[k] = xp.where(goes_on, row, unit)
        new_older = self._zeros((count, last), "int32")
        for k, column in enumerate(found):
            new_older[:, k] = column
        contents = xp.concatenate([obs[:, :-1].reshape(-1, self._raw), heads[:, -1]])
        targets = xp.where(needed, slots, self.num_slots)
        if xp is np:
            targets, contents = targets[needed], contents[needed]
        units = self.units if xp is torch else self.units.numpy()
        units[targets, : self._raw] = contents
        int32 = codes.int() if xp is torch else codes.astype(np.int32)
        return Chosen(is_joined, int32, new_older, heads, ranks[-1]), columns

    def let_go(self, placed: Placed, chosen: Chosen, links: Any, older: Any) -> tuple[Any, Any]:
        """Slots int64 (M,), and whether the add removes the last link to them, bool (M,)."""
        xp, num_rows, rows, old = self._xp, self._plan.num_rows, placed.rows, older[placed.rows]
        is_outer = chosen.is_joined & (placed.previous < 0)
        slots = [links[rows] - 1, links[placed.before_rows] - 1, old.reshape(-1)]
        newest = old[:, -1:]  # tells which rows began an episode; equal frames share a slot
        is_own = ((newest == rows[:, None]) | (newest >= num_rows)) & (old > num_rows)
        is_own[:, :-1] &= old[:, :-1] != old[:, 1:]
        is_free = slots[0] >= num_rows, is_outer, is_own.reshape(-1)
        return xp.concatenate(slots) - num_rows, xp.concatenate(is_free)

    def commit(self, placed: Placed, chosen: Chosen, freed: Any, is_free: Any) -> None:
        """Take the chosen slots, and free those of `let_go`."""
        left = self.num_free - chosen.number
        places = self._xp.where(is_free, left + is_free.cumsum(0) - 1, self.num_slots)
        self.free[places] = freed if self._xp is np else freed.long()
        self.num_free[...] = left + is_free.sum()
        self._heads[placed.ids] = chosen.heads[placed.newest]

    # Room.

    def _reserve(self, number: int) -> None:
        """Ensure that `number` slots are free; raises like `resize`."""
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
        """Number of slots that suffices for any add of `count` rows, at most one ring.

        An add takes slots for its rows before it frees those of the rows that it overwrites.
        """
        return self._first_slot + self._num_frames * (self._plan.num_rows + count)

    def resize(self, number: int, *, is_asked: bool = False) -> None:
        """Grow to at least `number` slots; the new ones are free.

        Raises:
            BufferMemoryError: The memory is not free; nothing was changed.
            BufferMisuseError: A CUDA graph reads the slots, so they must not move; nothing changed.
        """
        before = self.num_slots
        if number <= before:
            return
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
            free = self._xp.concatenate([new, self.free])  # old slots are taken first
        self.units, self.free, self.is_captured = units, free, False
        self.num_free += number - before
        self._least_free += number - before

    # States.

    def state(self) -> dict[str, Any]:
        """Arrays that can't be computed from the rows."""
        free = self.free[: int(self.num_free[0])]
        return {"units": self.units[:-1], "free": free, "heads": self._heads}

    def check(self, state: Mapping[str, np.ndarray], links: np.ndarray, older: np.ndarray) -> None:
        """Raise BufferMisuseError unless the arrays of a saved `state` fit.

        `links` int32 (num_rows,) and `older` int32 (num_rows, F - 1) are 0 where no row is held.
        """
        units, layout, free = state["units"], self._plan.layout, state["free"]
        for field in (layout.fields[path] for path in layout.obs):
            if field.dtype == np.bool_:
                begin = field.offset - layout.obs_at
                for name in ("units", "heads"):
                    check_bools(name, [state[name][..., begin : begin + field.nbytes]])
        used = self._used(links, older)
        if (
            not self._plan.first_slots <= len(units) <= _MAX_SLOTS
            or (
                older.size
                and not 0 <= older.min() <= older.max() < self._plan.num_rows + len(units)
            )
            or (free.size and not 0 <= free.min() <= free.max() < len(units))
            or len(np.unique(used)) < len(used)
        ):
            raise contradiction("its rows and observations lead to none, or twice to the same")

    def _used(self, links: np.ndarray, older: np.ndarray) -> np.ndarray:
        """Slots in use, int64: of links, and of older frames of rows that begin an episode."""
        num_rows = self._plan.num_rows
        found = [links[links > num_rows].astype(np.int64) - 1 - num_rows]
        if older.size:
            own = older[(older[:, -1] >= num_rows) | (older[:, -1] == np.arange(num_rows))]
            is_own = own > num_rows  # without slot 0
            is_own[:, :-1] &= own[:, 1:] != own[:, :-1]
            found.append(own[is_own].astype(np.int64) - num_rows)
        return np.concatenate(found)

    def take(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over a checked state that fits into the slots; call `recount` afterwards."""
        self.units.zero_()
        self.units[: len(state["units"])].copy_(torch.from_numpy(np.array(state["units"])))
        self._heads[...] = self.there(np.array(state["heads"]))

    def recount(
        self, links: np.ndarray, older: np.ndarray, order: np.ndarray | None = None
    ) -> None:
        """Rebuild the stack of free slots from links and older units as in `check`.

        `order` int64 (M,), from a state, is the order of the stack: the last one is taken first.
        """
        is_free, ranks = np.ones(self.num_slots, np.bool_), np.zeros(self.num_slots, np.int64)
        is_free[: self._first_slot] = is_free[self._used(links, older)] = False
        free = np.flatnonzero(is_free)[::-1]
        if order is not None:
            ranks[order] = np.arange(1, len(order) + 1)
        free = free[np.argsort(ranks[free], kind="stable")]
        self.free[: len(free)] = self.there(free)
        self.num_free[...] = self._least_free = len(free)
