"""States of replay buffers: a dict of tensors and numbers, and its file by `torch.save`.

A state is not trusted: sizes, dtypes and ranges are checked before anything is changed, so that it
can't make a buffer read or write other memory. Free slots, sums of priorities and other derived
numbers are recomputed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from buffers.core.generator import other_generator
from buffers.core.state import Block, LoadedState, SavedBuffer, check_bools, contradiction
from buffers.replay.folder import Folder
from buffers.replay.plan import OLDER, ROW_DEFAULTS, Plan
from buffers.replay.table import Table

__all__ = ["TableState", "describe"]

_MOST_ADDED = 2**62  # rows ever added: leaves room to count later ones in int64


class TableState(SavedBuffer):
    """Mixin with states, files and copies for replay buffers."""

    _large = ("rows",)
    _growing = ("rows", "units", "free")
    _options_in_files = frozenset((*ROW_DEFAULTS, "num_envs", "over", "device", "staged", "alpha"))

    _table: Table
    _kind: str
    _folder: Folder | None
    _random: Any
    _sequences: Any
    _settle: Any

    def _own_settings(self) -> dict[str, Any]:
        """Further settings that a state must share with the buffer it is loaded into."""
        return {}

    def _own_state(self) -> dict[str, Any]:
        """Arrays of the class besides the table, by name; may be views."""
        return {} if self._sequences is None else self._sequences.state()

    def _check_own_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Raise BufferMisuseError unless the arrays of a state fit."""
        if self._sequences is not None:
            self._sequences.check(state)

    def _take_own_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over checked arrays, after the table."""
        if self._sequences is not None:
            self._sequences.restore(state)

    def _described(self) -> dict[str, Any]:
        return describe(self._kind, self._table.plan, self._own_settings())

    def _saved_arrays(self) -> dict[str, list[Block]]:
        table = self._table
        self._settle()
        table.recover()
        rings = table.rings.view(np.int64).reshape(-1, 2)
        arrays: dict[str, Any] = {"rings": rings, "generator": self._random.get_state()}
        if self._folder is not None:  # the rest is in the files
            self._folder.flush()
            arrays["is_open"] = table.envs["is_open"].copy()
            return {name: [array] for name, array in arrays.items()}
        if table.plan.num_envs:
            arrays |= {name: values.copy() for name, values in table.envs.items()}
        if table.once is not None:
            arrays |= table.once.state()
        arrays |= self._own_state()
        return {"rows": _held_blocks(table), **{name: [arrays[name]] for name in arrays}}

    def _check_arrays(self, state: LoadedState) -> None:
        if not self._random.accepts_state(state.small["generator"]):
            raise other_generator()
        if self._folder is not None:
            check_bools("is_open", [state.small["is_open"]])
            self._folder.require_writable()
        else:
            _check_table(self._table, state.small, state.large["rows"])
            self._check_own_state(state.small)

    def _take(self, state: LoadedState) -> None:
        """Take over a checked state; with a folder only open episodes, as its rows stay."""
        table, rings, generator = self._table, state.small["rings"], state.small["generator"]
        if self._folder is None:
            _take_table(table, state.small, state.large["rows"])
            self._take_own_state(state.small)
        else:
            if (rings[:, 1] == table.committed).all():
                table.envs["is_open"][...] = state.small["is_open"]
            if (rings[:, 1] > table.committed).any():
                warnings.warn(
                    f"the folder has had {table.num_added} rows added, fewer than the "
                    f"{rings[:, 1].sum()} when the state was taken: it is another folder, or the "
                    "power was lost; the rows that it has are kept",
                    stacklevel=5,
                )
        self._random.set_state(generator)

    def _made_with(self) -> dict[str, Any] | None:
        return None if self._folder else super()._made_with()  # rows are in files


def describe(kind: str, plan: Plan, own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a state must share with the buffer it is loaded into, all valid in JSON.

    `kind` names the class of the buffer; `own` are its settings besides those of the plan.
    """
    frames = plan.layout.frames
    settings: dict[str, Any] = {
        "capacity": plan.capacity, "rings": plan.num_rings, "num_envs": plan.num_envs,
        "store_next": not plan.is_once, "n_step": plan.n_step, "gamma": plan.gamma,
        "track_episodes": plan.has_sequences, "frame_stack": frames and frames.num_frames,
        "axis of the stack": frames and frames.axis, "bytes of a row": plan.layout.stride, **own,
    }  # fmt: skip
    fields = plan.layout.describe()
    return {"kind": kind, "state_version": 7, "settings": settings, "fields": fields}


def _held_blocks(table: Table) -> list[Block]:
    """The rows of each ring that hold something, in the order of the table, on the CPU.

    Rows on the CPU are not copied, and each block covers only its rows.
    """
    span, rows = table.plan.span, table.rows
    counts = np.minimum(table.begun, span)
    if (counts == span).all():
        return [rows.cpu().numpy()]
    blocks = [rows[r * span : r * span + int(counts[r])].cpu().numpy() for r in range(len(counts))]
    return [block for block in blocks if len(block)] or [rows[:0].cpu().numpy()]


