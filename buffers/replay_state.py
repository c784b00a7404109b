"""Checkpoints of replay buffers: what is saved, and what is checked before it is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from buffers import indexing as at
from buffers.checkpoint import check_settings, name_fields, open_checkpoint, save_checkpoint
from buffers.copies import fill_block
from buffers.errors import BufferMisuseError
from buffers.replay_storage import ReplayStorage
from buffers.ring_state import constant_part

__all__ = ["ReplayState"]

_VERSION = 2  # 1 had no settings
_KEPT = ("pending", "finals", "free", "slots")


class ReplayState:
    """Saves and loads a storage, a generator, and small arrays of the buffer's own.

    Args:
        kind: Name of the buffer class.
        storage: Rows and state.
        reader: Holds the generator.
        own: Makes the further arrays that are saved; `load` hands them back.
        settings: Of the buffer, besides what the storage tells: numbers and strings.
    """

    def __init__(
        self,
        kind: str,
        storage: ReplayStorage,
        reader: Any,
        own: Callable[[], dict[str, np.ndarray]],
        settings: Mapping[str, Any],
    ):
        self._kind, self._storage, self._reader, self._own = kind, storage, reader, own
        state = storage.state
        sizes = {
            "capacity": int(state[at.CAPACITY]),
            "rings": int(state[at.NUM_RINGS]),
            "num_envs": int(state[at.NUM_ENVS]),
            "store_next": bool(storage.layout.next_obs),
        }
        self._settings = {**sizes, **settings}

    def _meta(self) -> dict[str, Any]:
        return {
            "state_version": _VERSION,
            "kind": self._kind,
            "fields": self._storage.layout.describe(),
            "constants": constant_part(self._storage.state),
            "settings": dict(self._settings),
        }

    def _small(self) -> dict[str, np.ndarray]:
        kept = self._storage.successors
        arrays = {"state": self._storage.state, "generator": self._reader.get_state()}
        if kept is not None:
            arrays |= {name: getattr(kept, name) for name in _KEPT}
        return {**arrays, **self._own()}

    def state_dict(self) -> dict[str, Any]:
        """Everything, as copies: tensors, numbers, strings, lists and dicts of them."""
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
        self._check_made(state)
        missing = sorted({*self._small(), "rows"} - set(state))
        if missing:
            raise BufferMisuseError(f"state has no {missing}; pass what state_dict() returned")
        small = {name: state[name].numpy().copy() for name in self._small()}
        rows = state["rows"]
        self._check(small, (tuple(rows.shape), rows.dtype))
        self._restore(small)
        begin = 0
        for block in self._storage.live_blocks():
            block.copy_(rows[begin : begin + len(block)])
            begin += len(block)
        return small

    def load(self, path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
        """The same from a file."""
        with open_checkpoint(path, self._kind) as reader:
            self._check_made(reader.meta)
            missing = sorted({*self._small(), "rows"} - set(reader.columns))
            if missing:
                raise reader.refusal(f"has no columns {missing}; it is of another kind of buffer")
            small = {}
            for name in self._small():
                dtype, shape = reader.columns[name]
                small[name] = np.zeros(shape, dtype)
                reader.read(name, [small[name]])
            dtype, shape = reader.columns["rows"]
            self._check(small, (shape, torch.from_numpy(np.empty(0, dtype)).dtype))
            self._restore(small)
            reader.read("rows", self._storage.live_blocks())
        return small

    def _check_made(self, meta: Mapping[str, Any]) -> None:
        """Raise BufferMisuseError unless the state is of a buffer made like this one."""
        own = self._meta()
        if meta.get("state_version") == 1:  # all that the first release had
            meta = {**meta, "state_version": _VERSION, "settings": self._settings}
        for name in ("kind", "state_version"):
            if meta.get(name) != own[name]:
                raise BufferMisuseError(
                    f"state has {name} {meta.get(name)!r}, expected {own[name]!r}; pass what "
                    "state_dict() of such a buffer returned"
                )
        check_settings(_listed(meta), _listed(own))
        # Where the fields lie, if another release places them otherwise.
        check_settings(*({"layout": [s.get("fields"), s.get("constants")]} for s in (meta, own)))

    def _check(
        self,
        small: Mapping[str, np.ndarray],
        rows: tuple[tuple[int, ...], torch.dtype],
    ) -> None:
        """Raise BufferMisuseError unless the arrays fit this buffer and one another."""
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


def _listed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and fields by name, to be compared."""
    fields = name_fields(meta.get("fields"))
    fields.pop("link", None)  # follows from the settings
    return {**(meta.get("settings") or {}), "field": fields}
