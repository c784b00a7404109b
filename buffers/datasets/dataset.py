"""EpisodeDataset: recorded episodes, read one at a time, checked, and added to buffers.

```
#  from_arrays, from_hdf5, from_parquet, from_buffer --> FlatColumns: blocks of steps --.
#  from_minari, from_buffer ----------------------------> RawEpisode, not checked  <----'
#                                                             v
#  to_buffer, fill, to_hdf5, to_parquet, to_minari  <-- EpisodeDataset.__iter__ checks each episode
```
"""

from __future__ import annotations

import copy
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from gymnasium import Space, spaces

from buffers.core.arguments import check_rewards, read_array, read_nest
from buffers.core.errors import BufferMisuseError
from buffers.core.rows import RowLayout
from buffers.core.spaces import Leaf, action_leaf, build_tree, extra_leaves, space_leaves

__all__ = [
    "DatasetError", "EpisodeDataset", "RawEpisode", "joined", "leaves_of", "load_library",
    "reading", "row_layout",
]  # fmt: skip

_FLAGS = ("terminations", "truncations", "boundaries")
_TAKEN = frozenset((
    "obs", "next_obs", "actions", "rewards", *_FLAGS,
    "episode_index", "frame_index",  # of files
))  # fmt: skip

_DAMAGED = (
    OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RuntimeError,
    EOFError, MemoryError, ArithmeticError,  # of sizes that are too large
)  # fmt: skip

BufferT = TypeVar("BufferT")


class DatasetError(BufferMisuseError):
    """Recorded data is damaged, incomplete, or of another env; no buffer was changed."""


class RawEpisode(NamedTuple):
    """An episode of T steps as read from a file, not checked."""

    where: str  # file and episode, for messages
    columns: dict[str, Any]  # obs (T + 1, ...) nested, or (T, ...) with next_obs; others (T, ...)


