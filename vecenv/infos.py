"""Per-env info dicts <-> the batched info dict with masks, as Gymnasium defines it."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["add_info", "known_infos", "take_infos"]

_SCALARS = (int, float, bool)


def add_info(infos: dict[str, Any], info: dict[str, Any], index: int, num_envs: int) -> None:
    """Enter one env's info into the batched infos, in place.

    The rules are those of `gymnasium.vector.VectorEnv._add_info`: each key holds an array with one
    row per env and is accompanied by a boolean mask `_key`; numbers and NumPy arrays keep their
    dtype, dicts are batched recursively, everything else goes into an object array; `final_obs` is
    always an object array.

    Args:
        infos: Batched infos so far; changed in place.
        info: The info dict of one env; only read. Values of array type are copied.
        index: Row of this env.
        num_envs: Rows of every array.
    """
    for key, value in info.items():
        mask_key = f"_{key}"
        if isinstance(value, dict) and key != "final_obs":
            array = infos.setdefault(key, {})
            add_info(array, value, index, num_envs)
        else:
            array = infos.get(key)
            if array is None:
                array = infos[key] = _new_column(key, value, num_envs)
            array[index] = value
        mask = infos.get(mask_key)
        if mask is None:
            mask = infos[mask_key] = np.zeros(num_envs, dtype=np.bool_)
        mask[index] = True


def _new_column(key: str, value: Any, num_envs: int) -> np.ndarray:
    """Make the array that can hold `value` for each of the envs."""
    if key != "final_obs":
        if type(value) in _SCALARS or isinstance(value, np.number):
            return np.zeros(num_envs, dtype=type(value))
        if isinstance(value, np.ndarray):
            return np.zeros((num_envs, *value.shape), dtype=value.dtype)
    return np.full(num_envs, fill_value=None, dtype=object)


def take_infos(infos: dict[str, Any], env_ids: np.ndarray) -> dict[str, Any]:
    """Select rows of batched infos.

    Args:
        infos: Batched infos with one row per env.
        env_ids: int64 (B,), the rows wanted, in this order.

    Returns:
        A new dict of the same structure with B rows (copies).
    """
    return {
        key: take_infos(value, env_ids) if isinstance(value, dict) else value[env_ids]
        for key, value in infos.items()
    }


def known_infos(infos: dict[str, Any]) -> dict[str, Any]:
    """Return batched infos without the keys that no row has, after rows were selected."""
    known = {}
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        if isinstance(mask, np.ndarray) and not mask.any():
            continue
        if key[:1] == "_" and key[1:] in infos and not value.any():
            continue
        known[key] = known_infos(value) if isinstance(value, dict) else value
    return known
