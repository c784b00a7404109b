"""from_buffer: a data set of the episodes that a buffer holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from buffers.core.spaces import build_tree
from buffers.datasets.dataset import DatasetError, EpisodeDataset, RawEpisode, leaves_of, row_layout
from buffers.datasets.flat import BLOCK_BYTES, Blocks, FlatColumns

__all__ = ["as_dataset", "from_buffer"]

_COLUMNS = ("actions", "rewards", "terminations", "truncations")


def from_buffer(buffer: Any, *, check_bounds: bool = True) -> EpisodeDataset:
    """Make a data set of the episodes of a buffer, to write into a file or another buffer.

    From an `EpisodicReplayBuffer` it has the complete episodes, not the open ones. From a replay
    buffer it has the transitions of each env, oldest first, joined to an episode as long as each
    next observation equals the next row's observation in all bytes. Overwritten steps are missing,
    and an unfinished episode counts as cut.

    Every iteration reads the buffer again, one episode or some MiB at a time. So call this when the
    buffer is new: a buffer that can't be exported is refused before anything was recorded.

    Args:
        buffer: An `EpisodicReplayBuffer`; or a replay buffer with n_step=1 that knows the env of
            each transition: with `track_env`, with num_envs=1, or a `PerEnvReplayBuffer`.
        check_bounds: Refuse values that the spaces do not contain. Buffers accept such values; the
            functions that read files refuse them.

    Raises:
        DatasetError: A replay buffer does not know the envs, or has n_step > 1.
    """
    kind = type(buffer).__name__
    is_known = hasattr(buffer, "add_episode") or hasattr(buffer, "order")
    if not is_known or isinstance(buffer, type):
        raise DatasetError(f"the source is a {kind}, expected a buffer or an EpisodeDataset")
    single = buffer.observation_space, buffer.action_space
    extras = dict(buffer._made_by[2].get("extra_columns") or {})
    if hasattr(buffer, "add_episode"):
        options: dict[str, Any] = {"extra_columns": extras, "check_bounds": check_bounds}
        return EpisodeDataset(kind, lambda: _episodes_of(buffer), *single, **options)
    columns = buffer.rows()
    is_told = hasattr(buffer, "counts") or "env_ids" in columns
    if buffer.num_envs != 1 and not is_told:
        raise DatasetError(
            f"the {kind} does not know of which of its envs, num_envs={buffer.num_envs}, a "
            "transition is; make it with num_envs=1, or with num_envs=N and track_env=True"
        )
    if buffer.n_step > 1:
        raise DatasetError(
            f"the {kind} has n_step={buffer.n_step}, so its rewards and next observations are not "
            "those of single steps; make it with n_step=1"
        )
    obs, names = row_layout(buffer).obs or ["obs"], (*_COLUMNS, *extras)
    keys = {name: [name] for name in (*names, "episode_index")}
    keys |= {"obs": obs, "next_obs": [f"next_{path}" for path in obs]}
    flat = FlatColumns(*single, None, extras, check_bounds)
    return flat.dataset(kind, lambda: _transitions_of(buffer, obs, names), keys)


def as_dataset(source: Any) -> EpisodeDataset:
    """Return a data set as it is, or that of a buffer."""
    return source if isinstance(source, EpisodeDataset) else from_buffer(source)


def _episodes_of(buffer: Any) -> Iterator[RawEpisode]:
    """Read an episodic buffer."""
    space = buffer.observation_space
    for number in range(buffer.num_episodes):
        episode = buffer.episode(number)
        leaves = [leaf.cpu().numpy() for leaf in leaves_of(space, episode.pop("obs"))]
        columns = {name: column.cpu().numpy() for name, column in episode.items()}
        where = f"{type(buffer).__name__}, episode {number}"
        yield RawEpisode(where, {"obs": build_tree(space, leaves), **columns})


def _transitions_of(buffer: Any, obs: Sequence[str], names: Sequence[str]) -> Blocks:
    """Read a replay buffer, env by env, in blocks; number the episodes."""
    order, layout, number = buffer.order(), row_layout(buffer), -1
    env_ids = torch.zeros_like(order)
    if hasattr(buffer, "counts"):
        counts = torch.from_numpy(buffer.counts)
        env_ids = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    elif "env_ids" in (columns := buffer.rows()):
        env_ids = columns["env_ids"][order.to(buffer.device)].cpu()
    frames = layout.frames
    row_bytes = layout.stride + 2 * layout.obs_bytes
    row_bytes += 2 * frames.num_frames * frames.nbytes if frames else 0
    size = max(64, BLOCK_BYTES // row_bytes)
    for env_id in env_ids.unique().tolist():
        rows = order[env_ids == env_id]
        for begin in range(0, len(rows), size):
            has_before = begin > 0  # the row before tells whether the first row continues it
            # `get`, not `rows`, as it also finds observations that are stored once.
            batch = buffer.get(rows[begin - has_before : begin + size])
            block = {name: getattr(batch, name).cpu().numpy() for name in names}
            for prefix in ("", "next_"):
                leaves = leaves_of(buffer.observation_space, getattr(batch, f"{prefix}obs"))
                for path, leaf in zip(obs, leaves, strict=True):
                    block[f"{prefix}{path}"] = leaf.cpu().numpy()
            starts = np.ones(len(block["rewards"]), np.bool_)
            starts[1:] = (block["terminations"] | block["truncations"])[:-1]
            for path in obs:
                if len(starts) > 1:
                    after, now = _bytes(block[f"next_{path}"][:-1]), _bytes(block[path][1:])
                    starts[1:] |= (after != now).any(1)
            block = {name: column[has_before:] for name, column in block.items()}
            block["episode_index"] = number + np.cumsum(starts[has_before:])
            number = int(block["episode_index"][-1])
            yield type(buffer).__name__, block


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
