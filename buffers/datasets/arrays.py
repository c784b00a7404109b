"""from_arrays, and what all flat formats share: steps of many episodes behind one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces

from buffers.core.arguments import as_array
from buffers.core.errors import BufferMisuseError
from buffers.core.spaces import build_tree
from buffers.datasets.dataset import DatasetError, EpisodeDataset, RawEpisode, leaves_of

__all__ = [
    "BLOCK_BYTES",
    "Block",
    "FlatColumns",
    "Wanted",
    "check_lengths",
    "from_arrays",
    "key_paths",
]

BLOCK_BYTES = 1 << 25  # read at once

# What formats call the columns, tried in this order.
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


class Wanted(NamedTuple):
    """Which columns of a file are read."""

    keys: dict[str, list[str]]  # of the file, by name; of obs one for each leaf

    def all(self) -> list[str]:
        """Every key, once."""
        return list(dict.fromkeys(key for keys in self.keys.values() for key in keys))


class Block(NamedTuple):
    """K steps that follow one another in a file."""

    where: str  # the file
    columns: dict[str, np.ndarray]  # (K, ...) by key


class FlatColumns(NamedTuple):
    """What the user says of the columns of a file, and the spaces they are to fit."""

    observation_space: Space
    action_space: Space
    columns: Mapping[str, str | None] | None
    extra_columns: Mapping[str, Space] | None
    check_bounds: bool

    def find(self, where: str, there: Iterable[str]) -> Wanted:
        """Find the keys of a file to read.

        Raises:
            DatasetError: One that is needed is missing, or `columns` has a name that there is not.
        """
        keys, given = set(there), dict(self.columns or {})
        extras = {name: (name, f"infos/{name}") for name in self.extra_columns or {}}
        unknown = sorted(set(given) - set(NAMES) - set(extras), key=str)
        if unknown:
            raise DatasetError(
                f"columns has {unknown[0]!r}, expected some of {sorted({*NAMES, *extras})}"
            )
        paths = list(key_paths(self.observation_space))
        found: dict[str, list[str]] = {}
        for name, aliases in {**NAMES, **extras}.items():
            asked = given.get(name, "")
            if asked is None:
                if name in ("obs", "actions") or name in extras:
                    raise DatasetError(
                        f"columns has None for {name}, which is needed: name a column"
                    )
                continue
            is_obs = name in ("obs", "next_obs")
            for base in (asked,) if asked else aliases:
                leaves = _leaf_keys(base, paths, keys) if is_obs else [base]
                if keys.issuperset(leaves):
                    found[name] = leaves
                    break
            else:
                if asked or name in _NEEDED or name in extras:
                    tried = asked or " or ".join(map(repr, aliases))
                    inside = (
                        f" with {['/'.join(path) for path in paths]}" if is_obs and paths[0] else ""
                    )
                    raise DatasetError(
                        f"{where}: the field {name} is missing, looked for {tried}{inside}; there "
                        f"is {sorted(keys)}: name it by columns={{{name!r}: ...}}"
                    )
        if not any(name in found for name in _ENDS):
            raise DatasetError(
                f"{where}: nothing tells where episodes end; looked for terminals, timeouts and "
                f"episode_index, there is {sorted(keys)}: name one by "
                "columns={'truncations': ...}"
            )
        return Wanted(found)

    def dataset(
        self, name: str, read: Callable[[], Iterator[Block]], wanted: Wanted
    ) -> EpisodeDataset:
        """A data set of episodes that lie behind one another in the blocks that `read` yields."""
        space = self.observation_space

        def episodes() -> Iterator[RawEpisode]:
            for where, columns in _split(read(), wanted):
                named = _named(columns, wanted, space)
                if (trimmed := _with_last(named, space)) is not None:
                    yield RawEpisode(where, trimmed)

        return EpisodeDataset(
            name,
            episodes,
            space,
            self.action_space,
            extra_columns=self.extra_columns,
            check_bounds=self.check_bounds,
        )


def from_arrays(
    arrays: Mapping[str, Any],
    observation_space: Space,
    action_space: Space,
    *,
    columns: Mapping[str, str | None] | None = None,
    extra_columns: Mapping[str, Space] | None = None,
    check_bounds: bool = True,
) -> EpisodeDataset:
    """Episodes in a dict of arrays, all steps behind one another; nothing is copied yet.

    An episode ends at a step with `terminations` or `truncations`, where `episode_index` changes,
    and with the last step. Without `next_obs` the last observation of an episode is not known: a
    last step that terminated gets its own observation as the next one, whose value no learner
    reads; any other last step is left out.

    Args:
        arrays: Arrays (N, ...) by name: `observations` (nested, or "observations/key"), `actions`,
            `rewards`, `terminals` or `terminations`, `timeouts` or `truncations`; if there are any,
            `next_observations`, `boundaries`, `episode_index` int (N,), ascending, and
            `frame_index` int (N,), which counts the steps of each episode from 0.
        observation_space: Of a single environment.
        action_space: Of a single environment.
        columns: Other names, by ours (`obs`, `next_obs`, `actions`, `rewards`, `terminations`,
            `truncations`, `boundaries`, `episode_index`, `frame_index`, extra columns); None for a
            column not to read: rewards are 0 then.
        extra_columns: Names and spaces of further columns, read as `name` or `infos/name`.
        check_bounds: Refuse values that the spaces do not contain.

    Raises:
        DatasetError: A column is missing, or lengths differ.
    """
    if not isinstance(arrays, Mapping):
        raise DatasetError(f"arrays is a {type(arrays).__name__}, expected a dict of arrays")
    flat = dict(_flatten(arrays))
    asked = FlatColumns(observation_space, action_space, columns, extra_columns, check_bounds)
    wanted = asked.find("arrays", flat)
    check_lengths("arrays", {key: len(flat[key]) for key in wanted.all()})

    def read() -> Iterator[Block]:
        yield Block("arrays", {key: flat[key] for key in wanted.all()})

    return asked.dataset("arrays", read, wanted)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}/")
        elif isinstance(value, tuple):
            yield from _flatten({str(k): v for k, v in enumerate(value)}, f"{prefix}{key}/")
        else:
            value = value.detach().cpu() if hasattr(value, "detach") else value
            try:
                array = as_array(f"{prefix}{key}", value)
            except BufferMisuseError as error:  # lists of different lengths
                raise DatasetError(f"arrays: {prefix}{key} is no array: {error}") from None
            yield f"{prefix}{key}", array if array.ndim else array[None]


def check_lengths(where: str, lengths: Mapping[str, int]) -> None:
    """Raise DatasetError unless all columns have as many rows."""
    shortest, longest = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
    if lengths[shortest] != lengths[longest]:
        raise DatasetError(
            f"{where}: {shortest!r} has {lengths[shortest]} rows, but {longest!r} "
            f"{lengths[longest]}; the file was cut, or rows are missing"
        )


def key_paths(space: Space) -> Iterator[tuple[str, ...]]:
    """The keys that lead to each leaf of a space, in the order of the leaves."""
    children: dict[str, Space] = {}
    if isinstance(space, spaces.Dict):
        children = {str(key): child for key, child in space.spaces.items()}
    elif isinstance(space, spaces.Tuple):
        children = {str(index): child for index, child in enumerate(space.spaces)}
    else:
        yield ()
    for key, child in children.items():
        yield from ((key, *rest) for rest in key_paths(child))


def _leaf_keys(base: str, paths: list[tuple[str, ...]], keys: set[str]) -> list[str]:
    """Keys of the leaves below a base, with the separator that the file has."""
    for separator in ("/", "."):
        found = [separator.join((base, *path)) for path in paths]
        if keys.issuperset(found):
            break
    return found


def _split(blocks: Iterator[Block], wanted: Wanted) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Cut blocks where episodes begin; yield what messages call them, and their columns."""
    pieces: list[Block] = []
    number, last = -1, _Last()
    for block in blocks:
        starts = last.starts(block, wanted)
        begin = 0
        for start in np.flatnonzero(starts).tolist():
            if start > begin:
                pieces.append(_cut(block, begin, start))
            if pieces:
                yield _joined(pieces, number, wanted)
            pieces, begin, number = [], start, number + 1
        if begin < len(starts):
            pieces.append(_cut(block, begin, len(starts)))
    if pieces:
        yield _joined(pieces, number, wanted)


