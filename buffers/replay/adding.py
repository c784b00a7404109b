"""Adding transitions of any layout, such as Dict observations, by one compiled call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from buffers.replay.storage import ReplayStorage, add_listed

__all__ = ["PackedAdder"]


class PackedAdder:
    """Adds what comes as C-contiguous NumPy arrays of the dtypes of the layout.

    Args:
        storage: Where to.
    """

    def __init__(self, storage: ReplayStorage):
        layout = storage.layout
        self._where = storage.addresses.words
        space = layout.observation_space
        self._keys = list(space.spaces) if isinstance(space, spaces.Dict) else []
        self._extras = layout.extras
        self._no_ids = np.zeros(0, np.int64)

    @staticmethod
    def of(storage: ReplayStorage) -> PackedAdder | None:
        """One for a storage in memory whose observations are an array or a Dict of arrays.

        None if `add_arrays` serves it, which takes less time and the same arrays.
        """
        layout = storage.layout
        is_flat = layout.obs == ["obs"] or (
            isinstance(space := layout.observation_space, spaces.Dict)
            and 0 < len(space.spaces) == len(layout.obs)
            and not any(isinstance(s, spaces.Dict | spaces.Tuple) for s in space.spaces.values())
        )
        is_of_use = is_flat and storage.takes_lists and not storage.takes_arrays
        return PackedAdder(storage) if is_of_use else None

    def add(self, columns: Mapping[str, Any], extras: Mapping[str, Any], env_ids: Any) -> bool:
        """Add transitions if they are such arrays.

        Returns:
            Whether that was done; otherwise nothing was changed.
        """
        arrays = self._list(columns, extras)
        if arrays is None or (env_ids is not None and not np.size(env_ids)):
            return False
        ids = self._no_ids if env_ids is None else env_ids
        rest = columns["rewards"], columns["terminations"], columns["truncations"]
        arrays = [ids, *rest, *arrays]
        if not all(type(array) is np.ndarray for array in arrays):
            return False
        return add_listed(self._where, np.array(list(map(id, arrays)), np.int64))

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
