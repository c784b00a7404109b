"""The integers of a replay buffer in one array, so that compiled code gets them in one piece."""

from __future__ import annotations

import numpy as np

from buffers.core.rows import RecordLayout
from buffers.replay import indexing as at

__all__ = ["constant_part", "new_state", "state_words"]

_ARRAYS = (at.POINTERS, at.TOTALS, at.LAST, at.STOPPED, at.CUMULATED, at.OCCUPIED)


def state_words(layout: RecordLayout, num_rings: int, num_envs: int) -> int:
    """Length of the array of `new_state`."""
    dims = len(layout.fields[layout.obs[0]].shape) if layout.obs else 0
    return at.HEADER + 4 * num_rings + 2 * num_envs + dims + len(layout.fields["actions"].shape)


def new_state(layout: RecordLayout, capacity: int, num_rings: int, num_envs: int) -> np.ndarray:
    """State int64 of an empty buffer; the places are named in `indexing`."""
    state = np.zeros(state_words(layout, num_rings, num_envs), np.int64)
    state[at.CAPACITY], state[at.NUM_RINGS], state[at.NUM_ENVS] = capacity, num_rings, num_envs
    fields = layout.fields
    places = {at.LINK_AT: "link", at.REWARD_AT: "rewards", at.OVER_AT: "terminations"}
    for place, name in {**places, at.ENV_AT: "env_ids", at.ACTION_AT: "actions"}.items():
        state[place] = fields[name].offset if name in fields else -1
    leaves, following = (
        [fields[path] for path in paths] for paths in (layout.obs, layout.next_obs)
    )
    state[at.OBS_AT] = min((leaf.offset for leaf in leaves), default=0)
    state[at.NEXT_AT] = min((leaf.offset for leaf in following), default=-1)
    state[at.OBS_BYTES], state[at.ACTION_BYTES] = layout.obs_bytes, fields["actions"].nbytes
    sizes = (num_rings, num_rings, num_envs, num_envs, num_rings, num_rings)
    begin = at.HEADER
    for place, size in zip(_ARRAYS, sizes, strict=True):
        state[place] = begin
        begin += size
    shapes = {
        at.OBS_DIMS: leaves[0].shape if leaves else (),
        at.ACTION_DIMS: fields["actions"].shape,
    }
    for place, shape in shapes.items():
        state[place] = begin
        state[begin : begin + len(shape)] = shape
        begin += len(shape)
    return state


def constant_part(state: np.ndarray) -> list[int]:
    """What of a state depends on the constructor's arguments only."""
    return state[: at.ADDED].tolist()
