"""The memory of a replay buffer: packed rows on a device, and how transitions get into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numba
import numpy as np
import torch
from numba.core import config
from numba.core.errors import NumbaError

from buffers.core.compiling import njit
from buffers.core.errors import BufferMemoryError
from buffers.core.memory import format_bytes, free_bytes, zeroed_bytes
from buffers.core.rows import RecordLayout
from buffers.replay import indexing as at
from buffers.replay.kernels import add_rows, place_rows, scatter_field, write_links
from buffers.replay.ring_state import new_state, state_words
from buffers.replay.staging import Staging
from buffers.replay.successors import Successors, successor_bytes

__all__ = ["ReplayStorage", "check_room", "storage_bytes"]

_PLAIN = "fiub"
_compiled: dict[Any, Callable[..., bool] | None] = {}


def storage_bytes(
    layout: RecordLayout, capacity: int, num_rings: int, num_envs: int, tree_bytes: int = 0
) -> int:
    """Bytes a buffer of num_rings rings of capacity rows takes, without what grows with adds."""
    num_rows = capacity * num_rings
    needed = num_rows * layout.stride + 8 * state_words(layout, num_rings, num_envs) + tree_bytes
    if not layout.next_obs:
        needed += successor_bytes(num_rows, num_envs, layout.obs_bytes)
    return needed


def check_room(what: str, capacity: int, bytes_for: Callable[[int], int], device: torch.device):
    """Raise BufferMemoryError, naming the capacity that fits, if the buffer does not.

    Args:
        what: Names the buffer.
        capacity: Asked for.
        bytes_for: Bytes of a buffer by its capacity, which it grows with.
        device: Where it is to be.
    """
    free, needed = free_bytes(device), bytes_for(capacity)
    if free is None or needed <= free:
        return
    low, high = 0, capacity
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_for(middle) <= free else (low, middle)
    raise BufferMemoryError(
        f"{what} with capacity {capacity} needs {format_bytes(needed)} on {device}, but only "
        f"{format_bytes(free)} are free; a capacity of {low} would fit"
    )


def _compiled_add(layout: RecordLayout) -> Callable[..., bool] | None:
    """`add_rows` for exactly the dtypes and axes of this layout, or None if it cannot have it."""
    fields = layout.fields
    is_plain = layout.obs == ["obs"] and layout.next_obs and not layout.extras
    leaves = [fields[name] for name in ("obs", "actions") if name in fields]
    if not is_plain or config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    if any(leaf.dtype.kind not in _PLAIN or leaf.dtype == np.float16 for leaf in leaves):
        return None
    key = tuple((leaf.dtype.str, len(leaf.shape)) for leaf in leaves)
    if key not in _compiled:

        def array(dtype: Any, ndim: int) -> numba.types.Array:
            return numba.types.Array(numba.from_dtype(np.dtype(dtype)), ndim, "C")

        obs, actions = (array(dtype, ndim + 1) for dtype, ndim in key)
        words, flags = array(np.int64, 1), array(np.bool_, 1)
        signatures = [
            numba.types.boolean(
                array(np.uint8, 2), words, words, words, obs, obs, actions, rewards, flags, flags
            )
            for rewards in (array(np.float32, 1), array(np.float64, 1))
        ]
        kernel: Any = add_rows
        compiled = njit(cache=True)(kernel.py_func)
        for signature in signatures:
            compiled.compile(signature)
        compiled.disable_compile()
        _compiled[key] = compiled if _refuses_swapped(compiled, *key) else None
    return _compiled[key]


def _refuses_swapped(kernel: Any, obs: tuple[str, int], action: tuple[str, int]) -> bool:
    """Whether a compiled `add_rows` refuses arrays of the other byte order, from now on for ever.

    Numba finds the type of an array that is aligned and of the machine's byte order by its dtype.
    Others it knows by a summary in which the byte order is missing: the first array with a summary
    decides for all that follow. Here those of the other order come first, which have no type; or an
    unaligned one has come before, whose type they would be given.

    Args:
        kernel: Compiled for certain signatures.
        obs: Dtype of the observations, and number of axes of one.
        action: The same of the actions.
    """
    observations, actions = (np.zeros((2,) * (n + 1), dtype) for dtype, n in (obs, action))
    ids, rewards, flags = np.zeros(2, np.int64), np.zeros(2), np.zeros(2, np.bool_)
    busy = np.ones(1, np.int64)  # then it looks at nothing else
    good: list[np.ndarray] = [
        np.zeros((2, 2), np.uint8), ids, busy, ids, observations, observations, actions, rewards,
        flags, flags,
    ]  # fmt: skip
    for place, array in [*enumerate(good), (7, rewards.astype(np.float32))]:
        for code in np.typecodes["All"]:
            if np.dtype(code) != array.dtype or array.dtype.itemsize == 1:
                continue
            swapped = np.zeros(array.shape, np.dtype(code).newbyteorder("S"))
            try:
                kernel(*good[:place], swapped, *good[place + 1 :])
            except (TypeError, NumbaError):
                continue
            return False
    return True


class ReplayStorage:
    """Rows, the integers that say what is in them, and what is needed to write them.

    Attributes:
        rows: uint8 (num_rows, stride) on the device.
        table: The same as a NumPy array, if the device is the CPU and nothing is staged.
        state: int64, see `indexing`.
        successors: Next observations that no row has, or None if all rows have their own.
        add_rows: Compiled for this layout, or None if `write` must be used.
    """

    def __init__(
        self,
        layout: RecordLayout,
        capacity: int,
        num_rings: int,
        num_envs: int,
        device: torch.device,
        *,
        staged: bool,
    ):  # fmt: skip
        self.layout, self.device, self.is_staged = layout, device, staged
        num_rows = capacity * num_rings
        self.state = new_state(layout, capacity, num_rings, num_envs)
        if device.type == "cpu":
            self.rows = zeroed_bytes(num_rows * layout.stride).view(num_rows, -1)
        else:
            self.rows = torch.zeros((num_rows, layout.stride), dtype=torch.uint8, device=device)
        self.table = np.zeros((0, layout.stride), np.uint8) if staged else self.rows.numpy()
        self.successors = None
        if not layout.next_obs:
            self.successors = Successors(layout, self.state, device, staged=staged)
        self.staging = Staging(layout, self.rows, self.state) if staged else None
        self.add_rows = None if staged else _compiled_add(layout)

    def memory(self) -> dict[str, int]:
        """Bytes held by what they are for."""
        sizes = {"rows": self.rows.nbytes, "state": self.state.nbytes}
        if self.successors is not None:
            sizes["successors"] = self.successors.nbytes
        if self.staging is not None:
            sizes["staging"] = self.staging.nbytes
        return sizes

    def write(self, arrays: Mapping[str, np.ndarray], env_ids: np.ndarray) -> None:
        """Write checked transitions.

        Args:
            arrays: (K, ...) by path, C-contiguous, of the dtypes of the layout.
            env_ids: int64 (K,), or (0,) for whole steps.

        Raises:
            BufferMemoryError: There is no memory for more final observations, or for staging a
                larger add than before; nothing was changed.
        """
        count = len(arrays["rewards"])
        if not count:
            return
        if self.successors is not None:
            self.successors.reserve(count)
        if self.staging is not None:
            self.staging.reserve(count)
        rows, befores, envs = np.empty((3, count), np.int64)
        is_over = arrays["terminations"] | arrays["truncations"]
        place_rows(self.state, env_ids, is_over, rows, befores, envs)
        if self.successors is not None:
            codes = self.successors.keep(arrays, rows, befores, envs)
        else:
            codes = (rows + 1).astype(np.int32)
        if "env_ids" in self.layout.fields:
            arrays = {**arrays, "env_ids": envs.astype(np.int32)}
        if self.staging is not None:
            self.staging.write(arrays, rows, befores, codes)
            return
        for path, field in self.layout.fields.items():
            if path != "link":
                source = arrays[path].reshape(-1).view(np.uint8)
                scatter_field(self.table, rows, source, field.offset, field.nbytes)
        if "link" in self.layout.fields:
            offset = self.layout.fields["link"].offset
            write_links(self.table, rows, befores, codes, offset)

    def live_blocks(self) -> list[torch.Tensor]:
        """The rows that hold transitions, as views of the table in its order."""
        state, capacity = self.state, int(self.state[at.CAPACITY])
        totals = state[state[at.TOTALS] :][: state[at.NUM_RINGS]]
        if (totals >= capacity).all():
            return [self.rows]
        counts = np.minimum(totals, capacity)
        starts = np.flatnonzero(counts) * capacity
        blocks = [self.rows[start : start + counts[start // capacity]] for start in starts.tolist()]
        return blocks or [self.rows[:0]]

    def oldest_first(self) -> torch.Tensor:
        """int64, the live rows, ring by ring from the oldest to the newest, on the CPU."""
        state, capacity = self.state, int(self.state[at.CAPACITY])
        found = []
        for ring in range(int(state[at.NUM_RINGS])):
            total = int(state[state[at.TOTALS] + ring])
            count, pointer = min(total, capacity), int(state[state[at.POINTERS] + ring])
            places = (pointer - count + np.arange(count)) % capacity
            found.append(ring * capacity + places)
        return torch.from_numpy(np.concatenate(found))
