"""States of replay buffers: a dict of tensors and numbers, and a file of it by `torch.save`.

Nothing in a state is believed: sizes, dtypes and ranges are checked before anything is changed, so
that none can make a buffer read or write other memory; which slots are free, sums of priorities and
counts are found out anew.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import resolve_device
from buffers.core.errors import BufferMisuseError, CheckpointError
from buffers.core.generator import other_generator
from buffers.core.rows import row_views
from buffers.core.spaces import describe_space, space_of
from buffers.core.state import (
    Block,
    LoadedState,
    SavedBuffer,
    check_bools,
    check_settings,
    contradiction,
    read_state,
)
from buffers.replay.folder import Folder
from buffers.replay.plan import OLDER, ROW_DEFAULTS, FrameStack, Plan
from buffers.replay.table import Table

__all__ = ["TableState", "check_described", "describe"]

_MOST_ADDED = 2**62  # rows ever added; what is added later has to be counted, too
_MADE_WITH = "made_with"  # the arguments of the constructor, in files only
_SAVED = frozenset((*ROW_DEFAULTS, "num_envs", "over", "device", "staged", "alpha"))
_MALFORMED = (
    AssertionError, AttributeError, IndexError, KeyError, OverflowError, RecursionError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
_PER_ENV = ("last", "is_open")


class TableState(SavedBuffer):
    """Gives a replay buffer states, files and copies."""

    _large = ("rows",)
    _growing = ("rows", "units", "free")

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
        """What the class holds besides the table, as tensors; views will do."""
        return {} if self._sequences is None else self._sequences.state()

    def _check_own_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Raise BufferMisuseError unless the arrays of a state fit."""
        if self._sequences is not None:
            self._sequences.check(state)

    def _take_own_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over arrays that were checked; the table was taken over before."""
        if self._sequences is not None:
            self._sequences.restore(state)

    def _described(self) -> dict[str, Any]:
        return describe(self._kind, self._table.plan, self._own_settings())

    def _check_described(self, meta: Mapping[str, Any]) -> None:
        check_described(meta, self._described())

    def _saved_arrays(self) -> dict[str, list[Block]]:
        table = self._table
        self._settle()
        table.recover()
        rings = table.rings.view(np.int64).reshape(-1, 2)
        arrays: dict[str, Any] = {"rings": rings, "generator": self._random.get_state()}
        if self._folder is not None:  # the rest is in there
            self._folder.flush()
            arrays["is_open"] = table.envs["is_open"].copy()
            return {name: [array] for name, array in arrays.items()}
        if table.plan.num_envs:
            arrays |= {name: table.envs[name].copy() for name in _PER_ENV}
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
        if self._folder is not None:
            self._take_folder_state(self._folder, state.small)
        else:
            _take_table(self._table, state.small, state.large["rows"])
            self._take_own_state(state.small)
        self._random.set_state(state.small["generator"])

    def _take_folder_state(self, folder: Folder, state: Mapping[str, np.ndarray]) -> None:
        """Bring back where episodes were; rows that were added since stay."""
        table, rings = self._table, state["rings"]
        if (rings[:, 1] == table.committed).all():
            table.envs["is_open"][...] = state["is_open"]
        if (rings[:, 1] > table.committed).any():
            warnings.warn(
                f"the folder has had {table.num_added} rows added, fewer than the "
                f"{rings[:, 1].sum()} when the state was taken: it is another folder, or the "
                "power was lost; the rows that it has are kept",
                stacklevel=6,
            )

    def _file_state(self) -> dict[str, Any]:
        return {**super()._file_state(), _MADE_WITH: self._arguments()}

    def _arguments(self) -> dict[str, Any] | None:
        """Those of the constructor as torch saves them; None of a buffer whose rows are in files.

        The exponents of priorities are left out: the state has them.
        """
        if self._folder is not None:
            return None
        _, (capacity, *spaces), options = self._made_by
        given = {name: options[name] for name in sorted(_SAVED & options.keys())}
        if isinstance(given.get("frame_stack"), int | np.integer):
            given["frame_stack"] = FrameStack(given["frame_stack"])
        made = {name: _plain(value) for name, value in given.items() if value is not None}
        return {"capacity": int(capacity), "spaces": _plain(spaces), **made}

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], *, device: torch.device | str | None = None
    ) -> Self:
        """Make a buffer of what `save` wrote: of its size, spaces and options, and filled.

        Nothing in a file is believed, but others must not write to it meanwhile.

        Args:
            path: Of the file.
            device: Where the buffer is to live; None takes that of the buffer that was saved. Its
                generator goes on, so that it must be of the same kind.

        Raises:
            CheckpointError: The file is damaged, cut off, or no checkpoint, or of another class, or
                of a buffer whose rows are in a folder.
            BufferMemoryError: There is no memory for such a buffer.
            BufferMisuseError: There is no such device.
            OSError: The file cannot be opened.

        >>> import tempfile
        >>> from buffers import SharedReplayBuffer
        >>> from gymnasium.spaces import Box, Discrete
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     SharedReplayBuffer(1000, Box(-1, 1, (4,)), Discrete(2)).save(f"{folder}/replay.pt")
        ...     SharedReplayBuffer.from_file(f"{folder}/replay.pt").capacity
        1000
        """
        state, name = read_state(path, cls.__name__), os.fspath(path)
        if not isinstance(made := state.get(_MADE_WITH), Mapping):
            raise CheckpointError(
                f"{name} does not say how its buffer was made, as of one with storage='memmap', "
                "whose rows are in its folder; make that buffer, and call its load"
            )
        try:
            buffer = cls(**_read_arguments(made, device))
        except (BufferMisuseError, *_MALFORMED) as error:
            if device is not None:
                resolve_device(device)  # that is not of the file
            raise CheckpointError(f"{name} says wrongly how its buffer was made: {error}") from None
        buffer._load(state, name)
        return buffer


def _plain(value: Any) -> Any:
    """An argument of a constructor as numbers, strings, lists, dicts and tensors."""
    if isinstance(value, Space):
        return describe_space(value)
    if isinstance(value, FrameStack):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [*map(_plain, value)]
    if isinstance(value, torch.device):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value


def _read_arguments(made: Mapping[str, Any], device: torch.device | str | None) -> dict[str, Any]:
    """Arguments of a constructor, from a file; raise one of _MALFORMED if they are none."""
    found: dict[str, Any] = {name: made[name] for name in _SAVED & made.keys()}
    if "frame_stack" in found:
        found["frame_stack"] = FrameStack(**found["frame_stack"])
    if "extra_columns" in found:
        extras = found["extra_columns"].items()
        found["extra_columns"] = {name: space_of(described) for name, described in extras}
    found |= {} if device is None else {"device": device}
    found["observation_space"], found["action_space"] = map(space_of, made["spaces"])
    return {"capacity": made["capacity"], **found}


def describe(kind: str, plan: Plan, own: Mapping[str, Any]) -> dict[str, Any]:
    """What a state must share with the buffer it is loaded into; JSON has all of it.

    `kind` names the class of the buffer, `own` are its settings besides those of the plan.
    """
    frames, fields = plan.layout.frames, plan.layout.fields.values()
    settings: dict[str, Any] = {
        "capacity": plan.capacity, "rings": plan.num_rings, "num_envs": plan.num_envs,
        "store_next": not plan.is_once, "n_step": plan.n_step, "gamma": plan.gamma,
        "track_episodes": plan.has_sequences, "frame_stack": frames and frames.num_frames,
        "axis of the stack": frames and frames.axis, "bytes of a row": plan.layout.stride, **own,
    }  # fmt: skip
    described = {path: f"{dtype} {shape} at byte {at}" for path, shape, dtype, at in fields}
    return {"kind": kind, "state_version": 6, "settings": settings, "fields": described}


def check_described(state: Any, own: Mapping[str, Any]) -> None:
    """Raise BufferMisuseError unless a state is of a buffer that describes itself as ours."""
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise BufferMisuseError(f"state is a {kind}, expected what state_dict() returned")
    check_settings({name: state.get(name) for name in own}, own)


def _held_blocks(table: Table) -> list[Block]:
    """The rows of each ring that hold something, in the order of the table; on the CPU.

    What is on the CPU is not copied, and each block has memory of no more than its rows.
    """
    span, rows = table.plan.span, table.rows
    counts = np.minimum(table.begun, span)
    if (counts == span).all():
        return [rows.cpu().numpy()]
    blocks = [rows[r * span : r * span + int(counts[r])].cpu().numpy() for r in range(len(counts))]
    return [block for block in blocks if len(block)] or [rows[:0].cpu().numpy()]


class _Loaded:
    """What the rows of a state say: uint8 (?, stride) in blocks, of rings int64 (R, 2).

    Attributes:
        blocks: See above.
        held: int64, the rows that hold something, in the same order.
        is_there: bool (num_rows,), rows whose transitions are still there.
        links: int32 (num_rows,), of these, 0 elsewhere.
        older: int32 (num_rows, F - 1), the same of the units of older frames.

    Raises:
        BufferMisuseError: There are other rows than the rings count.
    """

    def __init__(self, plan: Plan, rings: np.ndarray, blocks: Sequence[np.ndarray]):
        self._plan, self.blocks, frames = plan, blocks, plan.layout.frames
        begun, committed = np.repeat(rings.T, plan.span, axis=1)
        places = np.arange(plan.num_rows) % plan.span
        self.held = np.flatnonzero(places < begun)
        if sum(map(len, blocks)) != len(self.held):
            raise contradiction(f"it has other rows than {len(self.held)}")
        shape = plan.num_rows, 0 if frames is None else frames.num_frames - 1
        self.links = self.column("link") if plan.is_linked else np.zeros(shape[0], np.int32)
        self.older = self.column(OLDER) if shape[1] else np.zeros(shape, np.int32)
        numbers = committed - 1 - (committed - 1 - places) % plan.span
        self.is_there = numbers >= np.maximum(begun - plan.span, 0)
        self.links[~self.is_there] = self.older[~self.is_there] = 0

    def column(self, path: str) -> np.ndarray:
        """A column of all rows, 0 where there is none."""
        field, found = self._plan.layout.fields[path], []
        for block in self.blocks:
            is_aligned = block.flags.aligned and not block.ctypes.data % 8
            words = (block if is_aligned else block.copy()).view(np.int64)
            found.append(row_views(words, {path: field})[path])
        column = np.zeros((self._plan.num_rows, *field.shape), field.dtype)
        column[self.held] = np.concatenate(found)
        return column


def _check_table(
    table: Table, state: Mapping[str, np.ndarray], blocks: Sequence[np.ndarray]
) -> None:
    """Raise BufferMisuseError unless a state fits the table, so that none reads other memory.

    `state` are arrays by name, of the dtypes and shapes that the table has, `blocks` its rows.
    """
    plan, rings, fields = table.plan, state["rings"], table.plan.layout.fields
    begun, committed = rings.T
    bad = (committed < 0) | (begun < committed) | (begun - committed > plan.span)
    if bad.any() or begun.max() > _MOST_ADDED // plan.num_rings:
        raise contradiction("it has numbers of transitions that cannot be")
    loaded = _Loaded(plan, rings, blocks)
    for field in fields.values():
        if field.dtype == np.bool_:
            check_bools(field.path, blocks, [(field.offset, field.nbytes)])
    if "env_ids" in fields:
        ids = loaded.column("env_ids")
        if not 0 <= ids.min() <= ids.max() < plan.num_envs:
            raise contradiction("it has rows of environments that there are not")
    rings_of_envs = np.arange(plan.num_envs) // max(1, plan.num_envs // plan.num_rings)
    if plan.num_envs:
        check_bools("is_open", [state["is_open"]])
        if state["last"].min() < 0 or (state["last"] > committed[rings_of_envs]).any():
            raise contradiction("it has newest transitions that cannot be")
    links = loaded.links
    if not 0 <= links.min() <= links.max() <= plan.num_rows + len(state.get("units", ())):
        raise contradiction("it has rows that lead to none")
    if table.once is not None:
        newest = rings_of_envs * plan.span + (state["last"] - 1) % plan.span
        is_held = state["last"] > np.maximum(begun - plan.span, 0)[rings_of_envs]
        newest = newest[is_held & (links[newest] > 0)]
        if len(np.unique(newest)) < len(newest) or not links[loaded.is_there].all():
            raise contradiction("newest transitions are the same, or rows lead to nothing")
        table.once.check(state, links, loaded.older)


def _take_table(
    table: Table, state: Mapping[str, np.ndarray], blocks: Sequence[np.ndarray]
) -> None:
    """Take over a state that was checked; see `_check_table`."""
    plan, rings, at = table.plan, state["rings"], 0
    if table.once is not None:
        table.once.make_room(len(state["units"]))
    table.forget()
    if table.once is not None:
        table.once.take(state)
    loaded = _Loaded(plan, rings, blocks)
    if len(loaded.held) < plan.num_rows:
        table.rows.zero_()
    for block in blocks:
        rows = torch.from_numpy(loaded.held[at : at + len(block)]).to(table.device)
        pages = torch.from_numpy(block if block.flags.writeable else block.copy())
        table.rows.index_copy_(0, rows, pages.to(table.device))
        at += len(block)
    others = loaded.links, loaded.older, state.get("free")
    table.restore(rings, state.get("last"), state.get("is_open"), *others)
