"""Checkpoints of replay buffers: what is saved, and what is checked before it is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from buffers.core.checkpoint import (
    CheckpointReader,
    FieldWatcher,
    Watcher,
    check_settings,
    name_fields,
    open_checkpoint,
    save_checkpoint,
    state_array,
)
from buffers.core.checkpoint_kernels import are_free, first_wrong_row
from buffers.core.copies import fill_block
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import other_generator
from buffers.core.rows import RecordLayout
from buffers.replay import indexing as at
from buffers.replay.indexing import tally
from buffers.replay.ring_state import constant_part, new_state
from buffers.replay.storage import ReplayStorage

__all__ = ["ReplayState"]

_VERSION = 2  # 1 had no settings
_KEPT = ("pending", "finals", "free", "slots")
_GROWING = ("finals", "free")  # of other lengths than ours; all else is as long
_MOST_ADDED = 2**62  # rows ever added; what is added later has to be counted, too


class ReplayState:
    """Saves and loads a storage, a generator, and small arrays of the buffer's own.

    Args:
        kind: Name of the buffer class.
        storage: Rows and state.
        reader: Holds the generator.
        own: Makes the further arrays that are saved; `load` hands them back.
        check_own: Called with those of a state, of the right shapes and dtypes, and its number of
            transitions; raises if they don't fit.
        settings: Of the buffer, besides what the storage tells: numbers and strings.
    """

    def __init__(
        self,
        kind: str,
        storage: ReplayStorage,
        reader: Any,
        own: Callable[[], dict[str, np.ndarray]],
        check_own: Callable[[Mapping[str, np.ndarray], int], None],
        settings: Mapping[str, Any],
    ):
        self._kind, self._storage, self._reader, self._own = kind, storage, reader, own
        self._check_own = check_own
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
        arrays = {"state": self._storage.state, "generator": self._reader.generator.get_state()}
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
        self._restore(small["state"], small, small.get("finals"))
        for block, pages in zip(self._storage.live_blocks(), state["rows"], strict=True):
            fill_block(block, pages)
        return small

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Replace everything; return the buffer's own arrays."""
        self._check_made(state)
        wanted = self._wanted()
        missing = sorted(set(wanted) - set(state))
        if missing:
            raise BufferMisuseError(f"state has no {missing}; pass what state_dict() returned")
        arrays = {name: state_array(name, state[name], *like) for name, like in wanted.items()}
        watchers = self._watchers(len(arrays["rows"]))
        for name, watcher in watchers.items():
            watcher(arrays[name])
        rows, finals = arrays.pop("rows"), arrays.pop("finals", None)
        small = {name: array.copy() for name, array in arrays.items()}
        checked = self._checked(small, len(rows), finals, watchers)
        self._restore(checked, small, finals)
        begin = 0
        for block in self._storage.live_blocks():
            fill_block(block, rows[begin : begin + len(block)])
            begin += len(block)
        return small

    def load(self, path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
        """The same from a file."""
        watchers: dict[str, FieldWatcher] = {}

        def prepare(reader: CheckpointReader) -> Mapping[str, Watcher]:
            self._check_made(reader.meta)
            reader.require_generator(self._reader.generator.get_state())
            reader.require(self._wanted())
            num_rows = reader.columns["rows"][1][0]
            if num_rows > len(self._storage.rows):
                raise reader.refusal(
                    f"holds {num_rows} rows, expected at most {len(self._storage.rows)}"
                )
            watchers.update(self._watchers(num_rows))
            return watchers

        with open_checkpoint(path, self._kind, prepare) as reader:
            num_rows = reader.columns["rows"][1][0]
            names = [name for name in self._small() if name != "finals"]
            small = {name: reader.array(name) for name in names}
            finals = (
                np.empty(reader.columns["finals"][1], np.uint8) if "finals" in watchers else None
            )
            checked = self._checked(small, num_rows, finals, watchers)
            kept = self._storage.successors
            self._restore(checked, small, finals)
            try:
                if kept is not None and finals is not None:
                    reader.read("finals", [kept.finals[: len(finals)]])
                    kept.refresh_device()
                reader.read("rows", self._storage.live_blocks())
            except BaseException:
                self._empty()
                raise
        return small

    def _wanted(self) -> dict[str, tuple[np.dtype, tuple[int | None, ...]]]:
        """Dtype and shape of all arrays of a state."""
        wanted: dict[str, tuple[np.dtype, tuple[int | None, ...]]] = {
            name: (mine.dtype, (None, *mine.shape[1:]) if name in _GROWING else mine.shape)
            for name, mine in self._small().items()
        }
        wanted["rows"] = np.dtype(np.uint8), (None, self._storage.layout.stride)
        return wanted

    def _watchers(self, num_rows: int) -> dict[str, FieldWatcher]:
        """What looks at the bytes of transitions and observations."""
        layout = self._storage.layout
        kept = [name for name in ("link", "env_ids") if name in layout.fields]
        places = {name: field.offset for name, field in layout.fields.items()}
        truths = [
            (field.offset, field.nbytes)
            for field in layout.fields.values()
            if field.dtype == np.bool_
        ]
        watchers = {"rows": FieldWatcher(num_rows, {name: places[name] for name in kept}, truths)}
        if self._storage.successors is not None:
            watchers |= {name: FieldWatcher(0, {}, _obs_truths(layout)) for name in _KEPT[:2]}
        return watchers

    def _check_made(self, meta: Mapping[str, Any]) -> None:
        """Raise BufferMisuseError unless the state is of a buffer made like this one."""
        own = self._meta()
        version = meta.get("state_version")
        if type(version) is int and version == 1:  # all that the first release had
            meta = {**meta, "state_version": _VERSION, "settings": self._settings}
        for name in ("kind", "state_version"):
            found = meta.get(name)
            if type(found) is not type(own[name]) or found != own[name]:
                raise BufferMisuseError(
                    f"state has {name} {found!r:.99}, expected {own[name]!r}; pass what "
                    "state_dict() of such a buffer returned"
                )
        check_settings(_listed(meta), _listed(own))
        # Where the fields lie, if another release places them otherwise.
        check_settings(*({"layout": [s.get("fields"), s.get("constants")]} for s in (meta, own)))

    def _checked(
        self,
        small: Mapping[str, np.ndarray],
        num_rows: int,
        finals: np.ndarray | None,
        watchers: Mapping[str, FieldWatcher],
    ) -> np.ndarray:
        """Return the integers of a state with all that follows from others made anew.

        Args:
            small: Arrays of the shapes and dtypes of `_wanted`, other than the next two.
            num_rows: Rows in the state.
            finals: uint8 (F, S), not looked at, or None.
            watchers: They have seen the rows, and the observations.

        Raises:
            BufferMisuseError: The arrays do not fit this buffer, or not one another.
        """
        if not self._reader.generator.accepts_state(small["generator"]):
            raise other_generator()
        found, own = small["state"], self._storage.state
        layout, capacity = self._storage.layout, int(own[at.CAPACITY])
        num_rings, num_envs = int(own[at.NUM_RINGS]), int(own[at.NUM_ENVS])
        if constant_part(found) != constant_part(own):
            raise _contradiction("its sizes are not those of its settings")
        made = new_state(layout, capacity, num_rings, num_envs)
        for place, size in _KEPT_PARTS.items():
            part = slice(own[place], own[place] + own[size])
            made[part] = found[part]
        totals = made[made[at.TOTALS] :][:num_rings]
        if totals.min() < 0 or totals.max() > _MOST_ADDED // num_rings:
            raise _contradiction("it has numbers of transitions that cannot be")
        pointers, counts = totals % capacity, np.minimum(totals, capacity)
        made[made[at.POINTERS] :][:num_rings] = pointers
        made[at.ADDED], made[at.COUNT] = totals.sum(), counts.sum()
        made[at.NUM_FREE] = found[at.NUM_FREE]
        tally(made)
        if (made[[at.ADDED, at.COUNT]] != found[[at.ADDED, at.COUNT]]).any() or (
            found[found[at.POINTERS] :][:num_rings] != pointers
        ).any():
            raise _contradiction("its counts of transitions differ from one another")
        if num_rows != made[at.COUNT]:
            raise _contradiction(f"it has {num_rows} rows, expected {made[at.COUNT]}")
        stopped = made[made[at.STOPPED] :][:num_envs]
        if stopped.size and (stopped.min() < 0 or stopped.max() > 1):
            raise _contradiction("it has marks of ended episodes that are neither 0 nor 1")
        for name, watcher in watchers.items():
            if watcher.num_wrong:
                raise _contradiction(f"{watcher.num_wrong} bytes of bools in {name} are no bools")
        self._check_links(made, small, finals, watchers["rows"].kept)
        self._check_own(small, int(made[at.COUNT]))
        return made

    def _check_links(
        self,
        state: np.ndarray,
        small: Mapping[str, np.ndarray],
        finals: np.ndarray | None,
        kept: Mapping[str, np.ndarray],
    ) -> None:
        """Raise BufferMisuseError if a row leads to one that does not follow, or to none."""
        nothing = np.zeros(0, np.int32)
        num_finals = 0 if finals is None else len(finals)
        num_live, num_envs = int(state[at.COUNT]), int(state[at.NUM_ENVS])
        if not kept:
            return
        slots, free = small.get("slots", nothing), small.get("free", np.zeros(0, np.int64))
        if len(free) != num_finals:
            raise _contradiction(f"it has {num_finals} final observations and {len(free)} places")
        is_marked = np.zeros(num_live + num_finals, np.uint8)
        links, env_ids = kept.get("link", nothing), kept.get("env_ids", nothing)
        newest = np.zeros(num_envs, np.int64)
        row = first_wrong_row(state, links, env_ids, slots, num_finals, newest, is_marked)
        if row < -1:
            raise _contradiction(f"the newest transition of env {-2 - row} is another one")
        if row >= 0:
            raise _contradiction(f"row {row} says wrongly what follows it, or whose it is")
        if finals is not None and not are_free(free, state[at.NUM_FREE], is_marked[num_live:]):
            raise _contradiction("its free places of final observations are not those not in use")

    def _restore(
        self, state: np.ndarray, small: Mapping[str, np.ndarray], finals: np.ndarray | None
    ) -> None:
        """Take over all but the rows; `finals` (F, S) may be filled in later."""
        storage = self._storage
        kept = storage.successors
        num_finals = 0 if finals is None else len(finals)
        if kept is not None and num_finals > len(kept.finals):
            kept.resize(num_finals)
        storage.state[:] = state
        if kept is not None and finals is not None:
            missing = len(kept.finals) - num_finals
            num_free = int(storage.state[at.NUM_FREE])
            for name, values in (
                *((n, small[n]) for n in _KEPT if n != "finals"),
                ("finals", finals),
            ):
                getattr(kept, name)[: len(values)] = values
            spare = np.arange(num_finals, len(kept.finals))
            kept.free[num_free : num_free + missing] = spare
            storage.state[at.NUM_FREE] += missing
            kept.refresh_device()
        if storage.staging is not None:
            storage.staging.refresh()
        self._reader.generator.set_state(small["generator"])

    def _empty(self) -> None:
        """Forget all transitions: some of them were not read."""
        storage, kept = self._storage, self._storage.successors
        own = storage.state
        own[:] = new_state(storage.layout, *own[[at.CAPACITY, at.NUM_RINGS, at.NUM_ENVS]].tolist())
        if kept is not None:
            kept.free[:], kept.slots[:] = np.arange(len(kept.free)), 0
            own[at.NUM_FREE] = len(kept.free)
        if storage.staging is not None:
            storage.staging.refresh()


# What of the integers does not follow from others: where an array begins, and how long it is.
_KEPT_PARTS = {at.TOTALS: at.NUM_RINGS, at.LAST: at.NUM_ENVS, at.STOPPED: at.NUM_ENVS}


def _contradiction(reason: str) -> BufferMisuseError:
    return BufferMisuseError(
        f"state contradicts itself; it was changed after it was made: {reason}"
    )


def _obs_truths(layout: RecordLayout) -> Iterable[tuple[int, int]]:
    """Where bools lie in an observation that is kept apart: bytes from its start, and how many."""
    leaves = [layout.fields[path] for path in layout.obs]
    first = min(leaf.offset for leaf in leaves)
    return [(leaf.offset - first, leaf.nbytes) for leaf in leaves if leaf.dtype == np.bool_]


def _listed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and fields by name, to be compared."""
    fields = name_fields(meta.get("fields"))
    fields.pop("link", None)  # follows from the settings
    settings = meta.get("settings")
    return {**(settings if isinstance(settings, Mapping) else {}), "field": fields}
