"""What a state of a replay buffer says of itself, and what is checked before it is believed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from buffers.core.compiling import njit
from buffers.core.errors import BufferMisuseError
from buffers.core.rows import RowLayout
from buffers.core.state import (
    FieldWatcher,
    LoadedState,
    check_settings,
    contradiction,
    name_fields,
)
from buffers.replay import layout as at
from buffers.replay.layout import constant_part, new_state
from buffers.replay.storage import ReplayStorage

__all__ = [
    "amended_integers",
    "check_meta",
    "checked_integers",
    "describe",
    "describe_rows",
    "watch_fields",
]

_VERSION = 2  # 1 had no settings
_MOST_ADDED = 2**62  # rows ever added; what is added later has to be counted, too
# What of the integers does not follow from others: where an array begins, and how long it is.
_KEPT_PARTS = {at.TOTALS: at.NUM_RINGS, at.LAST: at.NUM_ENVS, at.STOPPED: at.NUM_ENVS}


def describe(kind: str, storage: ReplayStorage, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Version, kind, fields of the rows and settings.

    Args:
        kind: Name of the buffer class.
        storage: Of the buffer.
        settings: Of the buffer, besides what the storage tells: numbers and strings.
    """
    frames = storage.layout.frames
    if frames is not None:
        settings = {
            "frame_stack": frames.num_frames,
            "frame": f"{frames.dtype} {frames.shape}",
            "axis of the stack": frames.axis,
            "frame_bytes": storage.frames.main.shape[1] if storage.frames is not None else 0,
            **settings,
        }
    return describe_rows(kind, storage.layout, storage.state, settings)


