"""Observations stored once: which rows, or slots beside them, the next ones and stacks are in.

A *unit* is an observation, or a frame of a stack of F. Row k has unit k, the newest of its obs;
slot s beside the rows has unit num_rows + s. The link of a row leads to the unit that is the newest
of its next_obs: that of the row that follows, once that is there and begins with the same bytes,
else a slot of its own. With frames a row also has the units of the F - 1 older frames of its obs;
those of its next_obs are the same moved on by one. They are in the rows before it, or in slots that
belong to the row that begins an episode. Equal frames share a unit, and the first slot is zeros.

An add chooses free slots, writes them while they are still free, and takes them with all else that
it changes in one compiled call, `commit_rows`: so one that is interrupted has changed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.compiling import njit
from buffers.core.errors import BufferMisuseError
from buffers.core.memory import allocation
from buffers.core.rows import FrameLayout
from buffers.core.state import check_bools, contradiction
from buffers.replay.plan import Plan

__all__ = ["Chosen", "Once", "Placed", "first_break"]

_MAX_SLOTS = 2**24  # links are 32-bit
_ADVICE = "use a smaller capacity, or store_next=True if most transitions end an episode"


class Placed(NamedTuple):
    """Where the K transitions of an add go, and what they follow."""

    ids: np.ndarray  # int64 (K,), environments
    rows: np.ndarray  # int64 (K,)
    before_rows: np.ndarray  # int64 (K,), the row before of the same env, or -1
    previous: np.ndarray  # int64 (K,), its place in this add, or -1
    is_open: np.ndarray  # bool (K,), the episode of the row before goes on
    is_joined: np.ndarray  # bool (K,), and that row is still there
    is_near: np.ndarray  # bool (K,), and so near that its frames are as long as they are needed
    envs: np.ndarray  # ENVS (N,), what the environments will be
    ends: np.ndarray  # int64 (R,), what `committed` will be


class Chosen(NamedTuple):
    """What an add of K rows is going to change."""

    is_joined: np.ndarray  # bool (K,), follows on the row before, which has the same unit
    codes: np.ndarray  # int32 (K,), links of the rows
    older: np.ndarray  # int32 (K, F - 1), units of the older frames of obs
    newest: Mapping[str, np.ndarray]  # columns of rows that differ from what was given
    slots: np.ndarray  # int64 (M,)
    units: np.ndarray  # uint8 (M, bytes), what they are to hold
    heads: np.ndarray  # uint8 (K, F, bytes), the stacks of next_obs


class Once:
    """Slots beside the rows, and what links need to be made.

    Attributes:
        units: uint8 (P, unit bytes), slots, on the device.
        free: int64 (P,), a stack of free slots.
        num_free: int64 (1,), how many there are.
        is_captured: A CUDA graph reads the slots where they are.
    """

    def __init__(self, plan: Plan, device: torch.device):
        frames, number = plan.layout.frames, plan.first_slots
        self._plan, self._device, self._frames = plan, device, frames
        self._num_frames = 1 if frames is None else frames.num_frames
        self._raw = plan.layout.obs_bytes if frames is None else frames.nbytes  # without padding
        self._first_slot = 0 if frames is None else 1  # of zeros
        self.free = np.arange(number, 0, -1) - 1
        self.num_free = np.array([number - self._first_slot])
        self._heads = np.zeros((plan.num_envs, self._num_frames, self._raw), np.uint8)
        self.units = self._new_units(number)
        self.is_captured = False

    def _new_units(self, number: int) -> torch.Tensor:
        shape = number, self._plan.unit_bytes
        return torch.zeros(shape, dtype=torch.uint8, device=self._device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.units.nbytes + self.free.nbytes + self._heads.nbytes

    @property
    def num_slots(self) -> int:
        """P."""
        return len(self.units)

    # Adding.

    def _pack(self, arrays: Mapping[str, np.ndarray], prefix: str) -> np.ndarray:
        """Observations as uint8 (K, F or 1, bytes): leaves where they are in a row, or frames."""
        layout, count = self._plan.layout, len(arrays["rewards"])
        if self._frames is not None:
            array = arrays[f"{prefix}obs"]
            return array.reshape(*array.shape[:2], self._raw // array.itemsize).view(np.uint8)
        packed = np.zeros((count, 1, self._raw), np.uint8)
        for path in layout.obs:
            field, leaf = layout.fields[path], np.ascontiguousarray(arrays[prefix + path])
            begin = field.offset - layout.obs_at
            if leaf.size:
                flat = leaf.reshape(count, -1).view(np.uint8)
                packed[:, 0, begin : begin + field.nbytes] = flat
        return packed

    def choose(
        self, arrays: Mapping[str, np.ndarray], placed: Placed, older_of_rows: np.ndarray
    ) -> Chosen:
        """Compare observations with those before, and choose slots; nothing is changed but room.

        Raises:
            BufferMemoryError: There is no memory for more slots; nothing was changed.
            BufferMisuseError: A stack does not go on from the one before it; nothing was changed.
        """
        frames, previous, is_joined = self._frames, placed.previous, placed.is_joined
        newest: dict[str, np.ndarray] = {}
        if frames is not None:
            obs, heads = self.complete(frames, arrays, placed)
            frame = np.ascontiguousarray(obs[:, -1]).view(frames.dtype)
            newest = {"obs": frame.reshape(len(obs), *frames.shape)}
        else:
            obs, heads = self._pack(arrays, ""), self._pack(arrays, "next_")
            before, is_inner = self._heads[placed.ids], previous >= 0
            before[is_inner] = heads[previous[is_inner]]
            is_joined = is_joined & (obs == before).all((1, 2))
        count, num_rows = len(obs), self._plan.num_rows
        codes = np.zeros(count, np.int32)
        older = np.zeros((count, self._num_frames - 1), np.int32)
        sources = np.zeros((count * self._num_frames, 2), np.int64)
        where = placed.rows, placed.before_rows, previous
        flags = is_joined, placed.is_near
        number = choose_units(obs, where, flags, older_of_rows, num_rows, (codes, older, sources))
        self.reserve(number)
        free = int(self.num_free[0])
        slots = self.free[free - number : free].copy()
        for links, first in ((codes, num_rows + 1), (older, num_rows)):
            links[links < 0] = slots[-1 - links[links < 0]] + first
        row, frame = sources[:number].T
        is_head = frame == self._num_frames
        units = obs[row, np.minimum(frame, self._num_frames - 1)]
        units[is_head] = heads[row[is_head], -1]
        return Chosen(is_joined, codes, older, newest, slots, units, heads)

    def complete(
        self, frames: FrameLayout, arrays: Mapping[str, np.ndarray], placed: Placed
    ) -> tuple[np.ndarray, np.ndarray]:
        """The whole stacks of obs and next_obs, uint8 (K, F, bytes), where frames were given.

        Raises BufferMisuseError if a stack does not go on from the one before it.
        """
        given = self._pack(arrays, ""), self._pack(arrays, "next_")
        if given[0].shape[1] < given[1].shape[1]:
            raise BufferMisuseError(
                "next_obs has stacks, but obs the newest frames alone; give stacks of both, or "
                "frames of both"
            )
        whole, heads = np.empty((2, len(given[0]), self._num_frames, self._raw), np.uint8)
        options = frames.is_checked, frames.pads_zeros
        where = placed.ids, placed.previous, placed.is_open
        wrong, row, frame = complete_stacks(given, self._heads, where, options, whole, heads)
        if wrong:
            raise BufferMisuseError(
                f"row {row}, env {placed.ids[row]}: "
                + (
                    f"frame {frame} of obs is not that of the next_obs added before, in the same "
                    "episode. If the env was reset, call cut_episodes; else give what the env "
                    "returned, step by step"
                    if wrong == 1
                    else _not_moved_on(frames, frame)
                )
            )
        return whole, heads

    def reserve(self, number: int) -> None:
        """See to it that so many slots are free; raise as `resize`."""
        missing = number - int(self.num_free[0])
        if missing > 0:
            self.resize(self.num_slots + max(missing, self.num_slots))

    def resize(self, number: int, *, is_asked: bool = False) -> None:
        """Grow to a number of slots; the new ones are free.

        Raises:
            BufferMemoryError: They would not fit into free memory; nothing was changed.
            BufferMisuseError: They would have to move, and a graph reads them; nothing was changed.
        """
        before, num_free = self.num_slots, int(self.num_free[0])
        if self.is_captured and not is_asked:
            raise BufferMisuseError(
                f"{number} final observations have to be kept, but a CUDA graph was captured "
                f"that reads the {before} there is room for where they lie; call "
                "reserve_final_obs(number) before the capture, or now, and capture again"
            )
        what = "final observations" if self._frames is None else "further frames"
        added, size = number - before, number * (self._plan.unit_bytes + 8)
        with allocation(f"{number} {what}", size, self._device, _ADVICE):
            units = self._new_units(number)
            units[:before] = self.units
            free = np.zeros(number, np.int64)
        free[:added] = np.arange(number, before, -1) - 1  # below those that are taken first
        free[added : added + num_free] = self.free[:num_free]
        self.units, self.free, self.is_captured = units, free, False
        self.num_free = np.array([added + num_free])

    def write(self, chosen: Chosen) -> None:
        """Write the slots that an add has chosen, and that are free still."""
        if len(chosen.slots):
            where = torch.from_numpy(chosen.slots).to(self._device)
            values = torch.from_numpy(chosen.units).to(self._device)
            self.units[:, : self._raw].index_copy_(0, where, values)

    def commit(self, placed: Placed, chosen: Chosen, table: tuple[np.ndarray, ...]) -> None:
        """Let rows and slots that were written count.

        `table` is written: links, older units, ENVS (N,) and committed int64 (R,).
        """
        commit_rows(
            tuple(placed[:4]), (placed.envs, placed.ends), tuple(chosen[:3]),
            (chosen.slots, chosen.heads), self._plan.num_rows, table,
            (self.free, self.num_free, self._heads),
        )  # fmt: skip

    # On the device, without frames.

    def pack_there(self, columns: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
        """As `_pack`, of tensors on the device: int64 (K, words)."""
        layout, count = self._plan.layout, len(columns["rewards"])
        shape = count, self.units.shape[1]
        packed = torch.zeros(shape, dtype=torch.uint8, device=self._device)
        for path in layout.obs:
            field, leaf = layout.fields[path], columns[prefix + path]
            begin = field.offset - layout.obs_at
            if field.nbytes:
                flat = leaf.reshape(count, -1).contiguous().view(torch.uint8)
                packed[:, begin : begin + field.nbytes] = flat
        return packed.view(torch.int64)

    def take_back(self, free: np.ndarray, num_free: int, slots: torch.Tensor) -> None:
        """Take over the stack, and the newest observations of environments from their slots."""
        self.free[...], self.num_free[0] = free, num_free
        newest = self.units.index_select(0, slots)[:, : self._raw]
        self._heads[:, 0] = newest.cpu().numpy()

    # States.

    def state(self) -> dict[str, np.ndarray]:
        """What does not follow from the rows."""
        return {"units": self.units.cpu().numpy(), "heads": self._heads}

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
                    check_bools(name, [state[name][..., begin : begin + field.nbytes]])
        if older.size and not 0 <= older.min() <= older.max() < self._plan.num_rows + len(units):
            raise contradiction("it has frames that lead to none")
        used = self._used(links, older)
        if len(np.unique(used)) < len(used):
            raise contradiction("two rows lead back to the same frame")

    def _used(self, links: np.ndarray, older: np.ndarray) -> np.ndarray:
        """Slots that belong to rows, int64: to what they lead to, or their older frames."""
        num_rows = self._plan.num_rows
        found = [links[links > num_rows].astype(np.int64) - 1 - num_rows]
        if older.size:
            own = older[(older[:, -1] >= num_rows) | (older[:, -1] == np.arange(num_rows))]
            is_own = own > num_rows  # behind the one of zeros
            is_own[:, 1:] &= own[:, 1:] != own[:, :-1]
            found.append(own[is_own].astype(np.int64) - num_rows)
        return np.concatenate(found)

    def take(self, state: Mapping[str, np.ndarray], links: np.ndarray, older: np.ndarray) -> None:
        """Take over what was checked; see `check`."""
        number = len(state["units"])
        if number > self.num_slots:
            self.resize(number)
        self.units.zero_()
        self.units[:number].copy_(torch.from_numpy(np.array(state["units"])))
        self._heads[...] = state["heads"]
        is_used = np.zeros(self.num_slots, np.bool_)
        is_used[: self._first_slot] = True
        is_used[self._used(links, older)] = True
        free = np.flatnonzero(~is_used)[::-1]
        self.free[: len(free)], self.num_free[0] = free, len(free)


@njit(nogil=True, cache=True)
def differ(one, other):
    """Whether bytes uint8 (B,) differ."""
    found = np.uint8(0)
    for k in range(one.shape[0]):
        found |= one[k] ^ other[k]
    return found != 0


@njit(nogil=True, cache=True)
def complete_stacks(given, heads, where, options, whole, moved):
    """Fill up stacks of which the newest frames were given, and compare them with those before.

    `given` are obs and next_obs uint8 (K, F or 1, bytes), `heads` uint8 (N, F, bytes) the stacks of
    the next_obs before, `where` ids, previous and is_open of `Placed`, `options` is_checked and
    pads_zeros of `FrameLayout`; `whole` and `moved` uint8 (K, F, bytes), the stacks, are written.
    Returns 0, or 1 if obs and 2 if next_obs does not go on; the row, and the frame.
    """
    (obs, following), (ids, previous, is_open), (is_checked, pads_zeros) = given, where, options
    number, size, after = whole.shape[1], obs.shape[1], following.shape[1]
    for i in range(obs.shape[0]):
        before = heads[ids[i]] if previous[i] < 0 else moved[previous[i]]
        for k in range(number):
            if is_open[i]:
                whole[i, k] = before[k]
            elif size == number:
                whole[i, k] = obs[i, k]
            elif pads_zeros and k + 1 < number:
                whole[i, k] = 0
            else:
                whole[i, k] = obs[i, 0]
        if is_open[i] and is_checked:
            for k in range(size):
                if differ(obs[i, k], before[number - size + k]):
                    return 1, i, number - size + k
        for k in range(number):
            if after == number:
                moved[i, k] = following[i, k]
            else:
                moved[i, k] = whole[i, k + 1] if k + 1 < number else following[i, 0]
            if is_checked and k + 1 < number and differ(moved[i, k], whole[i, k + 1]):
                return 2, i, k
    return 0, 0, 0


@njit(nogil=True, cache=True)
def choose_units(stacks, where, flags, older_of_rows, num_rows, written):
    """Find the units of older frames and of next observations; return how many slots it takes.

    `stacks` uint8 (K, F, bytes) are obs, `where` rows, before_rows and previous, `flags` is_joined
    and is_near, `older_of_rows` the older units of rows that are there. `written` are codes and
    older of `Chosen`, where the k-th slot is -1 - k; and int64 (K * F, 2), the row and the frame
    that it is to hold, of which F is the newest of next_obs.
    """
    (rows, before_rows, previous), (is_joined, is_near) = where, flags
    (codes, older, sources), taken, last = written, 0, stacks.shape[1] - 1
    for i in range(rows.shape[0]):
        if is_joined[i] and previous[i] >= 0:
            codes[previous[i]] = rows[i] + 1
        if last and is_joined[i] and is_near[i]:
            before = before_rows[i]
            for k in range(1, last):
                is_outer = previous[i] < 0
                older[i, k - 1] = older_of_rows[before, k] if is_outer else older[previous[i], k]
            older[i, last - 1] = before
            continue
        unit = rows[i]
        for k in range(last - 1, -1, -1):
            if differ(stacks[i, k], stacks[i, k + 1]):
                if stacks[i, k].any():
                    unit = -1 - taken
                    sources[taken, 0], sources[taken, 1] = i, k
                    taken += 1
                else:
                    unit = num_rows
            older[i, k] = unit
    for i in range(rows.shape[0]):
        if codes[i] == 0:
            codes[i] = -1 - taken
            sources[taken, 0], sources[taken, 1] = i, last + 1
            taken += 1
    return taken


@njit(nogil=True, cache=True)
def commit_rows(placed, news, chosen, written, num_rows, table, kept):
    """Take slots, let go of those of rows that were overwritten or are followed, and link rows.

    `placed` are the first four of `Placed`, `news` its envs and ends, `chosen` the first three of
    `Chosen`, `written` its slots and heads. Written are `table`, the links, older units, ENVS (N,)
    and committed int64 (R,), and `kept`, free slots, how many there are, and heads of environments.
    """
    (ids, rows, before_rows, previous), (is_joined, codes, new_older) = placed, chosen
    (new_envs, ends), (slots, new_heads), (links, older, envs, committed) = news, written, table
    (free, num_free, heads), num_older = kept, new_older.shape[1]
    left = num_free[0] - slots.shape[0]
    for i in range(rows.shape[0]):
        row = rows[i]
        if links[row] > num_rows:
            free[left] = links[row] - 1 - num_rows
            left += 1
        newest = older[row, num_older - 1] if num_older else -1
        if newest == row or newest >= num_rows:  # it began an episode
            before = row
            for k in range(num_older - 1, -1, -1):
                if older[row, k] > num_rows and older[row, k] != before:
                    free[left] = older[row, k] - num_rows
                    left += 1
                before = np.int64(older[row, k])
        if is_joined[i] and previous[i] < 0:
            free[left] = links[before_rows[i]] - 1 - num_rows
            left += 1
            links[before_rows[i]] = row + 1
    num_free[0] = left
    for i in range(rows.shape[0]):
        links[rows[i]] = codes[i]
        for k in range(num_older):
            older[rows[i], k] = new_older[i, k]
        heads[ids[i]] = new_heads[i]
    commit(new_envs, ends, envs, committed)


@njit(nogil=True, cache=True)
def commit(new_envs, ends, envs, committed):
    """Bring environments ENVS (N,) and counts int64 (R,) up to date."""
    for ring in range(ends.shape[0]):
        committed[ring] = ends[ring]
    for env in range(envs.shape[0]):
        envs[env]["last"] = new_envs[env]["last"]
        envs[env]["is_open"] = new_envs[env]["is_open"]


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
