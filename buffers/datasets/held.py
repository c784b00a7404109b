"""from_buffer: the episodes that a buffer holds; and steps one behind the other, as files want."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import Space

from buffers.core.spaces import build_tree, space_leaves
from buffers.datasets.arrays import BLOCK_BYTES, Block, FlatColumns, Wanted, key_paths
from buffers.datasets.dataset import DatasetError, EpisodeDataset, RawEpisode, leaves_of, row_layout

__all__ = ["as_dataset", "flat_blocks", "from_buffer"]

_COLUMNS = ("actions", "rewards", "terminations", "truncations")


def from_buffer(buffer: Any, *, check_bounds: bool = True) -> EpisodeDataset:
    """The episodes of a buffer, to be written into a file or put into another buffer.

    Those of an `EpisodicReplayBuffer` are its episodes; open ones are not in it. The transitions of
    a ring are joined, env by env, oldest first, as long as each next observation is the
    observation that follows, byte for byte; what was overwritten is missing, and an episode of
    which the newest steps are still to come counts as cut. What the buffer holds is read anew each
    time, one episode or some MiB at a time. So call it when the buffer is made, and still empty: a
    buffer that can't be exported later is refused then, before anything was recorded.

    Args:
        buffer: An `EpisodicReplayBuffer`, or a replay buffer that knows the env of each
            transition: with `track_env`, with num_envs=1, or a `PerEnvReplayBuffer`. With `n_step`
            above 1 it must store next observations, and those whole (no `frame_stack`).
        check_bounds: Refuse values that the spaces do not contain, which buffers take; the
            functions that read files refuse them, too.

    Raises:
        DatasetError: A ring does not know its envs, or keeps no single steps.
    """
    kind = type(buffer).__name__
    if hasattr(buffer, "add_episode"):
        read = _EpisodesOf(buffer)
        single = buffer.observation_space, buffer.action_space
        extras = _extra_spaces(buffer)
        return EpisodeDataset(kind, read, *single, extra_columns=extras, check_bounds=check_bounds)
    if hasattr(buffer, "order"):
        return _of_ring(buffer, kind, check_bounds)
    raise DatasetError(f"the source is a {kind}, expected a buffer or an EpisodeDataset")


def as_dataset(source: Any) -> EpisodeDataset:
    """A data set, or that of a buffer."""
    return source if isinstance(source, EpisodeDataset) else from_buffer(source)


def _extra_spaces(buffer: Any) -> dict[str, Space]:
    """Spaces of the extra columns of a buffer."""
    return dict(buffer._made_by[2].get("extra_columns") or {})


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


def _of_ring(buffer: Any, kind: str, check_bounds: bool) -> EpisodeDataset:
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
    spaces = buffer.observation_space, buffer.action_space
    columns_of = FlatColumns(*spaces, None, extras, check_bounds)
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


def flat_blocks(
    dataset: EpisodeDataset, names: Mapping[str, str], separator: str
) -> Iterator[dict[str, np.ndarray]]:
    """Whole episodes behind one another as a file has them, some MiB of steps (K, ...) at a time.

    Args:
        dataset: Of at least one episode.
        names: What the file calls `obs`, `next_obs`, `actions`, `rewards`, `terminations`,
            `truncations`, `boundaries`, `episode_index` and, where it has it, `frame_index`; and
            what stands before the name of each extra column, as "extras".
        separator: Between the name of observations and the keys of their parts.

    Raises:
        DatasetError: An episode does not fit, two columns have the same name, or there is none.
    """
    space, pieces, size = dataset.observation_space, [], 0
    paths, number = list(key_paths(space)), -1
    for number, episode in enumerate(dataset):
        count, leaves = len(episode["rewards"]), leaves_of(space, episode.pop("obs"))
        index = {"episode_index": np.full(count, number), "frame_index": np.arange(count)}
        columns: list[tuple[str, np.ndarray]] = []
        for name, part in (("obs", slice(None, -1)), ("next_obs", slice(1, None))):
            keys = [separator.join((names[name], *path)) for path in paths]
            columns += zip(keys, [leaf[part] for leaf in leaves], strict=True)
        for name, array in {**episode, **index}.items():
            if name in names or name in dataset.extra_columns:
                columns.append((names.get(name, names["extras"] + name), array))
        piece = dict(columns)
        if len(piece) < len(columns):  # as {"a/b": ..., "a": {"b": ...}} has
            keys = [key for key, _ in columns]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise DatasetError(
                f"{dataset.name}: two columns have the name {twice!r} in a file; name parts of "
                f"observations without {separator!r}, and extra columns otherwise"
            )
        pieces.append(piece)
        size += sum(array.nbytes for array in piece.values())
        if size >= BLOCK_BYTES:
            yield _joined(pieces)
            pieces, size = [], 0
    if number < 0:
        raise DatasetError(f"{dataset.name} has no episode; nothing was written")
    if pieces:
        yield _joined(pieces)


def _joined(pieces: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}
