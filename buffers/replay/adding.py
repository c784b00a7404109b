"""Adding transitions of any layout, such as Dict observations, by one compiled call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from numba.core import config
from numba.core.errors import NumbaError

from buffers.replay.storage import ARRAY_POINTER, ReplayStorage, add_packed

__all__ = ["PackedAdder"]

_MAX_COUNTS = 16
_FLAG, _REWARDS = np.dtype(np.bool_), (np.dtype(np.float32), np.dtype(np.float64))
_IDS = np.dtype(np.int64)


class PackedAdder:
    """Adds what comes as C-contiguous NumPy arrays of the dtypes of the layout.

    Args:
        storage: Where to.
    """

    def __init__(self, storage: ReplayStorage):
        layout = storage.layout
        self._storage = storage
        space = layout.observation_space
        self._keys = list(space.spaces) if isinstance(space, spaces.Dict) else []
        leaves = [layout.fields[path] for path in layout.obs]
        others = [layout.fields[name] for name in ("actions", *layout.extras)]
        self._shapes = [leaf.shape for leaf in (*leaves, *leaves, *others)]
        self._dtypes = [leaf.dtype for leaf in (*leaves, *leaves, *others)]
        self._extras = layout.extras
        self._expected: dict[int, list[tuple[int, ...]]] = {}
        self._no_ids = np.zeros(0, np.int64)

    @staticmethod
    def of(storage: ReplayStorage) -> PackedAdder | None:
        """One for a storage in memory whose observations are an array or a Dict of arrays."""
        layout = storage.layout
        is_flat = layout.obs == ["obs"] or (
            isinstance(space := layout.observation_space, spaces.Dict)
            and len(space.spaces) == len(layout.obs)
            and not any(isinstance(s, spaces.Dict | spaces.Tuple) for s in space.spaces.values())
        )
        is_plain = not storage.is_staged and storage.folder is None and layout.frames is None
        if not (is_flat and is_plain and _POINTERS_ARE_THERE):
            return None
        return PackedAdder(storage)

    def add(self, columns: Mapping[str, Any], extras: Mapping[str, Any], env_ids: Any) -> bool:
        """Add transitions if they are such arrays.

        Returns:
            Whether that was done; otherwise nothing was changed.
        """
        rewards = columns["rewards"]
        flags = terminations, truncations = columns["terminations"], columns["truncations"]
        ids = self._no_ids if env_ids is None else env_ids
        if not all(map(_is_plain, (rewards, ids, *flags))) or not rewards.ndim == ids.ndim == 1:
            return False
        if rewards.dtype not in _REWARDS or ids.dtype != _IDS:
            return False
        if not terminations.dtype == truncations.dtype == _FLAG:
            return False
        arrays = self._list(columns, extras)
        if arrays is None:
            return False
        shapes = self._shapes_of(len(rewards))
        for array, shape, dtype in zip(arrays, shapes, self._dtypes, strict=True):
            if not _is_plain(array) or array.shape != shape or array.dtype != dtype:
                return False
        storage = self._storage
        sources = storage.sources.copy()
        sources[:, 0] = list(map(id, arrays))
        try:
            return add_packed(storage.addresses.words, ids, sources, rewards, *flags)
        except (TypeError, NumbaError):
            return False

    def _list(self, columns: Mapping[str, Any], extras: Mapping[str, Any]) -> list[Any] | None:
        """The arrays of obs, next_obs, actions and extras; None if some are missing."""
        both = columns["obs"], columns["next_obs"]
        if len(extras) != len(self._extras):
            return None
        arrays: list[Any] = [*both]
        if self._keys:
            if any(type(obs) is not dict or len(obs) != len(self._keys) for obs in both):
                return None
            arrays = [obs.get(key) for obs in both for key in self._keys]
        return [*arrays, columns["actions"], *(extras.get(name) for name in self._extras)]

    def _shapes_of(self, count: int) -> list[tuple[int, ...]]:
        """Shapes of the arrays of an add of `count` rows."""
        found = self._expected.get(count)
        if found is None:
            if len(self._expected) >= _MAX_COUNTS:
                self._expected.clear()
            found = self._expected[count] = [(count, *shape) for shape in self._shapes]
        return found


def _is_plain(array: Any) -> bool:
    """Whether it is an array that lies in memory as the machine and C have it."""
    return type(array) is np.ndarray and array.flags.carray


def _are_pointers_there() -> bool:
    """Whether arrays have the address of their memory where compiled code looks for it."""
    if config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    array = np.zeros(3)
    word = ctypes.c_int64.from_address(id(array) + ARRAY_POINTER)
    return word.value == array.ctypes.data


_POINTERS_ARE_THERE = _are_pointers_there()