def load_library(module: str) -> ModuleType:
    """Import a module of an optional library; the ModuleNotFoundError says how to install it."""
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # If h5py is missing, Minari raises ImportError itself.
        missing = (error.name or library).partition(".")[0]
        if missing not in (library, "h5py"):
            raise
        raise ModuleNotFoundError(
            f"this data set needs {library}, which is not installed or not whole: "
            "pip install 'vecenv[datasets]'",
            name=error.name,
        ) from None


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Convert exceptions of libraries about damaged files into DatasetError."""
    try:
        yield
    except DatasetError:
        raise
    except _DAMAGED as error:
        said = " ".join(str(error).split()) or repr(error)
        raise DatasetError(f"{where} can't be read: {said:.200}") from None


class EpisodeDataset:
    """Recorded episodes, made by the functions `from_...`; every iteration reads them again.

    Iterating yields one episode at a time, as a dict for `EpisodicReplayBuffer.add_episode`: `obs`
    (T + 1, *obs_shape), nested like the space, and `actions`, `rewards`, `terminations`,
    `truncations`, `boundaries` and extra columns (T, ...). They are NumPy arrays; they may share
    memory with the source only if that is in memory. Rewards keep their dtype; other columns have
    the dtypes of the spaces. All values are checked before an episode is yielded.

    Attributes:
        name: Name of the file or data set, for messages.
        observation_space, action_space: Of a single environment.
        extra_columns: Names and spaces of further values per step.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], Iterator[RawEpisode]],
        observation_space: Space,
        action_space: Space,
        *,
        extra_columns: Mapping[str, Space] | None = None,
        check_bounds: bool = True,
    ):
        self.name, self._read = name, read
        self.observation_space, self.action_space = observation_space, action_space
        self.extra_columns = dict(extra_columns or {})
        self._checks_bounds, self._skips = check_bounds, False
        self._obs = space_leaves(observation_space, "obs")
        self._others = [action_leaf(action_space), *extra_leaves(self.extra_columns, _TAKEN)]
        flat = leaves_of(observation_space, observation_space)
        self._spaces = {
            **{leaf.path: leaf_space for leaf, leaf_space in zip(self._obs, flat, strict=True)},
            "actions": action_space,
            **self.extra_columns,
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Read, check and yield the episodes in their order.

        Raises:
            DatasetError: An episode is wrong; the message names file, episode, step and field.
        """
        for where, columns in self._read():
            try:
                checked = self._checked(where, columns)
            except BufferMisuseError as error:
                told = f"{error}" if isinstance(error, DatasetError) else f"{where}: {error}"
                if not self._skips:
                    raise DatasetError(told) from None
                warnings.warn(f"left out: {told}", stacklevel=2)
            else:
                yield checked

    def without_bad(self) -> EpisodeDataset:
        """Return the same data without wrong episodes; each gives a warning.

        Files that can't be read, or lack a column, still raise DatasetError.
        """
        other = copy.copy(self)
        other._skips = True
        return other

    @property
    def episode_lengths(self) -> np.ndarray:
        """Steps of each episode, int64 (num_episodes,); reads and checks all episodes.

        Raises:
            DatasetError: An episode is wrong, or there is no step.
        """
        lengths = np.array([len(episode["rewards"]) for episode in self], np.int64)
        if not len(lengths):
            raise DatasetError(f"{self.name} has no step")
        return lengths

    def to_buffer(self, kind: Callable[..., BufferT], **options: Any) -> BufferT:
        """Make a buffer of the size of the data, and fill it.

        Args:
            kind: `EpisodicReplayBuffer`, or a class of replay buffers.
            **options: Arguments of its constructor, except spaces. Defaults: `capacity` and
                `max_episodes` fit the data exactly; `num_envs` of replay buffers is 1. For data
                larger than memory use a folder, with storage="memmap".

        Raises:
            DatasetError: As in `fill`; no buffer was made.
        """
        lengths = self.episode_lengths
        num_envs: Any = options.get("num_envs")
        is_number = isinstance(num_envs, int | np.integer) and num_envs > 0  # else `kind` raises
        num_rings = int(num_envs) if hasattr(kind, "counts") and is_number else 1
        if not (hasattr(kind, "add_episode") or hasattr(kind, "order")):
            raise self._not_into(getattr(kind, "__name__", repr(kind)))
        own: dict[str, Any] = {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "capacity": int(_rows_by_ring(lengths, num_rings).max()),
        }
        own |= {"max_episodes": len(lengths)} if hasattr(kind, "add_episode") else {"num_envs": 1}
        if self.extra_columns:
            own["extra_columns"] = self.extra_columns
        made = kind(**{**own, **options})
        if len(made):  # type: ignore[arg-type]  # a buffer
            raise DatasetError(
                f"folder {options.get('folder')!r} holds {len(made)} transitions already: open it "  # type: ignore[arg-type]
                "by the class of the buffer, or add to them with fill()"
            )
        self._check_spaces(made)
        return self._fill(made, lengths)

    def fill(self, buffer: BufferT) -> BufferT:
        """Add all episodes to a buffer, one by one, after a first pass that checks all of them.

        In replay buffers that track envs, episode k is added as env k modulo `num_envs`; their open
        episodes are cut. An episode that ends without a flag is cut, too.

        Args:
            buffer: An `EpisodicReplayBuffer`, or a replay buffer without `frame_stack`, with the
                same spaces and extra columns, and room for all steps: none is overwritten.

        Returns:
            The buffer.

        Raises:
            DatasetError: An episode is wrong, or there is no step; or the buffer has other spaces,
                `frame_stack`, or not enough room. Nothing was changed.
        """
        self._check_spaces(buffer)
        return self._fill(buffer, self.episode_lengths)

    def _fill(self, buffer: BufferT, lengths: np.ndarray) -> BufferT:
        target: Any = buffer
        self._check_room(target, lengths)
        if hasattr(target, "add_episode"):
            for episode in self:
                target.add_episode(episode)
            return buffer
        target.cut_episodes()  # the first episodes must not continue open ones
        for number, episode in enumerate(self):
            leaves = leaves_of(self.observation_space, episode.pop("obs"))
            obs, next_obs = (
                build_tree(self.observation_space, [leaf[part] for leaf in leaves])
                for part in (slice(-1), slice(1, None))
            )
            del episode["boundaries"]  # replay buffers have no boundaries
            ids = None
            if target.num_envs is not None:
                ids = np.full(len(episode["rewards"]), number % target.num_envs, np.int64)
            target.add(obs=obs, next_obs=next_obs, env_ids=ids, **episode)
            is_over = episode["terminations"][-1] or episode["truncations"][-1]
            if ids is not None and not is_over:
                target.cut_episodes(ids[:1])
        return buffer

    def _check_spaces(self, buffer: Any) -> None:
        if not any(hasattr(buffer, name) for name in ("order", "add_episode")):
            raise self._not_into(type(buffer).__name__)
        layout = row_layout(buffer)
        if layout.frames:
            raise DatasetError(
                f"{self.name} has whole stacks of frames; make the buffer without frame_stack"
            )
        extras = {leaf.path: (leaf.shape, leaf.dtype) for leaf in self._others[1:]}
        others = {name: layout.fields[name][1:3] for name in layout.extras}
        for name, own, other in (
            ("observation_space", self.observation_space, buffer.observation_space),
            ("action_space", self.action_space, buffer.action_space),
            ("extra columns", extras, others),
        ):
            if own != other:
                raise DatasetError(
                    f"{self.name} has the {name} {_shown(own)}, but the buffer {_shown(other)}; it "
                    "is the data of another env, or has to be opened with the buffer's"
                )

    def _not_into(self, kind: str) -> DatasetError:
        return DatasetError(
            f"{self.name} can't be read into a {kind}, but into SharedReplayBuffer, "
            "PerEnvReplayBuffer, PrioritizedReplayBuffer and EpisodicReplayBuffer"
        )

    def _check_room(self, buffer: Any, lengths: np.ndarray) -> None:
        held = np.asarray(getattr(buffer, "counts", [len(buffer)]))  # of each ring
        rows = _rows_by_ring(lengths, len(held))
        worst = int(np.argmax(rows + held))
        needs = [("steps", "capacity", int(rows[worst]), buffer.capacity - int(held[worst]))]
        if hasattr(buffer, "add_episode"):
            room = buffer.max_episodes - buffer.num_episodes
            needs.append(("episodes", "max_episodes", len(lengths), room))
        for what, size, needed, room in needs:
            if needed > room:
                raise DatasetError(
                    f"{self.name} has {needed} {what}, but the buffer, which has "
                    f"{getattr(buffer, size) - room}, has room for {room} more; make its {size} "
                    "larger, as to_buffer does"
                )

    def _checked(self, where: str, columns: dict[str, Any]) -> dict[str, Any]:
        """Check an episode, and convert it for `__iter__`; raise BufferMisuseError if wrong."""
        rewards = np.asarray(columns["rewards"])
        if rewards.ndim != 1 or rewards.dtype.kind not in "fiub" or not len(rewards):
            raise DatasetError(
                f"{where}: rewards has dtype {rewards.dtype} and shape {rewards.shape}, expected "
                "numbers (T,), one at least"
            )
        count = len(rewards)
        _refuse(where, "rewards", rewards, ~np.isfinite(rewards), "finite numbers")
        check_rewards(rewards)
        obs = self._observations(where, columns, count)
        found: dict[str, Any] = {"obs": build_tree(self.observation_space, obs), "rewards": rewards}
        for leaf in self._others:
            shape = (count, *leaf.shape)
            given = _as_numbers(columns[leaf.path], leaf)
            array = read_array(leaf.path, given, shape, leaf.dtype)
            found[leaf.path] = self._stored(where, leaf, array, leaf.path)
        for name in _FLAGS:
            flags = np.asarray(columns.get(name, np.zeros(count, np.bool_)))
            if flags.dtype.kind == "f" and np.isin(flags, (0.0, 1.0)).all():  # floats of files
                flags = flags.astype(np.bool_)
            found[name] = read_array(name, flags, (count,), np.dtype(np.bool_)).astype(np.bool_)
            if name != "boundaries":
                wanted = f"no end before the last of {count} steps"
                _refuse(where, name, found[name][:-1], found[name][:-1], wanted)
        return found

    def _observations(self, where: str, columns: dict[str, Any], count: int) -> list[np.ndarray]:
        """Arrays (T + 1, ...) of the leaves of obs, also from obs and next_obs (T, ...)."""

        def read(name: str, rows: int) -> list[np.ndarray]:
            arrays = read_nest(name, columns[name], self.observation_space, self._obs, rows)
            return [
                self._stored(where, leaf, array, name + leaf.path.removeprefix("obs"))
                for leaf, array in zip(self._obs, arrays, strict=True)
            ]

        if columns.get("next_obs") is None:
            return read("obs", count + 1)
        found = []
        for leaf, array, later in zip(
            self._obs, read("obs", count), read("next_obs", count), strict=True
        ):
            same = (array[1:] == later[:-1]).all(axis=tuple(range(1, array.ndim)))
            if not same.all():
                step = int(np.argmin(same))
                raise DatasetError(
                    f"{where}, step {step}: next_{leaf.path} is not {leaf.path} of step "
                    f"{step + 1}, so steps between the two are missing; end the episode there, by "
                    "truncations, if it is meant"
                )
            found.append(np.concatenate([array, later[-1:]]))
        return found

    def _stored(self, where: str, leaf: Leaf, array: np.ndarray, name: str) -> np.ndarray:
        """Convert values to the dtype of the space; raise DatasetError for values outside it."""
        with np.errstate(over="ignore"):
            stored = array.astype(leaf.dtype, copy=False)
        wrong, expected = np.zeros(stored.shape, np.bool_), "finite numbers"
        if stored.dtype.kind == "f":
            wrong = ~np.isfinite(stored)
        if self._checks_bounds and not wrong.any():
            space = self._spaces[leaf.path]
            wrong, expected = _outside(space, stored), f"values of {_shown(space)}"
            expected += ", or check_bounds=False"
        _refuse(where, name, array, wrong, expected)
        return stored


def joined(read: Callable[[Any], EpisodeDataset], sources: Iterable[Any]) -> EpisodeDataset:
    """Read each source by `read`, and return one data set of all, in order.

    Raises:
        DatasetError: There is no source, or one has other spaces than the first.
    """
    parts = [*map(read, sources)]
    if not parts:
        raise DatasetError("the list of recordings is empty, expected at least one")
    first, *others = parts
    for part in others:
        for what in ("observation_space", "action_space"):
            if (own := getattr(part, what)) != (before := getattr(first, what)):
                raise DatasetError(
                    f"{part.name} has the {what} {_shown(own)}, but {first.name} {_shown(before)}; "
                    "they are of different envs"
                )
    made = copy.copy(first)
    made.name += f" and {len(others)} more" * bool(others)
    made._read = lambda: itertools.chain.from_iterable(part._read() for part in parts)
    return made


def _as_numbers(column: Any, leaf: Leaf) -> Any:
    """Convert common forms of columns in files: (T, 1) to (T,), whole floats to integers.

    Floats that are not whole, or too large for the integers of the leaf, are kept: `read_array`
    refuses them.
    """
    array = np.asarray(column)
    if leaf.shape == () and array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.dtype.kind == "f" and leaf.dtype.kind in "iu":
        info = np.iinfo(leaf.dtype)  # max + 1 is a power of two, exact as a float; max may not be
        is_held = (array >= np.float64(info.min)) & (array < np.float64(info.max + 1))
        if (is_held & (array == np.floor(array))).all():
            return array.astype(leaf.dtype)
    return array


def _refuse(where: str, name: str, array: np.ndarray, wrong: np.ndarray, expected: str) -> None:
    """Raise DatasetError for the first wrong value (T, ...) of a column, if any."""
    if wrong.any():
        step, *place = (int(axis[0]) for axis in np.nonzero(wrong))
        shown, value = f"{name}{place if place else ''}", array[(step, *place)]
        raise DatasetError(f"{where}, step {step}: {shown} is {value}, expected {expected}")


def _shown(value: Any) -> str:
    return f"{' '.join(str(value).split()):.200}"


def _outside(space: Space, values: np.ndarray) -> np.ndarray:
    """Whether values (K, ...) are outside a space, elementwise."""
    if isinstance(space, spaces.Box):
        return (values < space.low) | (values > space.high)
    low, high = 0, 1  # MultiBinary
    if isinstance(space, spaces.Discrete):
        low, high = int(space.start), int(space.start + space.n) - 1
    elif isinstance(space, spaces.MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    return (values < low) | (values > high)


def row_layout(buffer: Any) -> RowLayout:
    """The layout of the rows of a replay buffer, or an episodic one."""
    return buffer._columns_of_rows()[0]


def leaves_of(space: Space, tree: Any) -> list[Any]:
    """Leaves of a nest, in the order of the space; `tree` may be the space itself."""
    if isinstance(space, spaces.Dict):
        return [x for key, child in space.spaces.items() for x in leaves_of(child, tree[key])]
    if isinstance(space, spaces.Tuple):
        return [x for k, child in enumerate(space.spaces) for x in leaves_of(child, tree[k])]
    return [tree]


def _rows_by_ring(lengths: np.ndarray, num_rings: int) -> np.ndarray:
    """Steps of each ring, int64 (num_rings,), if episode k goes to ring k modulo num_rings."""
    return np.bincount(np.arange(len(lengths)) % num_rings, lengths, num_rings).astype(np.int64)
