"""from_buffer: the episodes that a buffer holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces

from buffers.core.spaces import build_tree, space_leaves
from buffers.datasets.arrays import BLOCK_BYTES, Block, FlatColumns, Wanted
from buffers.datasets.dataset import DatasetError, EpisodeDataset, RawEpisode, leaves_of, row_layout

__all__ = ["as_dataset", "from_buffer"]

_COLUMNS = ("actions", "rewards", "terminations", "truncations")


def from_buffer(buffer: Any) -> EpisodeDataset:
    """The episodes of a buffer, to be written into a file or put into another buffer.

    Those of an `EpisodicReplayBuffer` are its episodes; open ones are not in it. The transitions of
    a ring are joined, env by env, oldest first, as long as each next observation is the
    observation that follows, byte for byte; what was overwritten is missing, and an episode of
    which the newest steps are still to come counts as cut. What the buffer holds is read anew each
    time, one episode or some MiB at a time.

    Args:
        buffer: An `EpisodicReplayBuffer`, or a replay buffer that knows the env of each
            transition: with `track_env`, with num_envs=1, or a `PerEnvReplayBuffer`. With `n_step`
            above 1 it must store next observations, and those whole (no `frame_stack`).

    Raises:
        DatasetError: A ring does not know its envs, or keeps no single steps.
    """
    kind = type(buffer).__name__
    if hasattr(buffer, "add_episode"):
        read = _EpisodesOf(buffer)
        single = buffer.observation_space, buffer.action_space
        extras = _extra_spaces(buffer)
        return EpisodeDataset(kind, read, *single, extra_columns=extras, check_bounds=False)
    if hasattr(buffer, "order"):
        return _of_ring(buffer, kind)
    raise DatasetError(f"the source is a {kind}, expected a buffer or an EpisodeDataset")


def as_dataset(source: Any) -> EpisodeDataset:
    """A data set, or that of a buffer."""
    return source if isinstance(source, EpisodeDataset) else from_buffer(source)


def _extra_spaces(buffer: Any) -> dict[str, Space]:
    """Spaces of whatever values the extra columns of a buffer can have."""
    layout, found = row_layout(buffer), {}
    for name in layout.extras:
        _, shape, dtype, _ = layout.fields[name]
        low, high = (-np.inf, np.inf) if dtype.kind == "f" else (0, 1)
        if dtype.kind in "iu":
            limits: Any = np.iinfo(dtype)
            low, high = limits.min, limits.max
        found[name] = spaces.Box(low, high, shape, dtype.type)
    return found


class _EpisodesOf:
    """Reads an episodic buffer."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __call__(self) -> Iterator[RawEpisode]:
        for number in range(self._buffer.num_episodes):
            episode = self._buffer.episode(number)
            episode.pop("bounds")
            space, obs = self._buffer.observation_space, episode.pop("obs")
            leaves = [leaf.cpu().numpy() for leaf in leaves_of(space, obs)]
            columns = {name: column.cpu().numpy() for name, column in episode.items()}
            where = f"{type(self._buffer).__name__}, episode {number}"
            yield RawEpisode(where, {"obs": build_tree(space, leaves), **columns})


def _of_ring(buffer: Any, kind: str) -> EpisodeDataset:
    columns = buffer.rows()
    if (buffer.num_envs or 1) > 1 and not hasattr(buffer, "counts") and "env_ids" not in columns:
        raise DatasetError(
            f"the {kind} does not know which of its {buffer.num_envs} envs a transition is of; "
            "make it with track_env=True"
        )
    if buffer.n_step > 1 and "next_obs" not in columns:
        advice = "n_step=1" if row_layout(buffer).frames else "store_next=True, or n_step=1"
        raise DatasetError(
            f"the {kind} has n_step={buffer.n_step} and no next observations of single steps; "
            f"make it with {advice}"
        )
    extras = _extra_spaces(buffer)
    reader = _TransitionsOf(buffer, list(extras))
    columns_of = FlatColumns(buffer.observation_space, buffer.action_space, None, extras, False)
    return columns_of.dataset(kind, reader, reader.wanted)


class _TransitionsOf:
    """Reads a ring, env by env, in blocks."""

    def __init__(self, buffer: Any, extras: list[str]) -> None:
        self._buffer, self._columns = buffer, buffer.rows()
        self._obs = [leaf.path for leaf in space_leaves(buffer.observation_space, "obs")]
        self._names = [*_COLUMNS, *extras]
        keys = {name: [name] for name in (*self._names, "episode_index")}
        nexts = [f"next_{path}" for path in self._obs]
        self.wanted = Wanted({**keys, "obs": self._obs, "next_obs": nexts})

    def __call__(self) -> Iterator[Block]:
        buffer = self._buffer
        order = buffer.order()
        env_ids = torch.zeros_like(order)
        if hasattr(buffer, "counts"):
            counts = torch.from_numpy(buffer.counts)
            rings = torch.arange(len(counts), device="cpu")
            env_ids = rings.repeat_interleave(counts)
        elif "env_ids" in self._columns:
            env_ids = self._columns["env_ids"][order.to(buffer.device)].cpu()
        layout, number = row_layout(buffer), -1
        row_bytes = layout.stride + 2 * layout.obs_bytes
        if layout.frames is not None:
            row_bytes += 2 * layout.frames.num_frames * layout.frames.nbytes
        size = max(64, BLOCK_BYTES // row_bytes)
        for env_id in env_ids.unique().tolist():
            before: dict[str, np.ndarray] | None = None
            for rows in order[env_ids == env_id].split(size):
                block = self._gather(rows)
                starts = _starts(block, before, self._obs)
                block["episode_index"] = number + np.cumsum(starts)
                number = int(block["episode_index"][-1])
                before = {name: column[-1:] for name, column in block.items()}
                yield Block(type(buffer).__name__, block)

    def _gather(self, rows: torch.Tensor) -> dict[str, np.ndarray]:
        """Single steps, by key."""
        space, source, place = self._buffer.observation_space, self._columns, None
        if self._buffer.n_step == 1:  # get also finds observations that are stored once
            batch = self._buffer.get(rows)
            source = {name: getattr(batch, name) for name in ("obs", "next_obs", *_COLUMNS)}
            source |= batch.extras
        else:
            place = rows.to(self._buffer.device)
        flat = {name: source[name] for name in self._names}
        for name, prefix in (("obs", ""), ("next_obs", "next_")):
            leaves = leaves_of(space, source[name])
            flat |= {f"{prefix}{path}": x for path, x in zip(self._obs, leaves, strict=True)}
        if place is not None:
            flat = {name: view[place] for name, view in flat.items()}
        return {name: column.cpu().numpy() for name, column in flat.items()}


def _starts(
    block: dict[str, np.ndarray], before: dict[str, np.ndarray] | None, obs: list[str]
) -> np.ndarray:
    """Whether each transition (K,) does not go on where the one before it ended."""
    over = block["terminations"] | block["truncations"]
    starts = np.ones(len(over), np.bool_)
    starts[1:] = over[:-1]
    if before is not None:
        starts[0] = before["terminations"][0] | before["truncations"][0]
    for path in obs:
        last = block[f"next_{path}"][:1] if before is None else before[f"next_{path}"]
        following = np.concatenate([last, block[f"next_{path}"][:-1]])
        starts |= (_bytes(block[path]) != _bytes(following)).any(1)
    starts[0] |= before is None
    return starts


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
