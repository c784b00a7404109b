"""What a rollout buffer carries from one rollout to the next, as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from buffers.checkpoint import check_settings
from buffers.errors import BufferMisuseError
from buffers.rollout_storage import RolloutStorage

__all__ = ["restore_rollout_state", "rollout_state"]

_VERSION = 1
_CARRIED = ("over_before", "running_returns", "running_lengths")


def rollout_state(
    storage: RolloutStorage, shuffle_state: np.ndarray, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Copies of what the next rollout starts from: tensors, numbers, strings, a dict of them."""
    return {
        "version": _VERSION,
        "settings": dict(settings),
        "shuffle": int(shuffle_state[0]),
        **{name: torch.from_numpy(row.copy()) for name, row in _rows(storage).items()},
    }


def restore_rollout_state(
    storage: RolloutStorage,
    shuffle_state: np.ndarray,
    settings: Mapping[str, Any],
    state: Mapping[str, Any],
) -> None:
    """Write a state back; those of the first release have no settings.

    Raises:
        BufferMisuseError: It is of another version or does not fit; nothing was changed.
    """
    if state.get("version") != _VERSION or "shuffle" not in state:
        raise BufferMisuseError(
            f"state has version {state.get('version')!r}, expected {_VERSION}; pass what "
            "state_dict() returned"
        )
    check_settings(state.get("settings", settings), settings)
    rows = _rows(storage)
    for name, row in rows.items():
        saved = state.get(name)
        found = None if saved is None else (tuple(saved.shape), saved.numpy().dtype)
        if found != (row.shape, row.dtype):
            raise BufferMisuseError(
                f"state holds {found} for {name}, expected {(row.shape, row.dtype)}; load it into "
                "a buffer with the same spaces and number of envs"
            )
    for name, row in rows.items():
        row[...] = state[name].numpy()
    shuffle_state[0] = state["shuffle"]


def _rows(storage: RolloutStorage) -> dict[str, np.ndarray]:
    """The memory in question, by name: all of it views."""
    carried = {name: storage.columns[name].host for name in _CARRIED}
    return {**carried, **{column.spec.name: column.host[0] for column in storage.obs}}