def _cut(block: Block, begin: int, stop: int) -> Block:
    return Block(block.where, {key: array[begin:stop] for key, array in block.columns.items()})


def _joined(pieces: list[Block], number: int, wanted: Wanted) -> tuple[str, dict[str, np.ndarray]]:
    columns = pieces[0].columns
    if len(pieces) > 1:
        columns = {key: np.concatenate([p.columns[key] for p in pieces]) for key in columns}
    if "episode_index" in wanted.keys:
        number = int(columns[wanted.keys["episode_index"][0]].reshape(-1)[0])
    where = f"{pieces[0].where}, episode {number}"
    if "frame_index" in wanted.keys:
        key = wanted.keys["frame_index"][0]
        frames = _numbers(where, key, columns, len(columns[key]))
        gaps = np.flatnonzero(frames != np.arange(len(frames)))
        if len(gaps):
            step = int(gaps[0])
            raise DatasetError(
                f"{where}, step {step}: frame_index is {frames[step]}, expected {step}; rows are "
                "missing, repeated or out of order"
            )
    return where, columns


def _numbers(where: str, key: str, columns: dict[str, np.ndarray], count: int) -> np.ndarray:
    """A column (K,), or (K, 1), of numbers as (K,)."""
    array = columns[key]
    if array.shape not in ((count,), (count, 1)) or array.dtype.kind not in "biuf":
        raise DatasetError(
            f"{where}: {key} has dtype {array.dtype} and shape {array.shape}, expected one number "
            f"per step, ({count},)"
        )
    return array.reshape(count)