class _Loaded:
    """Links in the rows of a state: blocks uint8 (?, stride), of rings int64 (R, 2).

    Attributes:
        held: int64, the rows that hold something, in the order of the blocks.
        is_there: bool (num_rows,), rows whose transitions are still there.
        links: int32 (num_rows,), links of these rows, 0 elsewhere.
        older: int32 (num_rows, F - 1), their units of older frames, 0 elsewhere.
    """

    def __init__(self, plan: Plan, rings: np.ndarray, blocks: Sequence[np.ndarray]):
        self._plan, self._blocks = plan, blocks
        begun, committed = np.repeat(rings.T, plan.span, axis=1)
        places = np.arange(plan.num_rows) % plan.span
        self.held = np.flatnonzero(places < begun)
        if sum(map(len, blocks)) != len(self.held):
            raise contradiction(f"it has other rows than {len(self.held)}")
        numbers = committed - 1 - (committed - 1 - places) % plan.span
        self.is_there = numbers >= np.maximum(begun - plan.span, 0)
        self.links, self.older = self.column("link"), self.column(OLDER, (plan.num_frames - 1,))
        self.links[~self.is_there] = self.older[~self.is_there] = 0

    def column(self, path: str, shape: tuple[int, ...] = ()) -> np.ndarray:
        """A column int32 (num_rows, *shape), 0 in rows that hold nothing."""
        field = self._plan.layout.fields.get(path)
        column = np.zeros((self._plan.num_rows, *shape), np.int32)
        if field is not None:
            parts = [b[:, field.offset : field.offset + field.nbytes] for b in self._blocks]
            column[self.held] = np.concatenate(parts).view(np.int32).reshape(-1, *shape)
        return column


def _check_table(
    table: Table, state: Mapping[str, np.ndarray], blocks: Sequence[np.ndarray]
) -> None:
    """Raise BufferMisuseError unless a state fits the table and leads to no other memory.

    `state` has arrays by name, with dtypes and shapes of the table; `blocks` are its rows.
    """
    plan, rings, fields = table.plan, state["rings"], table.plan.layout.fields
    begun, committed = rings.T
    bad = (committed < 0) | (begun < committed) | (begun - committed > plan.span)
    if bad.any() or begun.max() > _MOST_ADDED // plan.num_rings:
        raise contradiction("it has numbers of transitions that cannot be")
    loaded = _Loaded(plan, rings, blocks)
    check_bools("rows", blocks, [(f.offset, f.nbytes) for f in fields.values() if f.dtype == bool])
    ids, links = loaded.column("env_ids"), loaded.links
    most = plan.num_rows + len(state.get("units", ()))
    is_led = not 0 <= links.min() <= links.max() <= most
    if is_led or not 0 <= ids.min() <= ids.max() <= max(plan.num_envs - 1, 0):
        raise contradiction("it has rows of environments that there are not, or that lead to none")
    if not plan.num_envs:
        return
    check_bools("is_open", [state["is_open"]])
    rings_of_envs, last = np.arange(plan.num_envs) * plan.num_rings // plan.num_envs, state["last"]
    is_wrong = last.min() < 0 or (last > committed[rings_of_envs]).any()
    if table.once is not None and not is_wrong:
        newest = rings_of_envs * plan.span + (last - 1) % plan.span
        is_held = last > np.maximum(begun - plan.span, 0)[rings_of_envs]
        newest = newest[is_held & (links[newest] > 0)]
        is_wrong = len(np.unique(newest)) < len(newest) or not links[loaded.is_there].all()
    if is_wrong:
        raise contradiction("it has newest transitions that cannot be")
    if table.once is not None:
        table.once.check(state, links, loaded.older)


def _take_table(
    table: Table, state: Mapping[str, np.ndarray], blocks: Sequence[np.ndarray]
) -> None:
    """Take over a state that was checked; see `_check_table`."""
    at, loaded = 0, _Loaded(table.plan, state["rings"], blocks)
    if table.once is not None:
        table.once.resize(len(state["units"]), is_asked=True)
    table.forget()
    if table.once is not None:
        table.once.take(state)
    if len(loaded.held) < table.plan.num_rows:
        table.rows.zero_()
    for block in blocks:
        rows = torch.from_numpy(loaded.held[at : at + len(block)]).to(table.device)
        pages = torch.from_numpy(block if block.flags.writeable else block.copy())
        table.rows.index_copy_(0, rows, pages.to(table.device))
        at += len(block)
    others = loaded.links, loaded.older, state.get("free")
    table.restore(state["rings"], state.get("last"), state.get("is_open"), *others)
