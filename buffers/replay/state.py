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
from buffers.core.checkpoint import read_state
from buffers.core.errors import BufferMisuseError, CheckpointError
from buffers.core.generator import other_generator
from buffers.core.rows import row_views
from buffers.core.spaces import describe_space, space_of
from buffers.core.state import (
    Block,
    LoadedState,
    SavedBuffer,
    Wanted,
    check_bools,
    check_settings,
    contradiction,
    name_fields,
)
from buffers.replay.folder import Folder
from buffers.replay.plan import FrameStack, Plan
from buffers.replay.table import Table

__all__ = ["STATE_VERSION", "TableState", "check_described", "describe"]

STATE_VERSION = 4
_MOST_ADDED = 2**62  # rows ever added; what is added later has to be counted, too
_MADE_WITH = "made_with"  # the arguments of the constructor, in files only
_SAVED = frozenset((
    "num_envs", "n_step", "gamma", "store_next", "track_env", "track_episodes", "over", "device",
    "staged", "frame_stack", "extra_columns",
))  # fmt: skip
_MALFORMED = (
    AssertionError, AttributeError, IndexError, KeyError, OverflowError, RecursionError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
_PER_ENV = ("last", "slot", "is_open")
_GROWING = ("rows", "units", "back")  # of no certain length


class TableState(SavedBuffer):
    """Gives a replay buffer states, files and copies."""

    _large = ("rows",)

    _table: Table
    _kind: str
    _folder: Folder | None
    _random: Any
    _sequences: Any
    _has_weights: bool
    _new_sequence_value: Any
    _settle: Any
    _there: Any

    def _own_settings(self) -> dict[str, Any]:
        """Further settings that a state must share with the buffer it is loaded into."""
        return {}

    def _own_state(self) -> dict[str, Any]:
        """What the class holds besides the table, as tensors; views will do."""
        if self._sequences is None:
            return {}
        self._sequences.follow(self._new_sequence_value())
        return self._sequences.state(has_priorities=self._has_weights)

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
        table.mend()
        arrays: dict[str, Any] = {
            "rings": table.rings.view(np.int64).reshape(-1, 2),
            "generator": self._random.get_state(),
        }
        if self._folder is not None:  # the rest is in there
            self._folder.flush()
            arrays["is_open"] = table.envs["is_open"].copy()
            return {name: [array] for name, array in arrays.items()}
        if table.plan.num_envs:
            arrays |= {name: table.envs[name].copy() for name in _PER_ENV}
        if table.once is not None:
            arrays |= table.once.state()
        arrays |= self._own_state()
        return {"rows": [*held_blocks(table)], **{name: [arrays[name]] for name in arrays}}

    def _wanted_arrays(self) -> Wanted:
        wanted: Wanted = {}
        for name, (first, *_) in self._saved_arrays().items():
            array = first.numpy() if isinstance(first, torch.Tensor) else first
            length = None if name in _GROWING else len(array)
            wanted[name] = array.dtype, (length, *array.shape[1:])
        return wanted

    def _check_arrays(self, state: LoadedState) -> None:
        if not self._random.accepts_state(state.small["generator"]):
            raise other_generator()
        if self._folder is not None:
            check_bools("is_open", [state.small["is_open"]])
            self._folder.require_writable()
        else:
            check_table(self._table, state.small, state.large["rows"])
            self._check_own_state(state.small)

    def _take(self, state: LoadedState) -> None:
        if self._folder is not None:
            self._take_folder_state(self._folder, state.small)
        else:
            take_table(self._table, state.small, state.large["rows"])
            if self._there is not None:
                self._there.push()
            self._take_own_state(state.small)
        self._random.set_state(state.small["generator"])

    def _take_folder_state(self, folder: Folder, state: Mapping[str, np.ndarray]) -> None:
        """Bring back where episodes were; rows that were added since stay."""
        table, rings = self._table, state["rings"]
        if (rings[:, 1] == table.committed).all():
            table.envs["is_open"] = state["is_open"]
        if (rings[:, 1] > table.committed).any():
            warnings.warn(
                f"the folder has had {table.num_added} rows added, fewer than the "
                f"{rings[:, 1].sum()} when the state was taken: it is another folder, or the "
                "power was lost; the rows that it has are kept",
                stacklevel=6,
            )
        folder.arrays["generator"][...] = state["generator"]

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

    Args:
        kind: Name of the buffer class.
        plan: Of the table.
        own: Settings of the class.
    """
    layout, frames = plan.layout, plan.layout.frames
    settings: dict[str, Any] = {
        "capacity": plan.capacity,
        "rings": plan.num_rings,
        "num_envs": plan.num_envs,
        "store_next": not plan.is_once,
        "n_step": plan.n_step,
        "gamma": plan.gamma,
        "track_episodes": plan.has_sequences,
    }
    if frames is not None:
        settings["frame_stack"] = frames.num_frames
        settings["frame"] = f"{frames.dtype} {frames.shape}"
        settings["axis of the stack"] = frames.axis
    return {
        "kind": kind,
        "state_version": STATE_VERSION,
        "settings": {**settings, **own},
        "fields": layout.describe(),
        "stride": layout.stride,
    }


def check_described(state: Any, own: Mapping[str, Any]) -> None:
    """Raise BufferMisuseError unless a state is of a buffer that describes itself as ours."""
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise BufferMisuseError(f"state is a {kind}, expected what state_dict() returned")
    check_settings(*({n: s.get(n) for n in ("kind", "state_version")} for s in (state, own)))
    listed = []
    for each in (state, own):
        fields, settings = name_fields(each.get("fields")), each.get("settings")
        fields.pop("link", None)  # follows from the settings
        listed.append({**(settings if isinstance(settings, Mapping) else {}), "field": fields})
    check_settings(*listed)
    check_settings(*({"layout": [s.get("fields"), s.get("stride")]} for s in (state, own)))


def held_blocks(table: Table) -> list[np.ndarray]:
    """The rows of each ring that hold something, in the order of the table; on the CPU.

    What is on the CPU is not copied, and each block has memory of no more than its rows.
    """
    span, rows = table.plan.span, table.rows
    counts = np.minimum(table.begun, span)
    if (counts == span).all():
        return [rows.cpu().numpy()]
    blocks = [rows[r * span : r * span + int(counts[r])].cpu().numpy() for r in range(len(counts))]
    return [block for block in blocks if len(block)] or [rows[:0].cpu().numpy()]


def _split(plan: Plan, rings: np.ndarray, blocks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The rows of each ring that hold something, out of one block of all or one of each that has.

    Raises:
        BufferMisuseError: They are others than the ring counts.
    """
    counts = np.minimum(rings[:, 0], plan.span)
    sizes = [int(count) for count in counts if count] if len(blocks) > 1 else [int(counts.sum())]
    if [*map(len, blocks)] != sizes:
        raise contradiction(f"it has other rows than {sizes}")
    if len(blocks) == 1:
        return np.split(blocks[0], np.cumsum(counts)[:-1])
    rest = iter(blocks)
    return [next(rest) if count else blocks[0][:0] for count in counts]


def _read_column(plan: Plan, parts: list[np.ndarray], path: str) -> np.ndarray:
    """A column of the rows that each ring holds, as that of all rows, 0 where there is none."""
    field = {path: plan.layout.fields[path]}
    found = np.zeros((plan.num_rings, plan.span, *field[path].shape), field[path].dtype)
    for column, part in zip(found, parts, strict=True):
        is_aligned = part.flags.aligned and not part.ctypes.data % 8
        words = (part if is_aligned else part.copy()).view(np.int64)
        column[: len(part)] = row_views(words, field)[path]
    return found.reshape(plan.num_rows, *field[path].shape)


def _links_there(plan: Plan, rings: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    """The links int32 (num_rows,) of the rows whose transitions are still there, 0 elsewhere."""
    numbers, oldest = _numbers(plan, rings)
    return np.where(numbers >= oldest, _read_column(plan, parts, "link"), 0)


def _numbers(plan: Plan, rings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The newest committed number of each row, and the oldest that is still in its ring."""
    begun, committed = np.repeat(rings.T, plan.span, axis=1)
    newest, places = committed - 1, np.arange(plan.num_rows) % plan.span
    return newest - (newest - places) % plan.span, np.maximum(begun - plan.span, 0)


def check_table(
    table: Table, state: Mapping[str, np.ndarray], blocks: Sequence[np.ndarray]
) -> None:
    """Check what a state says of the table.

    Args:
        table: Which is to be filled.
        state: Arrays by name, of the dtypes and shapes that the table has.
        blocks: uint8 (?, stride) each, rows that hold something.

    Raises:
        BufferMisuseError: It does not fit the table, or its parts not one another.
    """
    plan, rings, fields = table.plan, state["rings"], table.plan.layout.fields
    begun, committed = rings.T
    bad = (committed < 0) | (begun < committed) | (begun - committed > plan.span)
    if bad.any() or begun.max() > _MOST_ADDED // plan.num_rings:
        raise contradiction("it has numbers of transitions that cannot be")
    parts = _split(plan, rings, blocks)
    for path, field in fields.items():
        if field.dtype == np.bool_:
            place = field.offset, field.nbytes
            check_bools(path, parts, [place])
    ring_of = np.arange(plan.num_envs) // max(1, plan.num_envs // plan.num_rings)
    if "env_ids" in fields:
        is_held = np.arange(plan.span) < np.minimum(begun, plan.span)[:, None]
        held = np.flatnonzero(is_held)
        ids = _read_column(plan, parts, "env_ids")[held]
        fits = (ids >= 0) & (ids < plan.num_envs)
        if not fits.all() or (plan.num_rings > 1 and (ring_of[ids] != held // plan.span).any()):
            raise contradiction("it has rows of environments that there are not")
    if plan.num_envs:
        check_bools("is_open", [state["is_open"]])
        if state["last"].min() < 0 or (state["last"] > committed[ring_of]).any():
            raise contradiction("it has newest transitions that cannot be")
    if plan.is_linked:
        links = _links_there(plan, rings, parts)
        if table.once is not None:
            table.once.check(state, links)
        _check_links(plan, state, links, ring_of, len(state.get("units", ())))


def _check_links(
    plan: Plan, state: Mapping[str, np.ndarray], links: np.ndarray, ring_of: np.ndarray, slots: int
) -> None:
    """Raise BufferMisuseError if a row leads to one that does not follow, or to none.

    Args:
        plan: Of the table.
        state: See `check_table`.
        links: Of `_links_there`.
        ring_of: int64 (N,), rings of environments.
        slots: P; 0 where every row has its next observation.
    """
    span, num_rows = plan.span, plan.num_rows
    numbers, oldest = _numbers(plan, state["rings"])
    if links.min() < 0 or links.max() > num_rows + slots:
        raise contradiction("it has rows that lead to none")
    rows = np.flatnonzero((links > 0) & (links <= num_rows))
    led = links[rows] - 1
    is_next = (numbers[led] > numbers[rows]) & (numbers[led] >= oldest[led])
    if not (is_next & (led // span == rows // span)).all():
        raise contradiction("it has rows that lead to one that does not follow")
    used = links[links > 0]
    if len(np.unique(used)) < len(used):
        raise contradiction("two rows lead to the same one")
    if slots and not 0 <= state["slot"].min() <= state["slot"].max() < slots:
        raise contradiction("it has newest observations that there are not")
    last = state["last"] - 1
    newest = ring_of * span + last % span
    alive = last >= oldest[newest]
    wrong = alive & (links[newest] != (state["slot"] + num_rows + 1 if slots else 0))
    if wrong.any():
        raise contradiction(f"the newest transition of env {np.argmax(wrong)} is another one")
    if slots and ((links == 0) & (numbers >= oldest)).any():
        raise contradiction("it has rows without a next observation")


def take_table(table: Table, state: Mapping[str, np.ndarray], blocks: Sequence[np.ndarray]) -> None:
    """Take over a state that was checked, or is of a buffer; see `check_table`."""
    plan, rings = table.plan, state["rings"]
    table.begun[...] = table.committed[...] = 0  # what is half there can't be drawn
    parts = _split(plan, rings, blocks)
    if sum(map(len, parts)) < plan.num_rows:
        table.rows.zero_()
    for ring, part in enumerate(parts):
        if len(part):
            begin = ring * plan.span
            table.rows[begin : begin + len(part)].copy_(_tensor(part))
    for name in _PER_ENV if plan.num_envs else ():
        table.envs[name] = state[name]
    if plan.is_linked:
        table.links[...] = _links_there(plan, rings, parts)
    if plan.has_sequences:
        table.row_envs[...] = _read_column(plan, parts, "env_ids")
    if table.once is not None:
        table.once.take(state, table.links)
    table.begun[...], table.committed[...] = rings.T
    table.push()


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())