class _Last:
    """What the row before a block was."""

    def __init__(self) -> None:
        self.is_over, self.index, self.is_first = True, 0, True

    def starts(self, block: Block, wanted: Wanted) -> np.ndarray:
        """Whether each row of a block begins an episode, bool (K,)."""
        columns, keys = block.columns, wanted.keys
        count = len(columns[keys["rewards"][0]] if "rewards" in keys else columns[keys["obs"][0]])
        over = np.zeros(count, np.bool_)
        for name in ("terminations", "truncations"):
            if name in keys:
                flags = _numbers(block.where, keys[name][0], columns, count)
                wrong = np.flatnonzero((flags != 0) & (flags != 1))  # NaN among them
                if len(wrong):
                    row = int(wrong[0])
                    raise DatasetError(
                        f"{block.where}: {keys[name][0]} is {flags[row]} in row {row}, expected "
                        "0 or 1"
                    )
                over |= flags != 0
        if "episode_index" not in keys:
            starts = np.concatenate([[self.is_over], over])[:count]
        else:
            index = _numbers(block.where, keys["episode_index"][0], columns, count)
            wrong = np.flatnonzero(~(np.isfinite(index) & (index == np.floor(index))))
            if len(wrong):
                row = int(wrong[0])
                raise DatasetError(
                    f"{block.where}: episode_index is {index[row]} in row {row}, expected whole "
                    "numbers"
                )
            first = np.array([self.index]).astype(index.dtype)  # else uint64 becomes float64
            before = np.concatenate([first, index])[:count]
            starts = index != before
            if self.is_first:
                starts[:1] = True
            back = np.flatnonzero((index < before) & ~(self.is_first & (np.arange(count) == 0)))
            if len(back):
                row = int(back[0])
                raise DatasetError(
                    f"{block.where}: episode_index goes from {before[row]} back to {index[row]}; "
                    "the rows of an episode must follow one another, and episodes ascend"
                )
            self.index = int(index[-1]) if count else self.index
        if count:
            self.is_over, self.is_first = bool(over[-1]), False
        return starts


def _named(columns: dict[str, np.ndarray], wanted: Wanted, space: Space) -> dict[str, Any]:
    """Columns of an episode by our names, observations nested."""
    found: dict[str, Any] = {}
    for name, keys in wanted.keys.items():
        if name in ("obs", "next_obs"):
            found[name] = build_tree(space, [columns[key] for key in keys])
        elif name not in ("episode_index", "frame_index"):
            array = columns[keys[0]]
            is_column = array.ndim == 2 and array.shape[1] == 1
            scalar = name in ("rewards", "terminations", "truncations", "boundaries")
            found[name] = array[:, 0] if scalar and is_column else array
    if "rewards" not in found:
        found["rewards"] = np.zeros(len(next(iter(columns.values()))), np.float32)
    return found


def _with_last(columns: dict[str, Any], space: Space) -> dict[str, Any] | None:
    """See to the last observation where the file has none; None if no step is left."""
    if "next_obs" in columns:
        return columns
    count = len(columns["rewards"])
    ended = columns.get("terminations")
    if ended is not None and len(ended) and bool(ended[-1]):
        leaves = leaves_of(space, columns["obs"])
        columns["obs"] = build_tree(space, [np.concatenate([a, a[-1:]]) for a in leaves])
        return columns
    if count < 2:
        return None
    return {name: v if name == "obs" else v[:-1] for name, v in columns.items()}
