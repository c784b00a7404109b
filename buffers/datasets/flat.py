"""Steps of many episodes in flat columns, as in arrays, files and buffers: reading and writing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces

from buffers.core.arguments import as_array
from buffers.core.errors import BufferMisuseError
from buffers.core.spaces import build_tree
from buffers.datasets.dataset import (
    DatasetError,
    EpisodeDataset,
    RawEpisode,
    joined,
    leaves_of,
    row_layout,
)

__all__ = [
    "BLOCK_BYTES",
    "Blocks",
    "FlatColumns",
    "Keys",
    "as_dataset",
    "check_lengths",
    "flat_blocks",
    "from_arrays",
    "from_buffer",
]


_logger = logging.getLogger("vecenv")
BLOCK_BYTES = 1 << 25  # per read or write

Keys = dict[str, list[str]]  # keys of a file, by names of this library; for obs one per leaf
Blocks = Iterator[tuple[str, dict[str, np.ndarray]]]  # name of the file, and steps (K, ...) by key

# Names of the columns in common formats, tried in this order.
NAMES: dict[str, tuple[str, ...]] = {
    "obs": ("observations", "observation.state", "observation", "obs"),
    "next_obs": ("next_observations", "next_observation", "next_obs"),
    "actions": ("actions", "action"),
    "rewards": ("rewards", "next.reward", "reward"),
    "terminations": ("terminals", "terminations", "next.terminated"),
    "truncations": ("timeouts", "truncations", "next.truncated"),
    "boundaries": ("boundaries",),
    "episode_index": ("episode_index",),
    "frame_index": ("frame_index",),
}
_NEEDED = ("obs", "actions", "rewards")
_ENDS = ("terminations", "truncations", "episode_index")
_OBS = ("obs", "next_obs")


class FlatColumns(NamedTuple):
    """Arguments of the user about the columns of a file, and the expected spaces."""

    observation_space: Space
    action_space: Space
    columns: Mapping[str, str | None] | None = None
    extra_columns: Mapping[str, Space] | None = None
    check_bounds: bool = True

    def find(self, where: str, there: Iterable[str]) -> Keys:
        """Find the keys of a file to read; raise DatasetError if one is missing."""
        there, given, found = set(there), dict(self.columns or {}), dict[str, list[str]]()
        extras = {name: (name, f"infos/{name}") for name in self.extra_columns or {}}
        known = {**NAMES, **extras}
        if unknown := sorted(set(given) - set(known), key=str):
            raise DatasetError(f"columns has {unknown[0]!r}, expected some of {sorted(known)}")
        paths = list(_key_paths(self.observation_space))
        for name, aliases in known.items():
            asked, is_needed = given.get(name, ""), name in (*_NEEDED, *extras)
            if asked is None:
                if is_needed and name != "rewards":
                    raise DatasetError(f"columns has None for {name}, which is needed: name it")
                continue
            for base in (asked,) if asked else aliases:
                for separator in "/.":
                    leaves = [separator.join((base, *p)) for p in paths] if name in _OBS else [base]
                    if name not in found and there.issuperset(leaves):
                        found[name] = leaves
            if name not in found and (asked or is_needed):
                tried = asked or " or ".join(map(repr, aliases))
                if name in _OBS and paths[0]:
                    tried += f" with {['/'.join(path) for path in paths]}"
                raise DatasetError(
                    f"{where}: the field {name} is missing, looked for {tried}; there is "
                    f"{sorted(there)}: name it by columns={{{name!r}: ...}}"
                )
        if found.keys().isdisjoint(_ENDS):
            raise DatasetError(
                f"{where}: nothing tells where episodes end; looked for terminals, timeouts and "
                f"episode_index, there is {sorted(there)}: name one by "
                "columns={'truncations': ...}"
            )
        return found

    def dataset(self, name: str, read: Callable[[], Blocks], keys: Keys) -> EpisodeDataset:
        """Make a data set of the episodes in consecutive blocks that `read` yields."""
        said = list[str]()  # log the warning once, as the data may be read several times

        def episodes() -> Iterator[RawEpisode]:
            num_left_out = 0
            for where, columns in _split(read(), keys):
                episode, is_cut = _episode(columns, keys, self.observation_space)
                num_left_out += is_cut
                if episode is not None:
                    yield RawEpisode(where, episode)
            if num_left_out and not said:
                said.append(f"{name}: {num_left_out} last steps of episodes are left out, ")
                _logger.warning("%swhose next observation it lacks", *said)

        return EpisodeDataset(
            name, episodes, self.observation_space, self.action_space,
            extra_columns=self.extra_columns, check_bounds=self.check_bounds,
        )  # fmt: skip


def from_arrays(
    arrays: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    observation_space: Space,
    action_space: Space,
    *,
    columns: Mapping[str, str | None] | None = None,
    extra_columns: Mapping[str, Space] | None = None,
    check_bounds: bool = True,
) -> EpisodeDataset:
    """Make a data set from a dict of arrays with the steps of all episodes; nothing is copied yet.

    An episode ends at a step with `terminations` or `truncations`, where `episode_index` changes,
    and with the last step. Without `next_obs`, the final observation of an episode is unknown. Then
    a last step that terminated gets its own observation as the next one, whose value no learner
    reads; any other last step is left out.

    Args:
        arrays: Arrays (N, ...) by name: `observations` (nested, or "observations/key"), `actions`,
            `rewards`, `terminals` or `terminations`, `timeouts` or `truncations`. Optional:
            `next_observations`, `boundaries`, `episode_index` int (N,), ascending, and
            `frame_index` int (N,), which counts the steps of each episode from 0. Or a list of
            such dicts, read one after the other.
        observation_space: Of a single environment.
        action_space: Of a single environment.
        columns: Names in the data, by names of this library (`obs`, `next_obs`, `actions`,
            `rewards`, `terminations`, `truncations`, `boundaries`, `episode_index`, `frame_index`,
            extra columns). None skips a column; skipped rewards are 0.
        extra_columns: Names and spaces of further columns, read as `name` or `infos/name`.
        check_bounds: Refuse values that the spaces do not contain.

    Raises:
        DatasetError: A column is missing, or lengths differ.
    """
    asked = FlatColumns(observation_space, action_space, columns, extra_columns, check_bounds)
    if isinstance(arrays, list | tuple):
        return joined(partial(from_arrays, **asked._asdict()), arrays)
    if not isinstance(arrays, Mapping):
        raise DatasetError(f"arrays is a {type(arrays).__name__}, expected a dict of arrays")
    flat = dict(_flatten(arrays))
    keys = asked.find("arrays", flat)
    wanted = {key: flat[key] for part in keys.values() for key in part}
    check_lengths("arrays", {key: len(array) for key, array in wanted.items()})
    return asked.dataset("arrays", lambda: iter([("arrays", wanted)]), keys)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for key, value in tree.items():
        if isinstance(value, Mapping | tuple):
            inner = value if isinstance(value, Mapping) else dict(enumerate(value))
            yield from _flatten(inner, f"{prefix}{key}/")
            continue
        try:
            array = as_array(key, value.detach().cpu() if hasattr(value, "detach") else value)
        except BufferMisuseError as error:  # lists of different lengths
            raise DatasetError(f"arrays: {prefix}{key} is no array: {error}") from None
        yield f"{prefix}{key}", np.atleast_1d(array)


def check_lengths(where: str, lengths: Mapping[str, int]) -> None:
    """Raise DatasetError unless all columns have the same number of rows."""
    shortest, longest = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
    if lengths[shortest] != lengths[longest]:
        raise DatasetError(
            f"{where}: {shortest!r} has {lengths[shortest]} rows, but {longest!r} "
            f"{lengths[longest]}; the file was cut, or rows are missing"
        )


def _key_paths(space: Space) -> Iterator[tuple[str, ...]]:
    """The keys that lead to each leaf of a space, in the order of the leaves."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        yield ()
        return
    children = space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
    for key, child in children.items():
        yield from ((str(key), *rest) for rest in _key_paths(child))


