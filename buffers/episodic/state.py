"""Checkpoints of an episodic buffer: what is saved, and what is checked before it is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from buffers.core.checkpoint import (
    CheckpointReader,
    FieldWatcher,
    Watcher,
    check_settings,
    name_fields,
    open_checkpoint,
    save_checkpoint,
    state_array,
)
from buffers.core.checkpoint_kernels import first_wrong_header
from buffers.core.copies import fill_block
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import other_generator
from buffers.episodic.layout import RowLayout
from buffers.episodic.open_episodes import OpenEpisodes
from buffers.episodic.samplers import CompiledSampler, TorchSampler
from buffers.episodic.storage import EpisodicStorage

__all__ = ["EpisodicState"]

_KIND = "EpisodicReplayBuffer"
_VERSION = 1
_SMALL = ("lengths", "open_lengths", "open_rows", "generator")
_HEADER = ("room", "step", "remaining", "bound")
_MOST_ADDED = 2**62  # episodes ever added; what is added later has to be counted, too


class EpisodicState:
    """Saves and loads the parts of an episodic buffer.

    Args:
        storage: Ring and tables.
        sampler: Holds the generator.
        num_envs: What the constructor of the buffer was given; states with open episodes of
            another number of environments are refused. None takes any.
    """

    def __init__(
        self,
        storage: EpisodicStorage,
        sampler: CompiledSampler | TorchSampler,
        num_envs: int | None,
    ):
        self._storage, self._sampler, self.num_envs = storage, sampler, num_envs

    def _meta(self) -> dict[str, Any]:
        return {
            "state_version": _VERSION,
            "fields": describe_fields(self._storage.layout.row),
            "first_episode": self._storage.count("first_episode"),
        }

    def _small_columns(self, opened: OpenEpisodes | None) -> dict[str, np.ndarray]:
        width = self._storage.layout.row.num_words
        open_lengths, open_rows = np.zeros(0, np.int64), np.zeros((0, width), np.int64)
        if opened is not None:
            open_lengths, open_rows = opened.snapshot()
        arrays = (
            self._storage.live_lengths(),
            open_lengths,
            open_rows,
            self._sampler.generator.get_state(),
        )
        return dict(zip(_SMALL, arrays, strict=True))

    def state_dict(self, opened: OpenEpisodes | None) -> dict[str, Any]:
        """Everything, as copies: tensors, ints, strings and lists of them."""
        small = self._small_columns(opened)
        tensors = {name: torch.from_numpy(array) for name, array in small.items()}
        return {**self._meta(), **tensors, "rows": torch.cat(self._storage.live_rows())}

    def save(self, path: str | os.PathLike[str], opened: OpenEpisodes | None) -> None:
        """Write everything into a file."""
        columns: dict[str, Any] = {
            name: [array] for name, array in self._small_columns(opened).items()
        }
        columns["rows"] = self._storage.live_rows()
        save_checkpoint(path, _KIND, self._meta(), columns)

    def copied_state(self, opened: OpenEpisodes | None) -> dict[str, Any]:
        """Everything, the rows as views of the blocks they lie in."""
        blocks = [block.cpu().numpy() for block in self._storage.live_rows()]
        return {**self._meta(), **self._small_columns(opened), "rows": blocks}

    def take_copied_state(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Replace all by what a buffer made with the same arguments held; as `load_state_dict`."""
        small = {name: np.array(state[name]) for name in _SMALL}
        begin = 0
        for pages in state["rows"]:
            fill_block(self._storage.rows[begin : begin + len(pages)], pages)
            begin += len(pages)
        self._commit(state, small)
        return small

    def load_state_dict(
        self, state: Mapping[str, Any], make_open: Callable[[int], OpenEpisodes | None]
    ) -> tuple[OpenEpisodes | None, dict[str, np.ndarray]]:
        """Replace ring, tables and generator.

        Args:
            state: What `state_dict` returned.
            make_open: Makes what is to hold the open episodes, for their number of envs.

        Returns:
            What `make_open` made, and what it is to be restored from.
        """
        wanted = self._wanted()
        missing = sorted(set(wanted) - set(state))
        if missing:
            raise BufferMisuseError(f"state has no {missing}; pass what state_dict() returned")
        arrays = {name: state_array(name, state[name], *like) for name, like in wanted.items()}
        rows = arrays.pop("rows")
        small = {name: array.copy() for name, array in arrays.items()}
        watchers = self._watchers(len(rows))
        for name, watcher in watchers.items():
            pages = rows if name == "rows" else small[name]
            watcher(pages.view(np.uint8))
        self._check(state, small, len(rows), watchers)
        opened = make_open(len(small["open_lengths"]))
        fill_block(self._storage.rows[: len(rows)], rows)
        self._commit(state, small)
        return opened, small

    def load(
        self, path: str | os.PathLike[str], make_open: Callable[[int], OpenEpisodes | None]
    ) -> tuple[OpenEpisodes | None, dict[str, np.ndarray]]:
        """The same from a file."""
        watchers: dict[str, FieldWatcher] = {}

        def prepare(reader: CheckpointReader) -> Mapping[str, Watcher]:
            self._check_made(reader.meta)
            reader.require_generator(self._sampler.generator.get_state())
            reader.require(self._wanted())
            (num_rows, _), layout = reader.columns["rows"][1], self._storage.layout
            (num_episodes,) = reader.columns["lengths"][1]
            if num_episodes > layout.max_episodes or num_rows - num_episodes > layout.capacity:
                self._refuse_size(num_episodes, num_rows - num_episodes)
            watchers.update(self._watchers(num_rows))
            return watchers

        with open_checkpoint(path, _KIND, prepare) as reader:
            small = {name: reader.array(name) for name in _SMALL}
            _, (num_rows, _) = reader.columns["rows"]
            self._check(reader.meta, small, num_rows, watchers)
            opened = make_open(len(small["open_lengths"]))
            try:
                reader.read("rows", [self._storage.rows[:num_rows]])
            except BaseException:
                self._storage.clear()
                raise
            self._commit(reader.meta, small)
        return opened, small

    def _wanted(self) -> dict[str, tuple[np.dtype, tuple[int | None, ...]]]:
        """Dtype and shape of all arrays of a state."""
        width, generator = self._storage.layout.row.num_words, self._sampler.generator.get_state()
        int64 = np.dtype(np.int64)
        return {
            "lengths": (int64, (None,)),
            "open_lengths": (int64, (None,)),
            "open_rows": (int64, (None, width)),
            "generator": (generator.dtype, generator.shape),
            "rows": (int64, (None, width)),
        }

    def _watchers(self, num_rows: int) -> dict[str, FieldWatcher]:
        """What looks at the bytes of steps."""
        fields = self._storage.layout.row.fields
        truths = [(f.offset, f.nbytes) for f in fields.values() if f.dtype == np.bool_]
        kept = {name: fields[name].offset for name in _HEADER}
        boundaries = {"boundaries": fields["boundaries"].offset}
        return {
            "rows": FieldWatcher(num_rows, kept, truths, boundaries),
            "open_rows": FieldWatcher(0, {}, truths),
        }

    def _check_made(self, meta: Mapping[str, Any]) -> None:
        """Raise BufferMisuseError unless the state is of a buffer with rows like these."""
        version = meta.get("state_version")
        if type(version) is not int or version != _VERSION:
            raise BufferMisuseError(f"state has version {version!r:.99}, expected {_VERSION}")
        fields = meta.get("fields"), describe_fields(self._storage.layout.row)
        found, own = ({"field": name_fields(described)} for described in fields)
        check_settings(found, own)
        check_settings(*({"layout": described} for described in fields))
        first = meta.get("first_episode")
        if type(first) is not int or not 0 <= first <= _MOST_ADDED:
            raise _contradiction(f"its first episode is {first!r:.99}")

    def _refuse_size(self, num_episodes: int, num_steps: int) -> None:
        layout = self._storage.layout
        raise BufferMisuseError(
            f"state has {num_episodes} episodes of {num_steps} steps, but the buffer holds "
            f"{layout.max_episodes} of {layout.capacity}; load it into a larger one"
        )

    def _check(
        self,
        meta: Mapping[str, Any],
        small: dict[str, np.ndarray],
        num_rows: int,
        watchers: Mapping[str, FieldWatcher],
    ) -> None:
        """Raise BufferMisuseError unless the state fits this buffer, and its parts one another.

        Args:
            meta: What is in it besides arrays.
            small: Its arrays but the rows, of the dtypes of `_wanted`.
            num_rows: Of its rows.
            watchers: They have seen all rows.
        """
        self._check_made(meta)
        layout = self._storage.layout
        num_envs = len(small["open_lengths"])
        if self.num_envs is not None and num_envs:  # a state without open episodes fits any number
            check_settings({"num_envs": num_envs}, {"num_envs": self.num_envs})
        lengths, open_lengths = small["lengths"], small["open_lengths"]
        if lengths.min(initial=1) < 1 or open_lengths.min(initial=0) < 0:
            raise _contradiction("it has episodes without steps")
        longest = int(lengths.max(initial=1))  # no sum overflows up to the capacity
        steps = longest if longest > layout.capacity else int(lengths.sum())
        if steps > layout.capacity or len(lengths) > layout.max_episodes:
            self._refuse_size(len(lengths), steps)
        if num_rows != steps + len(lengths):
            raise _contradiction(f"it has {num_rows} rows for {len(lengths)} episodes of {steps}")
        if open_lengths.max(initial=0) >= layout.capacity:  # would have been stored
            raise _contradiction("it has open episodes as long as the buffer")
        num_open_rows = int(open_lengths.sum()) + np.count_nonzero(open_lengths)
        if len(small["open_rows"]) != num_open_rows:
            raise _contradiction(f"it has {len(small['open_rows'])} rows of open episodes")
        for name, watcher in watchers.items():
            if watcher.num_wrong:
                raise _contradiction(f"{watcher.num_wrong} bytes of bools in {name} are no bools")
        kept = watchers["rows"].kept
        headers = np.stack([kept[name] for name in _HEADER], 1)
        boundaries = kept["boundaries"]
        row = first_wrong_header(lengths, boundaries, headers, np.zeros(num_rows, np.int32))
        if row >= 0:
            raise _contradiction(f"row {row} says wrongly where in its episode it is")
        if not self._sampler.generator.accepts_state(small["generator"]):
            raise other_generator()

    def _commit(self, meta: Mapping[str, Any], small: dict[str, np.ndarray]) -> None:
        if not self._storage.refile(small["lengths"], int(meta["first_episode"])):
            raise BufferMisuseError(
                "state has rows that contradict its lengths; the buffer is empty now"
            )
        self._sampler.generator.set_state(small["generator"])


def _contradiction(reason: str) -> BufferMisuseError:
    return BufferMisuseError(
        f"state contradicts itself; it was changed after it was made: {reason}"
    )


def describe_fields(layout: RowLayout) -> list[list[Any]]:
    """The fields of a row as lists that survive JSON."""
    return [
        [path, list(shape), dtype.str, offset]
        for path, shape, dtype, offset in layout.fields.values()
    ]
