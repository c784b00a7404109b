"""Next observations of a buffer that stores observations once: where those are that no row has."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from buffers.core.compiling import njit
from buffers.core.errors import BufferMisuseError
from buffers.core.memory import allocation
from buffers.core.rows import RowLayout
from buffers.replay import layout as at
from buffers.replay.layout import first_slots

__all__ = ["Successors"]

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
        is_captured: Whether a CUDA graph reads `device_finals`.
    """

    def __init__(self, layout: RowLayout, state: np.ndarray, device: torch.device, *, staged: bool):
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
        self.device_pending = self._twin(self.pending)
        self.device_finals = self._twin(self.finals)

    @property
    def nbytes(self) -> int:
        """Bytes held, on host and device together."""
        twice = 2 if self._staged else 1
        observations = self.pending.nbytes + self.finals.nbytes
        return twice * observations + self.free.nbytes + self.slots.nbytes

    def reserve(self, num_rows: int) -> None:
        """See to it that `num_rows` slots are free.

        Raises:
            BufferMemoryError: They would not fit into free memory; nothing was changed.
            BufferMisuseError: They would have to move; nothing was changed.
        """
        missing = num_rows - int(self._state[at.NUM_FREE])
        if missing > 0:
            self.resize(len(self.finals) + max(missing, len(self.finals)))

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
            twin = self._twin(finals)
        free[:before] = self.free
        self.finals, self.free, self.device_finals = finals, free, twin
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
            slots = np.unique(-1 - codes[codes < 0])
            self._upload(self.device_finals, self.finals, slots)
            self._upload(self.device_pending, self.pending, np.unique(envs[rows >= 0]))
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

    def _upload(self, target: torch.Tensor, pages: np.ndarray, chosen: np.ndarray) -> None:
        values = torch.from_numpy(pages[chosen]).to(self._device)
        target.index_copy_(0, torch.from_numpy(chosen).to(self._device, torch.int64), values)

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
def same_bytes(left, left_row, right, right_row):
    """Whether row left_row of uint8 (A, S) equals row right_row of uint8 (B, S)."""
    difference = np.uint8(0)
    for k in range(left.shape[1]):
        difference |= left[left_row, k] ^ right[right_row, k]
    return difference == 0


@njit(cache=True)
def keep_successors(
    state, rows, befores, envs, obs, next_obs, slots, pending, finals, free, codes
):  # fmt: skip
    """Decide where each row finds its next observation, if observations are stored once.

    A row's code is 0 while it is the newest of its env (the next observation is in `pending`), row
    + 1 of its successor if that begins with the same bytes, else -1 - slot in `finals`.

    Args:
        state: int64, see `layout`; its count of free slots is written.
        rows, befores, envs: int64 (K,), from `place_rows`.
        obs, next_obs: uint8 (K, S), packed observations.
        slots: int32 (rows,), written: for each row of the table its slot + 1, or 0.
        pending: uint8 (N, S), written: the newest next observation of each env.
        finals: uint8 (F, S), written.
        free: int64 (F,), the stack of free slots; written. At least K must be free.
        codes: int32 (K,), written: the code of row befores[i].
    """
    num_free = state[at.NUM_FREE]
    for i in range(rows.shape[0]):
        row, env = rows[i], envs[i]
        codes[i] = 0
        if row < 0:
            continue
        if slots[row] > 0:  # the row that is overwritten here had one
            free[num_free] = slots[row] - 1
            num_free += 1
            slots[row] = 0
        is_joined = befores[i] >= 0
        before = befores[i] if is_joined else -2 - befores[i]
        befores[i] = before
        if before >= 0 and is_joined and same_bytes(pending, env, obs, i):
            codes[i] = row + 1
        elif before >= 0:
            num_free -= 1
            slot = free[num_free]
            finals[slot] = pending[env]
            slots[before] = slot + 1
            codes[i] = -1 - slot
        pending[env] = next_obs[i]
    state[at.NUM_FREE] = num_free
