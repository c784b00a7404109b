"""Checkpoints of replay buffers: what is saved, and what is checked before it is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from buffers import indexing as at
from buffers.checkpoint import open_checkpoint, save_checkpoint
from buffers.copies import fill_block
from buffers.errors import BufferMisuseError
from buffers.replay_storage import ReplayStorage
from buffers.ring_state import constant_part

__all__ = ["ReplayState"]

_VERSION = 1
_KEPT = ("pending", "finals", "free", "slots")


class ReplayState:
    """Saves and loads a storage, a generator, and small arrays of the buffer's own.

    Args:
        kind: Name of the buffer class.
        storage: Rows and state.
        reader: Holds the generator.
        own: Makes the further arrays that are saved; `load` hands them back.
    """

    def __init__(
        self,
        kind: str,
        storage: ReplayStorage,
        reader: Any,
        own: Callable[[], dict[str, np.ndarray]],
    ):
        self._kind, self._storage, self._reader, self._own = kind, storage, reader, own

    def _meta(self) -> dict[str, Any]:
        return {
            "state_version": _VERSION,
            "kind": self._kind,
            "fields": self._storage.layout.describe(),
            "constants": constant_part(self._storage.state),
        }

    def _small(self) -> dict[str, np.ndarray]:
        kept = self._storage.successors
        arrays = {"state": self._storage.state, "generator": self._reader.get_state()}
        if kept is not None:
            arrays |= {name: getattr(kept, name) for name in _KEPT}
        return {**arrays, **self._own()}

    def state_dict(self) -> dict[str, Any]:
        """Everything, as copies: tensors, ints, strings and lists of them."""
        small = {name: torch.from_numpy(array.copy()) for name, array in self._small().items()}
        return {**self._meta(), **small, "rows": torch.cat(self._storage.live_blocks()).cpu()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything into a file."""
        columns: dict[str, Any] = {name: [array] for name, array in self._small().items()}
        columns["rows"] = self._storage.live_blocks()
        save_checkpoint(path, self._kind, self._meta(), columns)

    def copied_state(self) -> dict[str, Any]:
        """Everything, the rows as views of the blocks they lie in."""
        blocks = [block.cpu().numpy() for block in self._storage.live_blocks()]
        return {**self._small(), "rows": blocks}

    def take_copied_state(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Replace everything by what a buffer made with the same arguments held."""
        small = {name: np.array(state[name]) for name in self._small()}
        self._restore(small)
        for block, pages in zip(self._storage.live_blocks(), state["rows"], strict=True):
            fill_block(block, pages)
        return small

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Replace everything; return the buffer's own arrays."""
        missing = sorted({*self._small(), "rows"} - set(state))
        if missing:
            raise BufferMisuseError(f"state has no {missing}; pass what state_dict() returned")
        small = {name: state[name].numpy().copy() for name in self._small()}
        rows = state["rows"]
        self._check(state, small, (tuple(rows.shape), rows.dtype))
        self._restore(small)
        begin = 0
        for block in self._storage.live_blocks():
            block.copy_(rows[begin : begin + len(block)])
            begin += len(block)
        return small

    def load(self, path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
        """The same from a file."""
        with open_checkpoint(path, self._kind) as reader:
            missing = sorted({*self._small(), "rows"} - set(reader.columns))
            if missing:
                raise reader.refusal(f"has no columns {missing}; it is of another kind of buffer")
            small = {}
            for name in self._small():
                dtype, shape = reader.columns[name]
                small[name] = np.zeros(shape, dtype)
                reader.read(name, [small[name]])
            dtype, shape = reader.columns["rows"]
            self._check(reader.meta, small, (shape, torch.from_numpy(np.empty(0, dtype)).dtype))
            self._restore(small)
            reader.read("rows", self._storage.live_blocks())
        return small

    def _check(
        self,
        meta: Mapping[str, Any],
        small: Mapping[str, np.ndarray],
        rows: tuple[tuple[int, ...], torch.dtype],
    ) -> None:
        """Raise BufferMisuseError unless the state fits this buffer."""
        for name, found in self._meta().items():
            given = meta.get(name)
            if given != found:
                raise BufferMisuseError(
                    f"state has {name} {given}, expected {found}; load it into a buffer made with "
                    "the same spaces, capacity and options"
                )
        if not self._reader.accepts_state(small["generator"]):
            raise BufferMisuseError(
                "state has a generator of another device; load it into a buffer on the device it "
                "was made on"
            )
        for name, mine in self._small().items():
            found = small[name]
            same_rows = name in ("finals", "free", "generator") or found.shape == mine.shape
            if found.dtype != mine.dtype or found.ndim != mine.ndim or not same_rows:
                raise BufferMisuseError(
                    f"state holds {found.dtype} {found.shape} for {name}, expected {mine.dtype} "
                    f"{mine.shape}"
                )
        state = small["state"]
        totals, pointers = (state[state[place] :][: state[at.NUM_RINGS]] for place in _RING_ARRAYS)
        counts = np.minimum(totals, state[at.CAPACITY])
        fits = (
            constant_part(state) == constant_part(self._storage.state)
            and (totals >= 0).all()
            and (pointers == totals % state[at.CAPACITY]).all()
            and state[at.COUNT] == counts.sum()
            and rows == ((int(counts.sum()), self._storage.layout.stride), torch.uint8)
        )
        if not fits:
            raise BufferMisuseError("state contradicts itself; it was changed after it was made")

    def _restore(self, small: Mapping[str, np.ndarray]) -> None:
        storage = self._storage
        kept = storage.successors
        if kept is not None and len(small["finals"]) > len(kept.finals):
            kept.resize(len(small["finals"]))
        storage.state[:] = small["state"]
        if kept is not None:
            missing = len(kept.finals) - len(small["finals"])
            num_free = int(storage.state[at.NUM_FREE])
            for name in _KEPT:
                getattr(kept, name)[: len(small[name])] = small[name]
            spare = np.arange(len(small["finals"]), len(kept.finals))
            kept.free[num_free : num_free + missing] = spare
            storage.state[at.NUM_FREE] += missing
            kept.refresh_device()
        if storage.staging is not None:
            storage.staging.refresh()
        self._reader.set_state(small["generator"])


_RING_ARRAYS = (at.TOTALS, at.POINTERS)
