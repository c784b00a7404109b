"""Next observations of a buffer that stores observations once: where those are that no row has."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from buffers.core.compiling import njit
from buffers.core.errors import BufferMisuseError
from buffers.core.interrupts import interrupts_later
from buffers.core.kernels import address_of, copy_at, is_same_at
from buffers.core.memory import allocation
from buffers.core.rows import RowLayout, as_words
from buffers.core.staging import StagingBlock, StagingBlocks
from buffers.replay import addresses
from buffers.replay import layout as at
from buffers.replay.addresses import Addresses
from buffers.replay.layout import first_slots

__all__ = ["Successors", "keep_successor"]

_ADVICE = "use a smaller capacity, or store_next=True if most transitions end an episode"


class Successors:
    """The newest next observation of each env, and those episodes ended with.

    There is room for the final observations of one row in 64 at first; it doubles when needed, and
    moves. A CUDA graph reads memory where it was when it was captured, so once a draw was captured
    the room does not grow by itself any more. Nothing else ever moves.

    Attributes:
        pending: uint8 (N, S).
        finals: uint8 (F, S).
        free: int64 (F,), a stack of the free slots of `finals`.
        slots: int32 (rows,), slot + 1 of each row of the table, or 0.
        device_pending: `pending` on the device; the same memory if that is the CPU.
        device_finals: `finals` on the device.
        device_finals_and_more: The same memory, and a row behind it, for what is nobody's.
        is_captured: Whether a CUDA graph reads `device_finals`.
    """

    def __init__(
        self, layout: RowLayout, state: np.ndarray, device: torch.device,
        where: Addresses, *, staged: bool,
    ):  # fmt: skip
        self._layout, self._state, self._device, self._staged = layout, state, device, staged
        num_rows, num_envs = int(state[at.CAPACITY] * state[at.NUM_RINGS]), int(state[at.NUM_ENVS])
        num_slots = first_slots(num_rows, num_envs)
        size = layout.obs_bytes
        leaves = [layout.fields[path] for path in layout.obs]
        self._padding = slice(sum(leaf.nbytes for leaf in leaves), size)  # behind the leaves
        self.pending = np.zeros((num_envs, size), np.uint8)
        self.finals = np.zeros((num_slots, size), np.uint8)
        self.free = np.arange(num_slots)
        self.slots = np.zeros(num_rows, np.int32)
        state[at.NUM_FREE] = num_slots
        self.is_captured = False
        self._blocks = StagingBlocks(device, _ADVICE)
        self.device_pending = self._twin(self.pending)
        self.device_finals_and_more = self._finals_twin(self.finals)
        self.device_finals = self.device_finals_and_more[: len(self.finals)]
        self._where = where
        where.name({addresses.SLOTS: self.slots, addresses.PENDING: self.pending})
        where.name({addresses.FINALS: self.finals, addresses.FREE: self.free})

    @property
    def nbytes(self) -> int:
        """Bytes held, on host and device together."""
        twice = 2 if self._staged else 1
        observations = self.pending.nbytes + self.finals.nbytes
        return twice * observations + self.free.nbytes + self.slots.nbytes + self._blocks.nbytes

    def reserve(self, num_rows: int) -> None:
        """See to it that `num_rows` slots are free.

        Raises:
            BufferMemoryError: They would not fit into free memory; nothing was changed.
            BufferMisuseError: They would have to move; nothing was changed.
        """
        missing = num_rows - int(self._state[at.NUM_FREE])
        if missing > 0:
            self.resize(len(self.finals) + max(missing, len(self.finals)))
        if self._staged:
            size = 2 * num_rows * (8 + self._layout.obs_bytes)
            self._blocks.reserve(f"staging {num_rows} observations", size)

    def resize(self, num_slots: int) -> None:
        """Grow to a number of slots; the new ones are free. Raises as `reserve`."""
        if self.is_captured:
            raise BufferMisuseError(
                f"{num_slots} final observations have to be kept, but a CUDA graph was captured "
                f"that reads the {len(self.finals)} there is room for where they lie; call "
                "reserve_final_obs(number) before the capture, or now, and capture again"
            )
        size, before = self._layout.obs_bytes, len(self.finals)
        needed = num_slots * (size + 8)
        with allocation(f"{num_slots} final observations", needed, self._device, _ADVICE):
            finals, free = np.zeros((num_slots, size), np.uint8), np.zeros(num_slots, np.int64)
            finals[:before] = self.finals
            twin = self._finals_twin(finals)
        free[:before] = self.free
        with interrupts_later():
            self.finals, self.free, self.device_finals_and_more = finals, free, twin
            self.device_finals = twin[:num_slots]
            self._where.name({addresses.FINALS: finals, addresses.FREE: free})
            self.add_slots(before)

    def add_slots(self, first: int) -> None:
        """Take all slots from a number on for free, besides those that are counted as free."""
        begin, count = int(self._state[at.NUM_FREE]), len(self.finals) - first
        self.free[begin : begin + count] = np.arange(first, len(self.finals))
        self._state[at.NUM_FREE] = begin + count

    def keep(
        self,
        arrays: Mapping[str, np.ndarray],
        rows: np.ndarray,
        befores: np.ndarray,
        envs: np.ndarray,
    ) -> np.ndarray:
        """Note where the rows find their next observations.

        Args:
            arrays: Leaves of obs and next_obs (K, ...) by path.
            rows: int64 (K,), from `place_rows`, like the next two.
            befores: int64 (K,); becomes plain rows, or -1.
            envs: int64 (K,).

        Returns:
            int32 (K,), the codes of the rows befores.
        """
        codes = np.empty(len(rows), np.int32)
        keep_successors(
            self._state,
            rows,
            befores,
            envs,
            self._pack(arrays, ""),
            self._pack(arrays, "next_"),
            self.slots,
            self.pending,
            self.finals,
            self.free,
            codes,
        )
        if self._staged:
            self._upload(np.unique(-1 - codes[codes < 0]), np.unique(envs[rows >= 0]))
        return codes

    def refresh_device(self) -> None:
        """Copy everything to the device, after it was loaded."""
        for observations in (self.pending, self.finals):  # saved by an earlier release, maybe
            observations[:, self._padding] = 0
        if self._staged:
            self.device_pending.copy_(torch.from_numpy(self.pending))
            self.device_finals.copy_(torch.from_numpy(self.finals))

    def _twin(self, pages: np.ndarray) -> torch.Tensor:
        with torch.inference_mode(False):  # what is made in it can't be changed outside
            tensor = torch.from_numpy(pages)
            return tensor.to(self._device, copy=True) if self._staged else tensor

    def _finals_twin(self, pages: np.ndarray) -> torch.Tensor:
        if not self._staged:
            return self._twin(pages)
        with torch.inference_mode(False):
            shape = len(pages) + 1, pages.shape[1]
            twin = torch.zeros(shape, dtype=torch.uint8, device=self._device)
        twin[:-1].copy_(torch.from_numpy(pages))
        return twin

    def pack_tensors(self, columns: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
        """As `_pack`, of tensors on the device."""
        layout, count = self._layout, len(columns["rewards"])
        parts = []
        for path in sorted(layout.obs, key=lambda path: layout.fields[path].offset):
            part = columns[prefix + path].reshape(count, -1).contiguous()
            # A dimension of one may have any stride, of which bytes can't be viewed.
            parts.append(part.as_strided(part.shape, (part.shape[1], 1)).view(torch.uint8))
        if (padding := self._padding.stop - self._padding.start) > 0:
            parts.append(parts[0].new_zeros((count, padding)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def take_back(self, slots: torch.Tensor, free: torch.Tensor) -> None:
        """Take over what adds on the device have changed; waits."""
        copies = (
            (self.slots, slots), (self.free, free),
            (self.pending, self.device_pending), (self.finals, self.device_finals),
        )  # fmt: skip
        for pages, tensor in copies:
            torch.from_numpy(pages).copy_(tensor)

    def _upload(self, slots: np.ndarray, envs: np.ndarray) -> None:
        """Enqueue copies of some final and newest observations, in memory that `reserve` saw to.

        Nothing is allocated, so that nothing can fail when the state already counts the rows.
        """
        with self._blocks.taken() as block:
            self._upload_by(block, slots, envs)

    def _upload_by(self, block: StagingBlock, slots: np.ndarray, envs: np.ndarray) -> None:
        begin, size = 8 * (len(slots) + len(envs)), self._layout.obs_bytes
        end = begin + (len(slots) + len(envs)) * size
        host = block.host.numpy()
        host[:begin] = np.concatenate([slots, envs]).astype(np.int64, copy=False).view(np.uint8)
        packed = host[begin:end].reshape(-1, size)
        np.take(self.finals, slots, 0, out=packed[: len(slots)], mode="clip")
        np.take(self.pending, envs, 0, out=packed[len(slots) :], mode="clip")
        block.upload(0, end)
        counts = [len(slots), len(envs)]
        chosen = block.device[:begin].view(torch.int64).split(counts)
        finals, pending, values = as_words(
            self.device_finals, self.device_pending, block.device[begin:end].view(-1, size)
        )
        parts = zip((finals, pending), chosen, values.split(counts), strict=True)
        for target, where, rows in parts:
            target.index_copy_(0, where, rows)

    def _pack(self, arrays: Mapping[str, np.ndarray], prefix: str) -> np.ndarray:
        """Observations as uint8 (K, S), leaves where they are in a row of the table."""
        layout = self._layout
        if len(layout.obs) == 1:
            array = arrays[prefix + layout.obs[0]]
            return array.reshape(len(array), -1).view(np.uint8)
        # Rows are compared as bytes, padding and all.
        allocate = np.zeros if self._padding.start < self._padding.stop else np.empty
        packed = allocate((len(arrays["rewards"]), layout.obs_bytes), np.uint8)
        for path in layout.obs:
            field = layout.fields[path]
            begin = field.offset - layout.obs_at
            leaf = arrays[prefix + path]
            packed[:, begin : begin + field.nbytes] = leaf.reshape(len(leaf), -1).view(np.uint8)
        return packed


@njit(nogil=True, cache=True)
def keep_successor(state, row, before, is_same, pending, size, slots, finals, free):
    """Decide where the row before a new one finds its next observation.

    A row's code is 0 while it is the newest of its env (the next observation is pending), row + 1
    of its successor if that begins with the same bytes, else -1 - slot in `finals`.

    Args:
        state: int64, see `layout`; its count of free slots is written.
        row: The new one, whose slot is free from now on.
        before: The row before it in its env, or -1.
        is_same: Whether the two lie in one episode, and the new one begins with `pending`.
        pending: Address of the next observation of the row before.
        size: Bytes of an observation.
        slots: int32 (rows,), written: for each row of the table its slot + 1, or 0.
        finals: Address of observations uint8 (F, S), written.
        free: int64 (F,), the stack of free slots; written. One at least must be free.

    Returns:
        The code of the row before.
    """
    if slots[row] > 0:  # the row that is overwritten here had one
        free[state[at.NUM_FREE]] = slots[row] - 1
        state[at.NUM_FREE] += 1
        slots[row] = 0
    if before < 0:
        return 0
    if is_same:
        return row + 1
    state[at.NUM_FREE] -= 1
    slot = free[state[at.NUM_FREE]]
    copy_at(finals + slot * size, pending, size)
    slots[before] = slot + 1
    return -1 - slot


@njit(cache=True)
def keep_successors(
    state, rows, befores, envs, obs, next_obs, slots, pending, finals, free, codes
):  # fmt: skip
    """Decide where each row before a new one finds its next observation; see `keep_successor`.

    Args:
        state: int64, see `layout`; its count of free slots is written.
        rows, befores, envs: int64 (K,), from `place_rows`; befores becomes plain rows, or -1.
        obs, next_obs: uint8 (K, S), packed observations.
        slots: int32 (rows,), written, like all that follow.
        pending: uint8 (N, S): the newest next observation of each env.
        finals: uint8 (F, S).
        free: int64 (F,). At least K slots must be free.
        codes: int32 (K,): the code of row befores[i].
    """
    size = pending.shape[1]
    newest, given, following = address_of(pending), address_of(obs), address_of(next_obs)
    for i in range(rows.shape[0]):
        row, env = rows[i], envs[i]
        codes[i] = 0
        if row < 0:
            continue
        is_joined = befores[i] >= 0
        before = befores[i] if is_joined else -2 - befores[i]
        befores[i] = before
        place = newest + env * size
        is_same = is_joined and is_same_at(place, given + i * size, size)
        codes[i] = keep_successor(
            state, row, before, is_same, place, size, slots, address_of(finals), free
        )
        copy_at(place, following + i * size, size)
