"""The door of an add: columns as users give them, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from buffers.core.arguments import Transitions, read_row_ids, read_transitions, tree_leaves
from buffers.core.rows import RowLayout

__all__ = ["ArrayReader"]

_FLOAT64 = np.dtype(np.float64)
_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)
_NO_IDS = np.zeros(0, np.int64)
_SMALL = 1e30
_NAMES = ("obs", "next_obs", "actions", "rewards", "terminations", "truncations")


class ArrayReader:
    """Reads the columns of adds: arrays that are as they are stored take little asking."""

    def __init__(self, layout: RowLayout):
        fields, once = layout.fields, [*layout.obs]
        kinds = [(n, n) for n in once] + [(f"next_{n}", n) for n in once] + [("actions", "actions")]
        kinds += [(n, n) for n in ("rewards", "terminations", "truncations", *layout.extras)]
        self._layout, self._has_frames = layout, layout.frames is not None
        self._fields = [(path, fields[n].shape, fields[n].dtype) for path, n in kinds]
        self._is_flat, self._extras = layout.obs == ["obs"], {*layout.extras}
        self._shape: tuple[int, ...] = (-1,)
        self._expected = self._fields

    def read(
        self,
        given: tuple[Any, ...],
        extras: Mapping[str, Any],
        env_ids: Any,
        valid: Any,
        num_envs: int,
        device: torch.device,
    ) -> Transitions:
        """Transitions that can be written.

        Args:
            given: Columns in the order of the arguments of `add`; None for one that is not given.
            extras: The extra columns.
            env_ids: As of `add`, like the next.
            valid: See above.
            num_envs: Number of environments, 0 if they are not told apart.
            device: Where tensors may lie besides the CPU.

        Raises:
            BufferMisuseError: Something does not fit.
        """
        rewards = given[3]
        arrays = None
        if valid is None and rewards.__class__ is np.ndarray and not self._has_frames:
            arrays = self._read_plain(given, rewards, extras)
        if arrays is not None:
            count = len(rewards)
            if env_ids is None:
                if not (num_envs and count % num_envs):
                    return Transitions(arrays, _NO_IDS, None, None)
            elif (
                env_ids.__class__ is np.ndarray
                and env_ids.dtype is _INT64
                and env_ids.shape == (count,)
                and count
                and (not num_envs or env_ids.view(_UINT64).max() < num_envs)  # negative ones, too
            ):
                return Transitions(arrays, env_ids if num_envs else _NO_IDS, None, None)
            ids = read_row_ids(env_ids, count, num_envs, device)
            return Transitions(arrays, ids if num_envs else _NO_IDS, None, None)
        named = zip(_NAMES, given, strict=True)
        columns = {name: column for name, column in named if column is not None}
        columns.update(extras)
        return read_transitions(columns, self._layout, env_ids, valid, num_envs, device)

    def _read_plain(
        self, given: tuple[Any, ...], rewards: np.ndarray, extras: Mapping[str, Any]
    ) -> dict[str, np.ndarray] | None:
        """The arrays by path if all are as they are stored, and rewards are finite; else None."""
        if extras or self._extras or not self._is_flat:
            if extras.keys() != self._extras:
                return None
            obs, next_obs, actions, _, *flags = given
            space, more = self._layout.observation_space, [extras[n] for n in self._layout.extras]
            leaves = tree_leaves(space, obs, "obs"), tree_leaves(space, next_obs, "next_obs")
            given = (*leaves[0], *leaves[1], actions, rewards, *flags, *more)
        shape, found = rewards.shape, {}
        if shape != self._shape:  # most adds have as many rows as the one before
            if len(shape) != 1:
                return None
            self._expected = [(p, (*shape, *inner), dtype) for p, inner, dtype in self._fields]
            self._shape = shape
        for value, (path, expected, dtype) in zip(given, self._expected, strict=True):
            if value.__class__ is not np.ndarray or value.shape != expected:
                return None
            is_stored = value.dtype is dtype or value.dtype == dtype
            if not is_stored and (path != "rewards" or value.dtype != _FLOAT64):
                return None
            found[path] = value
        # Where the sum of squares is small all are finite, also as float32; looking at each takes
        # as long as the rest.
        with np.errstate(over="ignore", invalid="ignore"):
            return found if rewards.dot(rewards) < _SMALL else None
