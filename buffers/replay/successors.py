"""Next observations of a buffer that stores observations once: where those are that no row has."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from buffers.core.errors import BufferMisuseError
from buffers.core.memory import allocation
from buffers.core.rows import RecordLayout
from buffers.replay import indexing as at
from buffers.replay.kernels import keep_successors

__all__ = ["Successors", "successor_bytes"]

_ADVICE = "use a smaller capacity, or store_next=True if most transitions end an episode"


def _first_slots(num_rows: int, num_envs: int) -> int:
    """Final observations there is room for at first: one per env, and one in 64 rows."""
    return max(16, num_envs, num_rows // 64)


def successor_bytes(num_rows: int, num_envs: int, obs_bytes: int) -> int:
    """Bytes a new `Successors` takes."""
    slots = _first_slots(num_rows, num_envs)
    return (num_envs + slots) * obs_bytes + 8 * slots + 4 * num_rows


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

    def __init__(
        self, layout: RecordLayout, state: np.ndarray, device: torch.device, *, staged: bool
    ):
        self._layout, self._state, self._device, self._staged = layout, state, device, staged
        num_rows, num_envs = int(state[at.CAPACITY] * state[at.NUM_RINGS]), int(state[at.NUM_ENVS])
        num_slots = _first_slots(num_rows, num_envs)
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
        num_free = int(self._state[at.NUM_FREE])
        free[:num_free] = self.free[:num_free]
        free[num_free : num_free + num_slots - before] = np.arange(before, num_slots)
        self.finals, self.free = finals, free
        self._state[at.NUM_FREE] = num_free + num_slots - before
        self.device_finals = twin

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
        first = min(layout.fields[path].offset for path in layout.obs)
        # Rows are compared as bytes, padding and all.
        allocate = np.zeros if self._padding.start < self._padding.stop else np.empty
        packed = allocate((len(arrays["rewards"]), layout.obs_bytes), np.uint8)
        for path in layout.obs:
            field = layout.fields[path]
            begin = field.offset - first
            leaf = arrays[prefix + path]
            packed[:, begin : begin + field.nbytes] = leaf.reshape(len(leaf), -1).view(np.uint8)
        return packed
