"""Rows of some envs inside batches of all: observations, infos and actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from vecenv.core.batches import take_row
from vecenv.core.infos import InfosApart
from vecenv.core.rows import ObservationRows, TreeRows

__all__ = ["Where", "copy_rows", "place_infos", "place_rows"]

Where = slice | np.ndarray


def place_rows(
    rows: ObservationRows, single_space: Space, batch: Any, env_ids: Sequence[int] | np.ndarray
) -> None:
    """Write a batch of observations into the rows of these envs.

    Args:
        rows: Rows of all envs.
        single_space: Space of one observation.
        batch: One observation per entry of `env_ids`, nested as the space is; only read.
        env_ids: The envs of the observations; a range is written as one block.
    """
    if isinstance(rows, TreeRows):
        parts = single_space.spaces  # type: ignore[attr-defined]  # a Dict or Tuple
        for name, child in rows.children.items():
            place_rows(child, parts[name], batch[name], env_ids)
    elif rows.array is not None:
        is_block = isinstance(env_ids, range)
        rows.array[slice(env_ids.start, env_ids.stop) if is_block else env_ids] = batch
    else:
        for row, env_id in enumerate(env_ids):
            rows.target[env_id] = take_row(single_space, batch, row)


def copy_rows(target: Any, source: Any, where: slice) -> None:
    """Copy nested arrays into the rows `where` of others, nested alike."""
    if isinstance(source, np.ndarray):
        target[where] = source
        return
    keys = source if isinstance(source, dict) else range(len(source))
    for key in keys:
        copy_rows(target[key], source[key], where)


def place_infos(
    infos: dict[str, Any],
    part: dict[str, Any] | InfosApart,
    where: Where,
    num_rows: int,
    env_ids: Sequence[int] | np.ndarray | None = None,
) -> None:
    """Merge the infos of some envs into the batched infos of all, in place.

    Args:
        infos: Batched infos so far, `num_rows` rows.
        part: Infos of the envs of `where`, batched or not; only read.
        where: The rows of these envs.
        num_rows: Rows of every array.
        env_ids: Env of each row of `part`, for errors; None if these are the rows of `where`.

    Raises:
        InfoError: The infos can't be batched.
    """
    if isinstance(part, InfosApart):
        rows = range(where.start, where.stop) if isinstance(where, slice) else where
        part.enter(infos, rows, num_rows, rows if env_ids is None else env_ids)
        return
    for key, value in part.items():
        if isinstance(value, dict):
            place_infos(infos.setdefault(key, {}), value, where, num_rows)
            continue
        column = infos.get(key)
        if column is None:
            is_object = value.dtype == object
            empty = None if is_object else np.zeros((), value.dtype)
            column = infos[key] = np.full((num_rows, *value.shape[1:]), empty, value.dtype)
        column[where] = value
