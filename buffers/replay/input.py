"""Checks of what users hand to a replay buffer; each returns it in the form to be stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from buffers.core.arguments import as_array, check_names, check_rewards, count_rows, read_array
from buffers.core.errors import BufferMisuseError
from buffers.core.rows import COLUMNS, RecordLayout
from buffers.core.spaces import tree_leaves

__all__ = ["read_columns", "read_row_ids"]


def read_columns(
    columns: Mapping[str, Any], layout: RecordLayout, device: torch.device
) -> dict[str, np.ndarray]:
    """Arrays (K, ...) by path, C-contiguous and of the dtype of the storage.

    If observations are stored once, the leaves of next_obs are there all the same.

    Raises:
        BufferMisuseError: A column is missing, unknown or does not fit.
    """
    check_names(columns, {*COLUMNS, *layout.extras}, set())
    count = count_rows(columns["rewards"])
    given: dict[str, tuple[Any, str]] = {}
    for name in ("obs", "next_obs"):
        leaves = tree_leaves(layout.observation_space, columns[name], name)
        prefix = name.removesuffix("obs")
        given |= {
            prefix + path: (leaf, path) for path, leaf in zip(layout.obs, leaves, strict=True)
        }
    others = ("actions", "rewards", "terminations", "truncations", *layout.extras)
    given |= {name: (columns[name], name) for name in others}
    arrays = {}
    for path, (value, like) in given.items():
        field = layout.fields[like]
        array = read_array(path, value, (count, *field.shape), field.dtype, device)
        with np.errstate(over="ignore"):  # reported below, by name
            arrays[path] = np.ascontiguousarray(array, field.dtype)
    check_rewards(arrays["rewards"])
    return arrays


def read_row_ids(
    env_ids: Any, num_rows: int, num_envs: int, device: torch.device | None = None
) -> np.ndarray:
    """Env ids int64 (K,), one per row; or (0,) if the rows are whole steps of all envs.

    Args:
        env_ids: What the user gave; None for whole steps.
        num_rows: K.
        num_envs: Number of environments, 0 if the buffer keeps no track of them.
        device: Where a tensor may lie besides the CPU.

    Raises:
        BufferMisuseError: Ids that do not fit, or none where rows are no whole steps.
    """
    if env_ids is None:
        if num_envs and num_rows % num_envs:
            raise BufferMisuseError(
                f"got {num_rows} rows without env_ids, expected a multiple of num_envs = "
                f"{num_envs}: whole steps of all envs in order; pass env_ids with one id per row"
            )
        return np.zeros(0, np.int64)
    ids = as_array("env_ids", env_ids, device)
    if ids.shape != (num_rows,) or (ids.size and ids.dtype.kind not in "iu"):
        raise BufferMisuseError(
            f"env_ids has dtype {ids.dtype} and shape {ids.shape}, expected integers ({num_rows},)"
        )
    ids = np.array(ids, np.int64)  # another thread may change those that were given
    if num_envs and ids.size and (ids.min() < 0 or ids.max() >= num_envs):
        wrong = int(ids[(ids < 0) | (ids >= num_envs)][0])
        raise BufferMisuseError(
            f"env_ids has {wrong}, expected numbers from 0 to {num_envs - 1}, as num_envs is "
            f"{num_envs}"
        )
    return ids
