"""Minari data sets: reading episode by episode, and writing from buffers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import Env, Space

from buffers.datasets.dataset import (
    DatasetError,
    EpisodeDataset,
    RawEpisode,
    joined,
    load_library,
    reading,
)
from buffers.datasets.flat import as_dataset

__all__ = ["from_minari", "to_minari"]


def from_minari(
    dataset: Any,
    *,
    observation_space: Space | None = None,
    action_space: Space | None = None,
    extra_columns: Mapping[str, Space] | None = None,
    check_bounds: bool = True,
) -> EpisodeDataset:
    """Make a data set from a local Minari data set, one episode in memory at a time; needs minari.

    Buffers store rewards as float32. Infos named like an extra column, or `boundaries`, are read;
    of T + 1 infos the last T. Other infos, resets and metadata are not read.

    Args:
        dataset: An id, or a `minari.MinariDataset`, which may be filtered; or a list of these, of
            the same env, read one after the other.
        observation_space: Of a single environment; None takes that of the data set.
        action_space: Of a single environment; None takes that of the data set.
        extra_columns: Names and spaces of infos to read.
        check_bounds: Refuse values that the spaces do not contain.

    Raises:
        ModuleNotFoundError: minari is not installed, or h5py, which its default format needs.
        DatasetError: There is no such data set, or it can't be read.
    """
    minari = load_library("minari")
    if isinstance(dataset, list | tuple):
        given: Any = {"observation_space": observation_space, "action_space": action_space}
        given |= {"extra_columns": extra_columns, "check_bounds": check_bounds}
        return joined(partial(from_minari, **given), dataset)
    name = dataset if isinstance(dataset, str) else "a Minari data set"
    with reading(name):
        opened = minari.load_dataset(dataset) if isinstance(dataset, str) else dataset
        name = opened.spec.dataset_id or name
        single = (
            opened.observation_space if observation_space is None else observation_space,
            opened.action_space if action_space is None else action_space,
        )

    def read() -> Iterator[RawEpisode]:
        wanted = opened.episode_indices
        found = opened.iterate_episodes(wanted)
        for number in wanted.tolist():
            where = f"{name}, episode {number}"
            with reading(where):
                episode = next(found, None)
            if episode is None:
                raise DatasetError(f"{where} is missing")
            yield RawEpisode(where, _columns(where, episode, extra_columns or {}))

    return EpisodeDataset(
        name, read, *single, extra_columns=extra_columns, check_bounds=check_bounds
    )


def _columns(where: str, episode: Any, extras: Mapping[str, Space]) -> dict[str, Any]:
    names = ("actions", "rewards", "terminations", "truncations")
    found = {"obs": episode.observations, **{name: getattr(episode, name) for name in names}}
    infos, count = episode.infos or {}, len(episode.rewards)
    marks = infos.get("boundaries")
    if isinstance(marks, np.ndarray) and marks.dtype == np.bool_ and marks.size == count + 1:
        found["boundaries"] = marks.reshape(-1)[1:]
    for name, space in extras.items():
        column = infos.get(name)
        if not isinstance(column, np.ndarray) or column.ndim == 0:
            raise DatasetError(
                f"{where}: the info {name!r} is missing; there is {sorted(map(str, infos))}"
            )
        if not space.shape and column.shape[1:] == (1,):  # `to_minari` writes this shape for arrow
            column = column[:, 0]
        found[name] = column[1:] if len(column) == count + 1 else column
    return found


def to_minari(source: Any, dataset_id: str, *, env: Any = None, **options: Any) -> Any:
    """Write a buffer, or a data set, as a new local Minari data set; needs minari.

    It writes observations (one more than steps), actions, rewards and both flags. Boundaries and
    extra columns become infos; the info of the reset is zero. Images are written unchanged. One
    episode is in memory at a time. If writing fails, the new data set is removed.

    Args:
        source: A buffer, as for `from_buffer`, or an `EpisodeDataset`.
        dataset_id: Minari's id, such as "cage/b_line/trained-v0"; must be new.
        env: The env of the episodes, so that Minari can make it again: an id without "module:", a
            spec or an env. None stores the spaces only.
        **options: Further arguments of `minari.create_dataset_from_buffers`, such as
            `algorithm_name`, `author`, `description` and `data_format`.

    Returns:
        The `minari.MinariDataset`.

    Raises:
        ModuleNotFoundError: minari is not installed, or h5py, which its default format needs.
        DatasetError: There is no episode, one is wrong, or `env` has other spaces.
        ValueError: The id exists or is malformed (Minari's).
    """
    minari = load_library("minari")
    kind = load_library("minari.data_collector.episode_buffer").EpisodeBuffer
    local = load_library("minari.storage.datasets_root_dir")
    dataset = as_dataset(source)
    if env is not None:
        made = env if isinstance(env, Env) else gym.make(env)
        spaces = made.observation_space, made.action_space
        if made is not env:
            made.close()
        if spaces != (own := (dataset.observation_space, dataset.action_space)):
            raise DatasetError(f"env={env!r} has the spaces {spaces}, the data {own}: another env")
    _ = dataset.episode_lengths  # checks all
    folder = Path(local.get_dataset_path(dataset_id))
    was_there = folder.exists()
    # Minari 0.5 can't read infos that are one number per step if they were written as arrow.
    axes = 2 if options.get("data_format") == "arrow" else 1
    exported = (
        kind(id=number, **_exported(episode, axes)) for number, episode in enumerate(dataset)
    )
    options = {
        "jpeg_encoding": False, **options, "env": env, "action_space": dataset.action_space,
        "observation_space": dataset.observation_space,
    }  # fmt: skip
    try:
        return minari.create_dataset_from_buffers(dataset_id, exported, **options)
    except BaseException:
        if not was_there:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _exported(episode: dict[str, Any], axes: int) -> dict[str, Any]:
    """Convert an episode of T steps to Minari's fields; infos get T + 1 rows and `axes` axes."""
    fields, infos = dict(episode), {}
    names = ("rewards", "terminations", "truncations", "actions")
    steps = {name: fields.pop(name) for name in names}
    observations = fields.pop("obs")
    for name, column in fields.items():
        padded = np.concatenate([np.zeros_like(column[:1]), column])
        infos[name] = padded.reshape(*padded.shape, *[1] * (axes - padded.ndim))
    return {"observations": observations, "infos": infos, **steps}