def describe_rows(
    kind: str, layout: RowLayout, state: np.ndarray, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The same, of a layout and the integers of a buffer."""
    sizes = {
        "capacity": int(state[at.CAPACITY]),
        "rings": int(state[at.NUM_RINGS]),
        "num_envs": int(state[at.NUM_ENVS]),
        "store_next": not layout.has_successors,
    }
    return {
        "state_version": _VERSION,
        "kind": kind,
        "fields": layout.describe(),
        "constants": constant_part(state),
        "settings": {**sizes, **settings},
    }


def check_meta(meta: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise BufferMisuseError unless a state is of a buffer that describes itself as ours."""
    version = meta.get("state_version")
    if type(version) is int and version == 1:  # all that the first release had
        meta = {**meta, "state_version": _VERSION, "settings": own["settings"]}
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


def watch_fields(storage: ReplayStorage, num_rows: int) -> dict[str, FieldWatcher]:
    """What looks at the bytes of transitions and observations.

    Raises:
        BufferMisuseError: There are more transitions than there is room for.
    """
    if num_rows > len(storage.rows):
        raise BufferMisuseError(
            f"state holds {num_rows} rows, expected at most {len(storage.rows)}"
        )
    layout = storage.layout
    kept = {n: layout.fields[n].offset for n in ("link", "env_ids") if n in layout.fields}
    if "frame_ids" in layout.fields:
        kept |= _places_of_frames(layout)
    truths = [(f.offset, f.nbytes) for f in layout.fields.values() if f.dtype == np.bool_]
    watchers = {"rows": FieldWatcher(num_rows, kept, truths)}
    if storage.successors is not None:
        for name in ("pending", "finals"):
            watchers[name] = FieldWatcher(0, {}, _obs_truths(layout))
    if layout.frames is not None and layout.frames.dtype == np.bool_:
        watchers["frames"] = FieldWatcher(0, {}, [(0, layout.frames.nbytes)])
    return watchers


def _places_of_frames(layout: RowLayout) -> dict[str, int]:
    """Where the ids of frames are in a row, by name."""
    field = layout.fields["frame_ids"]
    return {f"frame {k}": field.offset + 4 * k for k in range(field.shape[0])}


def _check_frames(storage: ReplayStorage, state: LoadedState) -> None:
    """Raise BufferMisuseError if a row, or a stack that goes on, has frames that are not there."""
    kept, heads = state.watchers["rows"].kept, state.small["heads"]
    num_frames = state.shapes["frames"][0]
    ids = [kept[name] for name in _places_of_frames(storage.layout)]
    for values in ids:
        if values.size and (values.min() < 0 or values.max() >= num_frames):
            raise contradiction(f"it has rows of frames that are not among its {num_frames}")
    if (ids[0] == ids[-1]).any():  # the newest was never there before
        raise contradiction("it has rows whose first and last frame are the same")
    is_closed = (heads == -1).all(1)
    is_open = ((heads >= 0) & (heads < num_frames)).all(1)
    if not (is_closed | is_open).all():
        raise contradiction("it has newest stacks of frames that cannot be")


def _obs_truths(layout: RowLayout) -> Iterable[tuple[int, int]]:
    """Where bools lie in an observation that is kept apart: bytes from its start, and how many."""
    leaves = [layout.fields[path] for path in layout.obs]
    return [(leaf.offset - layout.obs_at, leaf.nbytes) for leaf in leaves if leaf.dtype == np.bool_]


def _listed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and fields by name, to be compared."""
    fields = name_fields(meta.get("fields"))
    fields.pop("link", None)  # follows from the settings
    settings = meta.get("settings")
    return {**(settings if isinstance(settings, Mapping) else {}), "field": fields}


def checked_integers(storage: ReplayStorage, state: LoadedState) -> np.ndarray:
    """The integers of a state, checked, with all that follows from others made anew.

    Of the rest it is checked whether it fits them, and this buffer.

    Raises:
        BufferMisuseError: The arrays do not fit this buffer, or not one another.
    """
    found, own = state.small["state"], storage.state
    num_rows = state.shapes["rows"][0]
    made = amended_integers(storage.layout, own, found)
    if num_rows != made[at.COUNT]:
        raise contradiction(f"it has {num_rows} rows, expected {made[at.COUNT]}")
    for name, watcher in state.watchers.items():
        watcher.check_bools(name)
    if storage.frames is not None:
        _check_frames(storage, state)
    _check_links(made, state)
    return made


def amended_integers(layout: RowLayout, own: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Integers checked as far as that goes without rows; what follows from others is made anew.

    Raises:
        BufferMisuseError: They do not fit those of this buffer, or not one another.
    """
    sizes = own[[at.CAPACITY, at.NUM_RINGS, at.NUM_ENVS]].tolist()
    capacity, num_rings, num_envs = sizes
    if constant_part(found) != constant_part(own):
        raise contradiction("its sizes are not those of its settings")
    made = new_state(layout, *sizes)
    for place, size in _KEPT_PARTS.items():
        part = slice(own[place], own[place] + own[size])
        made[part] = found[part]
    totals = made[made[at.TOTALS] :][:num_rings]
    if totals.min() < 0 or totals.max() > _MOST_ADDED // num_rings:
        raise contradiction("it has numbers of transitions that cannot be")
    pointers, counts = totals % capacity, np.minimum(totals, capacity)
    made[made[at.POINTERS] :][:num_rings] = pointers
    made[at.ADDED], made[at.COUNT] = totals.sum(), counts.sum()
    made[at.NUM_FREE] = found[at.NUM_FREE]
    if (made[[at.ADDED, at.COUNT]] != found[[at.ADDED, at.COUNT]]).any() or (
        found[found[at.POINTERS] :][:num_rings] != pointers
    ).any():
        raise contradiction("its counts of transitions differ from one another")
    stopped = made[made[at.STOPPED] :][:num_envs]
    if stopped.size and (stopped.min() < 0 or stopped.max() > 1):
        raise contradiction("it has marks of ended episodes that are neither 0 nor 1")
    return made


def _check_links(integers: np.ndarray, state: LoadedState) -> None:
    """Raise BufferMisuseError if a row leads to one that does not follow, or to none."""
    kept, small, shapes = state.watchers["rows"].kept, state.small, state.shapes
    if not kept:
        return
    nothing = np.zeros(0, np.int32)
    num_finals = shapes["finals"][0] if "finals" in shapes else 0
    num_live, num_envs = int(integers[at.COUNT]), int(integers[at.NUM_ENVS])
    slots, free = small.get("slots", nothing), small.get("free", np.zeros(0, np.int64))
    if len(free) != num_finals:
        raise contradiction(f"it has {num_finals} final observations and {len(free)} places")
    is_marked = np.zeros(num_live + num_finals, np.uint8)
    links, env_ids = kept.get("link", nothing), kept.get("env_ids", nothing)
    newest = np.zeros(num_envs, np.int64)
    row = _first_wrong_row(integers, links, env_ids, slots, num_finals, newest, is_marked)
    if row < -1:
        raise contradiction(f"the newest transition of env {-2 - row} is another one")
    if row >= 0:
        raise contradiction(f"row {row} says wrongly what follows it, or whose it is")
    if "finals" in shapes and not _are_free(free, integers[at.NUM_FREE], is_marked[num_live:]):
        raise contradiction("its free places of final observations are not those not in use")


@njit(nogil=True, cache=True)
def _first_wrong_row(state, links, env_ids, slots, num_finals, newest, is_marked):
    """The first row of a ring whose link, env id or slot contradicts the others; -1 for none.

    What a row has to say follows from the order of the rows: the link of a row is the next row of
    its env, or says where the observation between them is kept, or is 0; that of the newest row of
    an env is 0, and the newest rows are listed. Where it isn't kept whose rows these are, links
    lead to newer rows, and no two to the same.

    Args:
        state: int64, see `layout`; its constants, counts and pointers are right.
        links: int32 (L,), of the live rows in the order of the table, or (0,).
        env_ids: int32 (L,), or (0,) if they aren't kept.
        slots: int32 (rows,), slot + 1 of each row of the table, or 0; or (0,) if next observations
            are stored.
        num_finals: Number of slots.
        newest: int64 (num_envs,), scratch memory.
        is_marked: uint8 (L + num_finals,), zeros: written. For the slots, behind the rows: whether
            they are in use.

    Returns:
        A row of the table, or the negative number -2 - env if what the state says of an env is
        wrong, or -1.
    """
    capacity, num_rings, num_envs = state[at.CAPACITY], state[at.NUM_RINGS], state[at.NUM_ENVS]
    has_links, has_ids = state[at.LINK_AT] >= 0, state[at.ENV_AT] >= 0
    is_once = slots.shape[0] > 0
    num_live = state[at.COUNT]
    newest[:] = 0
    first = 0  # of the ring, among the live rows
    for ring in range(num_rings):
        total = state[state[at.TOTALS] + ring]
        count = min(total, capacity)
        for number in range(total - count, total):
            k = number % capacity
            row, place = ring * capacity + k, first + k
            env = -1
            if has_ids:
                env = np.int64(env_ids[place])
                if env < 0 or env >= num_envs or (num_rings > 1 and env != ring):
                    return row
            elif num_rings > 1 or num_envs == 1:
                env = ring
            if not has_links:
                continue
            link = np.int64(links[place])
            if is_once:
                slot = np.int64(slots[row])
                if slot != max(-link, 0) or slot > num_finals:
                    return row
                if slot:
                    if is_marked[num_live + slot - 1]:
                        return row
                    is_marked[num_live + slot - 1] = 1
            elif link < 0:
                return row
            if link > 0:
                following = link - 1 - ring * capacity
                if following < 0 or following >= count:
                    return row
                newer = number + (following - k) % capacity
                if newer == number or newer >= total or is_marked[first + following]:
                    return row
                is_marked[first + following] = 1
            if env >= 0:
                if newest[env]:  # what the row before it says
                    before = (newest[env] - 1) % capacity
                    code = np.int64(links[first + before])
                    if code != row + 1 and (code == 0) == is_once:
                        return ring * capacity + before
                    if code > 0 and code != row + 1:
                        return ring * capacity + before
                newest[env] = number + 1
        if has_links:
            is_known = has_ids or num_rings > 1 or num_envs == 1
            for env in range(ring, ring + 1 if num_rings > 1 else num_envs):
                last = state[state[at.LAST] + env]
                if (
                    last < 0
                    or last > total
                    or (is_known and newest[env] > 0 and newest[env] != last)
                ):
                    return -2 - env
                if last > total - count:
                    if is_known and newest[env] == 0:
                        return -2 - env
                    if links[first + (last - 1) % capacity]:
                        return ring * capacity + (last - 1) % capacity
        first += count
    for row in range(slots.shape[0]):  # those of no live row
        if slots[row] and row % capacity >= state[state[at.TOTALS] + row // capacity]:
            return row
    return -1


@njit(nogil=True, cache=True)
def _are_free(free, num_free, is_used):
    """Whether free int64 (F,) begins with exactly the slots not in use, uint8 (F,); written."""
    if num_free < 0 or num_free > free.shape[0]:
        return False
    num_used = 0
    for slot in range(is_used.shape[0]):
        num_used += is_used[slot]
    if num_used + num_free != is_used.shape[0]:
        return False
    for i in range(num_free):
        if free[i] < 0 or free[i] >= is_used.shape[0] or is_used[free[i]]:
            return False
        is_used[free[i]] = 1
    return True
