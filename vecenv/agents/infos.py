"""Infos of agents on their way through a vector env of games, and back as rows of agents.

A game's infos of a group are batched over its agents: an array (A, ...) per key, and a mask of who
has given it, bool (A,). A vector env batches these again over games and adds masks of its own,
under the names of the first masks; so the first masks travel under other names.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["GIVEN", "repeat_infos", "rows_of_infos", "shelve"]

GIVEN = "given:"


def shelve(infos: dict[str, Any]) -> dict[str, Any]:
    """Return the batched infos of a game's group with masks renamed.

    Example:
        >>> sorted(shelve({"speed": np.ones(2), "_speed": np.array([True, False])}))
        ['given:speed', 'speed']
    """
    found: dict[str, Any] = {}
    for key, value in infos.items():
        name = f"{GIVEN}{key[1:]}" if _is_mask(key, infos) else key
        found[name] = shelve(value) if isinstance(value, dict) else value
    return found


def rows_of_infos(infos: dict[str, Any]) -> dict[str, Any]:
    """Return batched infos of rows from `shelve`d infos that a vector env has batched.

    Args:
        infos: Per key an array (games, A, ...), with masks (games,), which are dropped.

    Returns:
        Per key an array (games * A, ...) and a mask, as Gymnasium batches infos.
    """
    found: dict[str, Any] = {}
    for key, value in infos.items():
        if _is_mask(key, infos):
            continue
        is_given = isinstance(key, str) and key.startswith(GIVEN)
        name = f"_{key.removeprefix(GIVEN)}" if is_given else key
        if isinstance(value, dict):
            found[name] = rows_of_infos(value)
        else:
            found[name] = _one_axis(value)
    return found


def repeat_infos(infos: dict[str, Any], num_agents: int) -> dict[str, Any]:
    """Return infos of games as infos of rows: each agent gets those of its game."""
    return {
        key: repeat_infos(value, num_agents)
        if isinstance(value, dict)
        else _repeated(value, num_agents)
        for key, value in infos.items()
    }


def _repeated(value: Any, count: int) -> Any:
    """Repeat each row of an array, or of a tensor of games on a device."""
    if isinstance(value, np.ndarray):
        return np.repeat(value, count, axis=0)
    return value.repeat_interleave(count, 0)


def _one_axis(array: np.ndarray) -> np.ndarray:
    """Merge the first two axes, also where each game's array is an object."""
    if array.dtype != object or array.ndim > 1:
        return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
    given = [value for value in array if isinstance(value, np.ndarray)]
    first = given[0]
    empty = np.full_like(first, None) if first.dtype == object else np.zeros_like(first)
    return np.concatenate([v if isinstance(v, np.ndarray) else empty for v in array])


def _is_mask(key: Any, infos: dict[Any, Any]) -> bool:
    """Whether a key is that of another key's mask; keys need not be strings."""
    if not isinstance(key, str) or key[:1] != "_":
        return False
    return key[1:] in infos or any(str(other) == key[1:] for other in infos)
