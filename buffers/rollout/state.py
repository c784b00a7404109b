"""What a rollout buffer carries from one rollout to the next, as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from buffers.core.checkpoint import check_settings, state_array
from buffers.core.errors import BufferMisuseError
from buffers.rollout.storage import RolloutStorage

__all__ = ["restore_rollout_state", "rollout_state"]

_VERSION = 1
_CARRIED = ("over_before", "running_returns", "running_lengths")


def rollout_state(
    storage: RolloutStorage, words: np.ndarray, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Copies of what the next rollout starts from: tensors, numbers, strings, a dict of them."""
    return {
        "version": _VERSION,
        "settings": dict(settings),
        "shuffle": int(words[0]) | int(words[1]) << 64,
        **{name: torch.from_numpy(row.copy()) for name, row in _rows(storage).items()},
    }


def restore_rollout_state(
    storage: RolloutStorage,
    words: np.ndarray,
    settings: Mapping[str, Any],
    state: Mapping[str, Any],
) -> None:
    """Write a state back; those of the first release have no settings.

    Raises:
        BufferMisuseError: It is of another version or does not fit; nothing was changed.
    """
    version, shuffle = state.get("version"), state.get("shuffle")
    if type(version) is not int or version != _VERSION or shuffle is None:
        raise BufferMisuseError(
            f"state has version {version!r:.99}, expected {_VERSION}; pass what state_dict() "
            "returned"
        )
    if type(shuffle) is not int or not 0 <= shuffle < 2**128:
        raise BufferMisuseError(f"state holds {shuffle!r:.99} for shuffle, expected 128 bits")
    made = state.get("settings", settings)
    check_settings(made if isinstance(made, Mapping) else {"settings": made}, settings)
    rows, found = _rows(storage), {}
    for name, row in rows.items():
        value = state_array(name, state.get(name), row.dtype, row.shape)
        found[name] = value.copy()
        if row.dtype == np.bool_ and (found[name].view(np.uint8) > 1).any():
            raise BufferMisuseError(
                f"state holds bytes that are no bools for {name}; it was changed after it was made"
            )
    if found["running_lengths"].min(initial=0) < 0:
        raise BufferMisuseError(
            "state holds negative running_lengths; it was changed after it was made"
        )
    for name, row in rows.items():
        row[...] = found[name]
    words[:] = shuffle % 2**64, shuffle >> 64  # earlier releases had the first word alone


def _rows(storage: RolloutStorage) -> dict[str, np.ndarray]:
    """The memory in question, by name: all of it views."""
    carried = {name: storage.columns[name].host for name in _CARRIED}
    return {**carried, **{column.spec.name: column.host[0] for column in storage.obs}}
