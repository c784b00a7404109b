"""HDF5 files as D4RL has them: one array for each column, all steps behind one another."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space

from buffers.datasets.arrays import BLOCK_BYTES, Block, FlatColumns, check_lengths
from buffers.datasets.dataset import EpisodeDataset, load_library, reading
from buffers.datasets.held import as_dataset, flat_blocks
from vecenv.files import whole_file

__all__ = ["from_hdf5", "to_hdf5"]

_CHUNK_BYTES = 1 << 16
_NAMES = {
    "obs": "observations",
    "next_obs": "next_observations",
    "actions": "actions",
    "rewards": "rewards",
    "terminations": "terminals",
    "truncations": "timeouts",
    "boundaries": "boundaries",
    "episode_index": "episode_index",
    "extras": "infos/",
}


def from_hdf5(
    path: str | os.PathLike[str],
    observation_space: Space,
    action_space: Space,
    *,
    columns: Mapping[str, str | None] | None = None,
    extra_columns: Mapping[str, Space] | None = None,
    check_bounds: bool = True,
) -> EpisodeDataset:
    """Episodes in an HDF5 file like D4RL's, read some MiB at a time; needs h5py.

    Names of columns, and where episodes end, are those of `from_arrays`: `observations` (a group
    for Dict and Tuple spaces), `actions`, `rewards`, `terminals`, `timeouts`,
    `next_observations`; extra columns also from `infos/`.

    Args:
        path: The file.
        observation_space: Of a single environment.
        action_space: Of a single environment.
        columns: Other names, as in `from_arrays`.
        extra_columns: Names and spaces of further columns.
        check_bounds: Refuse values that the spaces do not contain.

    Raises:
        ModuleNotFoundError: h5py is not installed.
        DatasetError: The file can't be read, or lacks a column.
    """
    h5py: Any = load_library("h5py")
    asked = FlatColumns(observation_space, action_space, columns, extra_columns, check_bounds)
    name = os.fspath(path)
    there: dict[str, Any] = {}  # rows and bytes of each
    with reading(name), h5py.File(name, "r") as file:
        file.visititems(lambda key, item: there.update({key: _size(item)}))
    # Names that are no text come as bytes.
    there = {k: size for k, size in there.items() if size is not None and isinstance(k, str)}
    wanted = asked.find(name, there)
    check_lengths(name, {key: there[key][0] for key in wanted.all()})
    row_bytes = sum(there[key][1] for key in wanted.all())
    count = there[wanted.all()[0]][0]

    def read() -> Iterator[Block]:
        rows = max(256, BLOCK_BYTES // max(row_bytes, 1))
        for begin in range(0, count, rows):
            part = slice(begin, begin + rows)
            with reading(f"{name}, rows from {begin} on,"), h5py.File(name, "r") as file:
                block = {key: np.asarray(file[key][part]) for key in wanted.all()}
            check_lengths(name, {key: len(array) for key, array in block.items()})
            yield Block(name, block)

    return asked.dataset(name, read, wanted)


def _size(item: Any) -> tuple[int, int] | None:
    """Rows of a column, and bytes of each; None for what is none."""
    if not hasattr(item, "dtype") or not item.ndim:
        return None
    return len(item), item.dtype.itemsize * int(np.prod(item.shape[1:]))


def to_hdf5(source: Any, path: str | os.PathLike[str]) -> Path:
    """Write a buffer, or a data set, into a new HDF5 file like D4RL's; needs h5py.

    It has `next_observations` and, besides D4RL's columns, `episode_index` and `boundaries`, and
    extra columns under `infos/`; so `from_hdf5` gives back the same episodes, bit for bit. Some MiB
    are in memory at a time. The file appears under its name when it is whole.

    Args:
        source: A buffer, as `from_buffer` takes it, or an `EpisodeDataset`.
        path: Of the file.

    Raises:
        ModuleNotFoundError: h5py is not installed.
        FileExistsError: There is something of this name.
        DatasetError: The source does not fit; nothing is written.
    """
    h5py: Any = load_library("h5py")
    target, dataset = Path(path), as_dataset(source)
    if target.exists():
        raise FileExistsError(f"{target} is there already; choose another name")
    with whole_file(target) as aside, h5py.File(aside, "w") as file:
        for block in flat_blocks(dataset, _NAMES, "/"):
            for key, array in block.items():
                _append(file, key, array)
    return target


def _append(file: Any, key: str, array: np.ndarray) -> None:
    if key not in file:
        row = array.dtype.itemsize * max(1, int(np.prod(array.shape[1:])))
        chunks = (max(1, _CHUNK_BYTES // row), *array.shape[1:])
        file.create_dataset(key, data=array, maxshape=(None, *array.shape[1:]), chunks=chunks)
        return
    column = file[key]
    column.resize(len(column) + len(array), axis=0)
    column[len(column) - len(array) :] = array
