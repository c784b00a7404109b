"""What a state of an episodic buffer says of itself, and what is checked before it is believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from buffers.core.errors import BufferMisuseError
from buffers.core.rows import row_views
from buffers.core.state import (
    LoadedState,
    check_bools,
    check_settings,
    contradiction,
    name_fields,
)
from buffers.episodic.layout import HEADER, EpisodicLayout

__all__ = ["check_episodes", "check_meta", "describe"]

_VERSION = 1
_MOST_ADDED = 2**62  # episodes ever added; what is added later has to be counted, too


def describe(layout: EpisodicLayout, first_episode: int) -> dict[str, Any]:
    """Version, fields of the rows, number of the oldest episode, counted from the first ever."""
    fields = layout.row.describe()
    return {"state_version": _VERSION, "fields": fields, "first_episode": first_episode}


def check_meta(meta: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise BufferMisuseError unless a state is of a buffer that describes itself as ours."""
    version = meta.get("state_version")
    if type(version) is not int or version != _VERSION:
        raise BufferMisuseError(f"state has version {version!r:.99}, expected {_VERSION}")
    fields = meta.get("fields"), own["fields"]
    check_settings(*({"field": name_fields(described)} for described in fields))
    check_settings(*({"layout": described} for described in fields))
    first = meta.get("first_episode")
    if type(first) is not int or not 0 <= first <= _MOST_ADDED:
        raise contradiction(f"its first episode is {first!r:.99}")


def _check_sizes(layout: EpisodicLayout, num_episodes: int, num_steps: int) -> None:
    """Raise BufferMisuseError if a state holds more than a buffer does."""
    if num_steps > layout.capacity or num_episodes > layout.max_episodes:
        raise BufferMisuseError(
            f"state has {num_episodes} episodes of {num_steps} steps, but the buffer holds "
            f"{layout.max_episodes} of {layout.capacity}; load it into a larger one"
        )


def check_episodes(layout: EpisodicLayout, state: LoadedState) -> None:
    """Raise BufferMisuseError unless a state fits a buffer, and its parts one another."""
    _, small, large = state
    fields, num_rows = layout.row.fields, sum(map(len, large["rows"]))
    lengths, open_lengths = small["lengths"], small["open_lengths"]
    if lengths.min(initial=1) < 1 or open_lengths.min(initial=0) < 0:
        raise contradiction("it has episodes without steps")
    longest = int(lengths.max(initial=1))  # no sum overflows up to the capacity
    steps = longest if longest > layout.capacity else int(lengths.sum())
    _check_sizes(layout, len(lengths), steps)
    if num_rows != steps + len(lengths):
        raise contradiction(f"it has {num_rows} rows for {len(lengths)} episodes of {steps}")
    if open_lengths.max(initial=0) >= layout.capacity:  # would have been stored
        raise contradiction("it has open episodes as long as the buffer")
    num_open_rows = int(open_lengths.sum()) + np.count_nonzero(open_lengths)
    if len(small["open_rows"]) != num_open_rows:
        raise contradiction(f"it has {len(small['open_rows'])} rows of open episodes")
    bools = [(f.offset, f.nbytes) for f in fields.values() if f.dtype == np.bool_]
    check_bools("rows", large["rows"], bools)
    check_bools("open_rows", [small["open_rows"]], bools)
    views = [row_views(block, {name: fields[name] for name in HEADER}) for block in large["rows"]]
    rooms, steps_at, remaining, bounds = (
        np.concatenate([view[name] for view in views]) for name in HEADER
    )
    lasts = np.cumsum(lengths + 1) - 1  # the row of each episode's last observation
    places = lasts.repeat(lengths + 1) - np.arange(num_rows)
    is_right = (remaining == places) & (steps_at == lengths.repeat(lengths + 1) - places)
    is_right &= (rooms >= 0) & (rooms <= np.maximum(remaining - 1, 0))
    is_right &= bounds == steps_at + rooms
    if not is_right.all():
        row = int(np.argmin(is_right))
        raise contradiction(f"row {row} says wrongly where in its episode it is")