def _split(blocks: Blocks, keys: Keys) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Cut blocks where episodes begin; yield the name of each episode, and its columns."""
    held: dict[str, np.ndarray] = {}  # the last episode, which may go on in the next block
    begin, number, where = 0, 0, ""  # its first row and its number
    for file, block in blocks:
        where = where or file
        if held:  # an episode may go on across blocks
            block = {key: np.concatenate([held[key], block[key]]) for key in block}
        starts = np.flatnonzero(_starts(file, block, keys, begin)).tolist()
        for start, stop in pairwise(starts):
            part = {key: array[start:stop] for key, array in block.items()}
            yield _called(where, number, part, keys), part
            number, where = number + 1, file
        if starts:
            held = {key: array[starts[-1] :] for key, array in block.items()}
            begin += starts[-1]
    if held:
        yield _called(where, number, held, keys), held


def _called(where: str, number: int, columns: dict[str, np.ndarray], keys: Keys) -> str:
    """Name of an episode in messages; raise DatasetError if its frames are not 0, 1, and so on."""
    if "episode_index" in keys:
        number = int(columns[keys["episode_index"][0]].reshape(-1)[0])
    where = f"{where}, episode {number}"
    if "frame_index" in keys:
        frames = _numbers(where, keys["frame_index"][0], columns)
        gaps = np.flatnonzero(frames != np.arange(len(frames)))
        if len(gaps):
            raise DatasetError(
                f"{where}, step {gaps[0]}: frame_index is {frames[gaps[0]]}, expected {gaps[0]}; "
                "rows are missing, repeated or out of order"
            )
    return where


def _numbers(where: str, key: str, columns: dict[str, np.ndarray]) -> np.ndarray:
    """Return a column of numbers, (K,) or (K, 1), as (K,)."""
    array = columns[key]
    if array.shape not in ((len(array),), (len(array), 1)) or array.dtype.kind not in "biuf":
        raise DatasetError(
            f"{where}: {key} has dtype {array.dtype} and shape {array.shape}, expected one number "
            f"per step, ({len(array)},)"
        )
    return array.reshape(-1)


def _starts(where: str, columns: dict[str, np.ndarray], keys: Keys, begin: int) -> np.ndarray:
    """Whether each row begins an episode, bool (K,); the first one does."""
    starts = np.zeros(len(next(iter(columns.values()))), np.bool_)
    for name in [name for name in _ENDS if name in keys]:
        key, is_index = keys[name][0], name == "episode_index"
        found = _numbers(where, key, columns)
        is_right = np.isfinite(found) & (found == np.floor(found))
        is_right = is_right if is_index else (found == 0) | (found == 1)  # NaN is neither
        if not is_right.all():
            row, what = int(np.argmin(is_right)), "whole numbers" if is_index else "0 or 1"
            raise DatasetError(
                f"{where}: {key} is {found[row]} in row {begin + row}, expected {what}"
            )
        if is_index and (back := np.flatnonzero(found[1:] < found[:-1])).size:
            raise DatasetError(
                f"{where}: episode_index goes from {found[back[0]]} back to {found[back[0] + 1]}; "
                "the rows of an episode must follow one another, and episodes ascend"
            )
        starts[1:] |= found[1:] != found[:-1] if is_index else found[:-1] != 0
    starts[:1] = True
    return starts


def _episode(
    columns: dict[str, np.ndarray], keys: Keys, space: Space
) -> tuple[dict[str, Any] | None, bool]:
    """Columns of an episode by names of this library, observations nested; None if no step is left.

    Without next observations, complete or leave out the last step. Returns also whether it is left
    out.
    """
    found: dict[str, Any] = {}
    for name, parts in keys.items():
        array = columns[parts[0]]
        if name in _OBS:
            found[name] = build_tree(space, [columns[key] for key in parts])
        elif name in ("rewards", *_ENDS[:2], "boundaries"):
            found[name] = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
        elif name not in ("episode_index", "frame_index"):
            found[name] = array
    count = len(next(iter(columns.values())))
    found.setdefault("rewards", np.zeros(count, np.float32))
    if "next_obs" in found:
        return found, False
    if "terminations" in found and bool(found["terminations"][-1]):
        leaves = leaves_of(space, found["obs"])
        found["obs"] = build_tree(space, [np.concatenate([a, a[-1:]]) for a in leaves])
        return found, False
    if count < 2:
        return None, True
    return {name: part if name == "obs" else part[:-1] for name, part in found.items()}, True


def flat_blocks(
    dataset: EpisodeDataset, names: Mapping[str, str], separator: str
) -> Iterator[dict[str, np.ndarray]]:
    """Yield whole episodes as flat columns of a file, some MiB of steps (K, ...) at a time.

    `names` are the names in the file; `names["extras"]` is the prefix of extra columns. `separator`
    is put between the name of observations and the keys of their parts.
    """
    paths, pieces, size, number = list(_key_paths(dataset.observation_space)), [], 0, -1
    for number, episode in enumerate(dataset):
        leaves = leaves_of(dataset.observation_space, episode.pop("obs"))
        columns = []
        for name, part in (("obs", slice(None, -1)), ("next_obs", slice(1, None))):
            keys = [separator.join((names[name], *path)) for path in paths]
            columns += zip(keys, [leaf[part] for leaf in leaves], strict=True)
        count = len(episode["rewards"])
        if not (episode["terminations"][-1] or episode["truncations"][-1]):
            # Else readers that only use the flags would join this episode and the next one.
            episode["truncations"] = episode["truncations"].copy()
            episode["truncations"][-1] = True
        episode |= {"episode_index": np.full(count, number), "frame_index": np.arange(count)}
        for name, array in episode.items():
            if name in names or name in dataset.extra_columns:
                columns.append((names.get(name, names["extras"] + name), array))
        keys = [key for key, _ in columns]
        if twice := [key for key in keys if keys.count(key) > 1]:  # {"a/b": ..., "a": {"b": ...}}
            raise DatasetError(
                f"{dataset.name}: two columns have the name {twice[0]!r} in a file; name parts of "
                f"observations without {separator!r}, and extra columns otherwise"
            )
        pieces.append(dict(columns))
        size += sum(array.nbytes for _, array in columns)
        if size >= BLOCK_BYTES:
            yield {key: np.concatenate([piece[key] for piece in pieces]) for key in keys}
            pieces, size = [], 0
    if number < 0:
        raise DatasetError(f"{dataset.name} has no episode; nothing was written")
    if pieces:
        yield {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}


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
