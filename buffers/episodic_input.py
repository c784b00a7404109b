"""Checks of what users hand to an episodic buffer; each returns it in the form to be stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import Space

from buffers.episodic_layout import RowLayout
from buffers.errors import BufferMisuseError
from buffers.space_tree import Leaf, tree_leaves

__all__ = ["check_names", "read_array", "read_distinct_ids", "read_episode", "read_steps"]

_OPTIONAL = ("terminations", "truncations", "boundaries")
_BOOL, _FLOAT32 = np.dtype(np.bool_), np.dtype(np.float32)


def check_names(given: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    """Raise BufferMisuseError for columns that are unknown or missing."""
    unknown = sorted(set(given) - required - optional)
    missing = sorted(required - set(given))
    if unknown or missing:
        problem = f"unknown: {unknown}" if unknown else f"missing: {missing}"
        raise BufferMisuseError(
            f"columns are {sorted(given)}, expected {sorted(required)} and possibly "
            f"{sorted(optional)}; {problem}"
        )


def read_array(
    name: str,
    given: Any,
    shape: tuple[int, ...],
    dtype: np.dtype,
    device: torch.device | None = None,
) -> np.ndarray:
    """An array of exactly this shape whose values the dtype can hold.

    Args:
        name: Of the field, for messages.
        given: Array, tensor or nested list.
        shape: Expected.
        dtype: Of the storage. Floats may lose precision, integers no value.
        device: Where tensors may lie besides the CPU.

    Raises:
        BufferMisuseError: Something else was given.
    """
    array = _to_array(name, given, device)
    if array.shape != shape:
        raise BufferMisuseError(f"{name} has shape {array.shape}, expected {shape}")
    fits = np.can_cast(array.dtype, dtype, "same_kind")
    if fits and dtype.kind in "iu" and not np.can_cast(array.dtype, dtype, "safe"):
        fits = bool((array.astype(dtype) == array).all())
    elif not fits and array.dtype.kind in "iu" and dtype.kind in "iu":
        fits = bool((array >= 0).all() and (array.astype(dtype) == array).all())
    if not fits:
        raise BufferMisuseError(
            f"{name} has dtype {array.dtype}, expected {dtype}, which cannot hold its values; "
            "convert it before if that is meant"
        )
    return array


def _to_array(name: str, given: Any, device: torch.device | None) -> np.ndarray:
    if isinstance(given, torch.Tensor):
        if given.device.type != "cpu" and given.device != device:
            raise BufferMisuseError(
                f"{name} lies on {given.device}, expected the CPU or the buffer's device; move it"
            )
        return given.detach().cpu().numpy()
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:
        raise BufferMisuseError(
            f"{name} must be an array or a tensor, got {type(given).__name__}: {error}"
        ) from None


def read_distinct_ids(env_ids: Any, num_envs: int) -> np.ndarray:
    """Environment ids int64 (B,), different ones from 0 to N - 1.

    Raises:
        BufferMisuseError: Something else was given.
    """
    ids = _to_array("env_ids", env_ids, None)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise BufferMisuseError(
            f"env_ids has dtype {ids.dtype} and shape {ids.shape}, expected integers (B,)"
        )
    if ids.size and (
        ids.min() < 0 or ids.max() >= num_envs or np.bincount(ids.astype(np.int64)).max() > 1
    ):
        raise BufferMisuseError(
            f"env_ids is {ids.tolist()}, expected different numbers from 0 to {num_envs - 1}"
        )
    return ids.astype(np.int64, copy=False)


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
    if np.isnan(arrays["rewards"]).any():
        row = int(np.flatnonzero(np.isnan(arrays["rewards"]))[0])
        raise BufferMisuseError(
            f"rewards has NaN in row {row}, expected numbers; find the step that makes it"
        )
    return arrays


def _count_rows(columns: Mapping[str, Any]) -> int:
    rewards = columns["rewards"]
    shape = np.shape(rewards) if not isinstance(rewards, torch.Tensor) else tuple(rewards.shape)
    if len(shape) != 1:
        raise BufferMisuseError(f"rewards has shape {shape}, expected one number per step")
    return shape[0]


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
    count = _count_rows(columns)
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
    count = _count_rows(episode)
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
        wrong = np.flatnonzero(~same.reshape(len(same), -1).all(axis=1))
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
