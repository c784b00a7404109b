"""Checks of what users hand to an episodic buffer; each returns it in the form to be stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import check_names, check_rewards, count_rows, read_array
from buffers.core.errors import BufferMisuseError
from buffers.core.spaces import Leaf, tree_leaves
from buffers.episodic.layout import RowLayout

__all__ = ["read_episode", "read_steps"]

_OPTIONAL = ("terminations", "truncations", "boundaries")
_BOOL, _FLOAT32 = np.dtype(np.bool_), np.dtype(np.float32)


def _read_tree(
    name: str, given: Any, space: Space, leaves: list[Leaf], count: int, device: torch.device
) -> dict[str, np.ndarray]:
    found = tree_leaves(space, given, name)
    return {
        leaf.path: read_array(
            name + leaf.path.removeprefix("obs"), value, (count, *leaf.shape), leaf.dtype, device
        )
        for leaf, value in zip(leaves, found, strict=True)
    }


def _read_others(
    columns: Mapping[str, Any], layout: RowLayout, count: int, device: torch.device
) -> dict[str, np.ndarray]:
    """Actions, rewards, extra columns and those flags that are given."""
    specs = [layout.action, Leaf("rewards", (), _FLOAT32), *layout.extra]
    specs += [Leaf(name, (), _BOOL) for name in _OPTIONAL if name in columns]
    arrays = {
        name: read_array(name, columns[name], (count, *shape), dtype, device)
        for name, shape, dtype in specs
    }
    check_rewards(arrays["rewards"])
    return arrays


def read_steps(
    columns: Mapping[str, Any], layout: RowLayout, space: Space, device: torch.device
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """One step of each of B envs.

    Returns:
        Arrays (B, ...) by path, the arrays of `next_obs` by the path in `obs`, and B.

    Raises:
        BufferMisuseError: A column is missing, unknown or does not fit.
    """
    required = {"obs", "next_obs", "actions", "rewards", "terminations", "truncations"}
    required |= {leaf.path for leaf in layout.extra}
    check_names(columns, required, {"boundaries"})
    count = count_rows(columns["rewards"])
    arrays = _read_tree("obs", columns["obs"], space, layout.obs_leaves, count, device)
    following = _read_tree("next_obs", columns["next_obs"], space, layout.obs_leaves, count, device)
    return {**arrays, **_read_others(columns, layout, count, device)}, following, count


def read_episode(
    episode: Mapping[str, Any], layout: RowLayout, space: Space, device: torch.device
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """A whole episode of T steps.

    Returns:
        Arrays (T, ...) by path (of the observations the first T), one row of the last observation
        by path, and T.

    Raises:
        BufferMisuseError: A column is missing, unknown or does not fit, or a flag ends the episode
            before its last step.
    """
    if not isinstance(episode, Mapping):
        raise BufferMisuseError(
            f"an episode must be a dict of columns, got {type(episode).__name__}"
        )
    required = {"obs", "actions", "rewards"} | {leaf.path for leaf in layout.extra}
    check_names(episode, required, {"next_obs", *_OPTIONAL})
    count = count_rows(episode["rewards"])
    if count == 0:
        raise BufferMisuseError("the episode has no step; expected one at least")
    has_next = "next_obs" in episode
    rows = count if has_next else count + 1
    obs = _read_tree("obs", episode["obs"], space, layout.obs_leaves, rows, device)
    last = {path: array[-1:] for path, array in obs.items()}
    if has_next:
        following = _read_tree(
            "next_obs", episode["next_obs"], space, layout.obs_leaves, count, device
        )
        _check_successors(obs, following)
        last = {path: array[-1:] for path, array in following.items()}
    others = _read_others(episode, layout, count, device)
    _check_flags(others, count)
    return {**{path: array[:count] for path, array in obs.items()}, **others}, last, count


def _check_successors(obs: dict[str, np.ndarray], following: dict[str, np.ndarray]) -> None:
    for path, array in obs.items():
        same = (array[1:] == following[path][:-1]) | (array[1:] != array[1:])  # or NaN
        wrong = np.flatnonzero(~same.all(axis=tuple(range(1, same.ndim))))
        if len(wrong):
            raise BufferMisuseError(
                f"next_obs of step {wrong[0]} differs from obs of step {wrong[0] + 1} in {path}; "
                "in one episode they are the same observation: split it there"
            )


def _check_flags(arrays: dict[str, np.ndarray], count: int) -> None:
    """Add the flags that were left out, and see that only the last step ends the episode."""
    if "terminations" not in arrays and "truncations" not in arrays:
        arrays["truncations"] = np.arange(count) == count - 1
    for name in _OPTIONAL:
        arrays.setdefault(name, np.zeros(count, np.bool_))
    over = (arrays["terminations"] | arrays["truncations"])[:-1]
    if over.any():
        raise BufferMisuseError(
            f"the episode ends in step {int(np.argmax(over))}, but has {count} steps; split it "
            "there, or use the column boundaries for what does not end an episode"
        )
