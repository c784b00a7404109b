"""Checkpoints of an episodic buffer: what is saved, and what is checked before it is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from buffers.checkpoint import check_settings, name_fields, open_checkpoint, save_checkpoint
from buffers.copies import fill_block
from buffers.episodic_layout import RowLayout
from buffers.episodic_sampling import CompiledSampler, TorchSampler
from buffers.episodic_storage import EpisodicStorage
from buffers.errors import BufferMisuseError
from buffers.open_episodes import OpenEpisodes

__all__ = ["EpisodicState"]

_KIND = "EpisodicReplayBuffer"
_VERSION = 1
_SMALL = ("lengths", "open_lengths", "open_rows", "generator")


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
        arrays = self._storage.live_lengths(), open_lengths, open_rows, self._sampler.get_state()
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

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Replace ring, tables and generator; return what is to become the open episodes."""
        missing = sorted({*_SMALL, "rows"} - set(state))
        if missing:
            raise BufferMisuseError(f"state has no {missing}; pass what state_dict() returned")
        small = {name: state[name].numpy() for name in _SMALL}
        self._check(state, small, tuple(state["rows"].shape), state["rows"].dtype)
        rows = state["rows"]
        self._storage.rows[: len(rows)].copy_(rows)
        self._commit(state, small)
        return small

    def load(self, path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
        """The same from a file."""
        with open_checkpoint(path, _KIND) as reader:
            small = {}
            for name in _SMALL:
                if name not in reader.columns:
                    raise reader.refusal(f"has no column {name!r}")
                dtype, shape = reader.columns[name]
                small[name] = np.zeros(shape, dtype)
                reader.read(name, [small[name]])
            if "rows" not in reader.columns:
                raise reader.refusal("has no column 'rows'")
            dtype, shape = reader.columns["rows"]
            self._check(reader.meta, small, shape, torch.from_numpy(np.empty(0, dtype)).dtype)
            reader.read("rows", [self._storage.rows[: shape[0]]])
            self._commit(reader.meta, small)
        return small

    def _check(
        self,
        meta: Mapping[str, Any],
        small: dict[str, np.ndarray],
        shape: tuple[int, ...],
        dtype: Any,
    ) -> None:
        """Raise BufferMisuseError unless the state fits this buffer."""
        layout = self._storage.layout
        if meta.get("state_version") != _VERSION:
            raise BufferMisuseError(
                f"state has version {meta.get('state_version')!r}, expected {_VERSION}"
            )
        fields = meta.get("fields"), describe_fields(layout.row)
        found: dict[str, Any]
        own: dict[str, Any]
        found, own = ({"field": name_fields(described)} for described in fields)
        num_envs = len(small["open_lengths"])
        if self.num_envs is not None and num_envs:  # a state without open episodes fits any number
            found["num_envs"], own["num_envs"] = num_envs, self.num_envs
        check_settings(found, own)
        check_settings(*({"layout": described} for described in fields))
        lengths = small["lengths"]
        steps = int(lengths.sum())
        if steps > layout.capacity or len(lengths) > layout.max_episodes:
            raise BufferMisuseError(
                f"state has {len(lengths)} episodes of {steps} steps, but the buffer holds "
                f"{layout.max_episodes} of {layout.capacity}; load it into a larger one"
            )
        if not _is_consistent(meta, small, shape, dtype, layout.row.num_words):
            raise BufferMisuseError("state contradicts itself; it was changed after it was made")
        if not self._sampler.accepts_state(small["generator"]):
            raise BufferMisuseError(
                "state has a generator of another device; load it into a buffer on the device it "
                "was made on"
            )

    def _commit(self, meta: Mapping[str, Any], small: dict[str, np.ndarray]) -> None:
        if not self._storage.refile(small["lengths"], int(meta["first_episode"])):
            raise BufferMisuseError(
                "state has rows that contradict its lengths; the buffer is empty now"
            )
        self._sampler.set_state(small["generator"])


def _is_consistent(
    meta: Mapping[str, Any],
    small: dict[str, np.ndarray],
    shape: tuple[int, ...],
    dtype: Any,
    width: int,
) -> bool:
    """Whether the parts of a state fit together; shape and dtype are those of its rows."""
    lengths, open_lengths, open_rows = (small[name] for name in _SMALL[:3])
    num_rows = int(lengths.sum()) + len(lengths)
    num_open_rows = int(open_lengths.sum()) + np.count_nonzero(open_lengths)
    return (
        lengths.dtype == open_lengths.dtype == open_rows.dtype == np.int64
        and lengths.ndim == open_lengths.ndim == 1
        and lengths.min(initial=1) >= 1
        and open_lengths.min(initial=0) >= 0
        and (shape, dtype) == ((num_rows, width), torch.int64)
        and open_rows.shape == (num_open_rows, width)
        and int(meta["first_episode"]) >= 0
    )


def describe_fields(layout: RowLayout) -> list[list[Any]]:
    """The fields of a row as lists that survive JSON."""
    return [
        [path, list(shape), dtype.str, offset]
        for path, shape, dtype, offset in layout.fields.values()
    ]
