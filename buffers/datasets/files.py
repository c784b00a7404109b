"""Flat columns in files, one row per step: HDF5 in D4RL's format, Parquet in LeRobot's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from buffers.datasets.dataset import DatasetError, EpisodeDataset, joined, load_library, reading
from buffers.datasets.flat import (
    BLOCK_BYTES,
    Blocks,
    FlatColumns,
    as_dataset,
    check_lengths,
    flat_blocks,
)
from vecenv.files import whole_file

__all__ = ["from_hdf5", "from_parquet", "to_hdf5", "to_parquet"]

_Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_CHUNK_BYTES = 1 << 16
_D4RL = {
    "obs": "observations", "next_obs": "next_observations", "actions": "actions",
    "rewards": "rewards", "terminations": "terminals", "truncations": "timeouts",
    "boundaries": "boundaries", "episode_index": "episode_index", "extras": "infos/",
}  # fmt: skip
_LEROBOT = {
    "obs": "observation", "next_obs": "next_observation", "actions": "action",
    "rewards": "next.reward", "terminations": "next.terminated", "truncations": "next.truncated",
    "boundaries": "boundaries", "episode_index": "episode_index", "frame_index": "frame_index",
    "extras": "",
}  # fmt: skip


def from_hdf5(
    path: _Paths,
    observation_space: Space,
    action_space: Space,
    *,
    columns: Mapping[str, str | None] | None = None,
    extra_columns: Mapping[str, Space] | None = None,
    check_bounds: bool = True,
) -> EpisodeDataset:
    """Make a data set from an HDF5 file in D4RL's format, read some MiB at a time; needs h5py.

    Names of columns and ends of episodes are those of `from_arrays`: `observations` (a group for
    Dict and Tuple spaces), `actions`, `rewards`, `terminals`, `timeouts`, `next_observations`;
    extra columns may be in `infos/`.

    Args:
        path: The file, or a list of files, read one after the other.
        observation_space: Of a single environment.
        action_space: Of a single environment.
        columns: Names in the file, as in `from_arrays`.
        extra_columns: Names and spaces of further columns.
        check_bounds: Refuse values that the spaces do not contain.

    Raises:
        ModuleNotFoundError: h5py is not installed.
        DatasetError: The file can't be read, or lacks a column.
    """
    h5py: Any = load_library("h5py")
    asked = FlatColumns(observation_space, action_space, columns, extra_columns, check_bounds)
    if not isinstance(path, str | os.PathLike):
        return joined(partial(from_hdf5, **asked._asdict()), path)
    name = os.fspath(path)
    there: dict[str, tuple[int, ...]] = {}  # number of rows, and bytes per row

    def note(key: Any, item: Any) -> None:
        if isinstance(key, str) and getattr(item, "ndim", 0):  # bytes if no text
            row_bytes = item.dtype.itemsize * int(np.prod(item.shape[1:]))
            there[key] = len(item), row_bytes

    with reading(name), h5py.File(name, "r") as file:
        file.visititems(note)
    keys = asked.find(name, there)
    wanted = {key: there[key] for part in keys.values() for key in part}
    check_lengths(name, {key: count for key, (count, _) in wanted.items()})
    count, row_bytes = next(iter(wanted.values()))[0], sum(size for _, size in wanted.values())

    def read() -> Blocks:
        rows = max(256, BLOCK_BYTES // max(row_bytes, 1))
        for begin in range(0, count, rows):
            part = slice(begin, begin + rows)
            with reading(f"{name}, rows from {begin} on,"), h5py.File(name, "r") as file:
                block = {key: np.asarray(file[key][part]) for key in wanted}
            yield name, block

    return asked.dataset(name, read, keys)


def to_hdf5(source: Any, path: str | os.PathLike[str]) -> Path:
    """Write a buffer, or a data set, into a new HDF5 file in D4RL's format; needs h5py.

    Besides D4RL's columns, the file has `next_observations`, `episode_index`, `boundaries`, and
    extra columns under `infos/`. So `from_hdf5` returns the same episodes, bit for bit, with one
    exception: if an episode ends without a flag, such as an unfinished one, its last step gets
    `timeouts`. The file gets its name when it is complete.

    Args:
        source: A buffer, as for `from_buffer`, or an `EpisodeDataset`.
        path: The new file.

    Raises:
        ModuleNotFoundError: h5py is not installed.
        FileExistsError: The path exists.
        DatasetError: The source does not fit; nothing is written.
    """
    h5py: Any = load_library("h5py")
    target, dataset = _new_file(path), as_dataset(source)
    with whole_file(target) as aside, h5py.File(aside, "w") as file:
        for block in flat_blocks(dataset, _D4RL, "/"):
            for key, array in block.items():
                if key in file:
                    file[key].resize(len(file[key]) + len(array), axis=0)
                    file[key][-len(array) :] = array
                    continue
                shape = array.shape[1:]
                row_bytes = max(1, array.dtype.itemsize * int(np.prod(shape)))
                chunks = (max(1, _CHUNK_BYTES // row_bytes), *shape)
                file.create_dataset(key, data=array, maxshape=(None, *shape), chunks=chunks)
    return target


def _new_file(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"{target} can't be written: there is no folder {target.parent}")
    if target.exists():
        raise FileExistsError(f"{target} is there already; choose another name")
    return target


def from_parquet(
    path: _Paths,
    observation_space: Space,
    action_space: Space,
    *,
    columns: Mapping[str, str | None] | None = None,
    extra_columns: Mapping[str, Space] | None = None,
    check_bounds: bool = True,
) -> EpisodeDataset:
    """Make a data set from Parquet files in LeRobot's format, some MiB at a time; needs pyarrow.

    Columns: `observation.state`, or `observation.KEY` for a Dict space; `action`, `next.reward`,
    `episode_index`, `frame_index`. They hold numbers, or lists of fixed length, also nested; images
    in videos are not read. For data without rewards pass columns={"rewards": None}.

    Flags are read from `next.terminated` and `next.truncated`, next observations from
    `next_observation` or `next_observation.KEY`, which `to_parquet` writes. LeRobot's own files
    have neither. So their episodes are cut, unless columns={"terminations": ...} names a column,
    and the last frame of an episode has no next observation; see `from_arrays`.

    Args:
        path: A file; or a folder, with all files below it in the order of their names. If the
            folder has `meta/info.json`, the files below `data`, and their number of frames must be
            that of `info.json`. Or a list of these, read one after the other.
        observation_space: Of a single environment.
        action_space: Of a single environment.
        columns: Names in the files, as in `from_arrays`.
        extra_columns: Names and spaces of further columns.
        check_bounds: Refuse values that the spaces do not contain.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
        DatasetError: A file can't be read, lacks a column, or frames are missing.
    """
    parquet: Any = load_library("pyarrow.parquet")
    asked = FlatColumns(observation_space, action_space, columns, extra_columns, check_bounds)
    if not isinstance(path, str | os.PathLike):
        return joined(partial(from_parquet, **asked._asdict()), path)
    root, info = Path(path), Path(path, "meta", "info.json")
    folder = root / "data" if info.is_file() else root
    found = folder.rglob("*.parquet") if root.is_dir() else [root]
    files = sorted(file for file in found if not file.name.startswith("."))  # incomplete ones
    if not files:
        raise DatasetError(f"{folder} has no .parquet file")
    keys, num_rows = {}, 0
    for file in files:
        with reading(str(file)), parquet.ParquetFile(file) as opened:
            num_rows += opened.metadata.num_rows
            there = opened.schema_arrow.names
        found = asked.find(str(file), there)
        if keys and found != keys:
            raise DatasetError(f"{file} has other columns than {files[0]}: {sorted(there)}")
        keys = found
    if info.is_file():
        with reading(str(info)):
            told = json.loads(info.read_text(encoding="utf-8")).get("total_frames")
        if told not in (None, num_rows):
            raise DatasetError(
                f"{root}: meta/info.json tells {told} frames, but the files have {num_rows}; files "
                "are missing, or were cut"
            )

    def read() -> Blocks:
        for file in files:
            with reading(str(file)):
                opened = parquet.ParquetFile(file)
                groups = map(opened.metadata.row_group, range(opened.num_row_groups))
                size = max(1, sum(group.total_byte_size for group in groups))
                rows = BLOCK_BYTES * opened.metadata.num_rows // size
            with opened:
                yield from _blocks(file, opened, min(max(256, rows), BLOCK_BYTES), keys)

    return asked.dataset(os.fspath(path), read, keys)


def _blocks(file: Path, opened: Any, rows: int, keys: Mapping[str, list[str]]) -> Blocks:
    wanted = list(dict.fromkeys(key for part in keys.values() for key in part))
    batches, begin = opened.iter_batches(batch_size=rows, columns=wanted), 0
    while True:
        with reading(f"{file}, rows from {begin} on,"):
            if (batch := next(batches, None)) is None:
                return
            arrays = {key: _array(file, key, batch, begin) for key in wanted}
        begin += batch.num_rows
        yield str(file), arrays


def _array(file: Path, key: str, batch: Any, begin: int) -> np.ndarray:
    """Convert a column to an array (K, ...); each level of lists is one more axis."""
    column, shape = batch.column(key), [batch.num_rows]

    def refuse(is_wrong: np.ndarray, what: str) -> None:
        if is_wrong.any():
            row = begin + int(np.argmax(is_wrong)) * batch.num_rows // len(is_wrong)
            raise DatasetError(f"{file}, row {row}: {key} {what}")

    while hasattr(column.type, "value_type") and not column.null_count:
        lengths = np.asarray(column.value_lengths().to_numpy(zero_copy_only=False), np.int64)
        shape.append(int(lengths[0]) if len(lengths) else 0)
        refuse(lengths != shape[-1], f"has not {shape[-1]} numbers as the rows before")
        column = column.flatten()
    refuse(column.is_null().to_numpy(zero_copy_only=False), "is missing (null)")
    array = column.to_numpy(zero_copy_only=False)
    if array.dtype.kind not in "biuf":
        raise DatasetError(f"{file}: {key} is of type {batch.column(key).type}, expected numbers")
    return array.reshape(shape)


def to_parquet(source: Any, path: str | os.PathLike[str]) -> Path:
    """Write a buffer, or a data set, into a new Parquet file with LeRobot's names; needs pyarrow.

    Columns: `observation.state`, or `observation.KEY` for nested spaces; `next_observation` or
    `next_observation.KEY`, `action`, `next.reward`, `next.terminated`, `next.truncated`,
    `boundaries`, `episode_index`, `frame_index`, and extra columns by their names. Arrays are lists
    of fixed lengths. So `from_parquet` returns the same episodes, bit for bit, with one exception:
    if an episode ends without a flag, its last step gets `next.truncated`. The file gets its name
    when it is complete.

    Args:
        source: A buffer, as for `from_buffer`, or an `EpisodeDataset`.
        path: The new file.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
        FileExistsError: The path exists.
        DatasetError: The source does not fit; nothing is written.
    """
    arrow, parquet = load_library("pyarrow"), load_library("pyarrow.parquet")
    target, dataset, writer = _new_file(path), as_dataset(source), None
    is_nested = isinstance(dataset.observation_space, spaces.Dict | spaces.Tuple)
    names = _LEROBOT if is_nested else {**_LEROBOT, "obs": "observation.state"}
    with whole_file(target) as aside:
        try:
            for block in flat_blocks(dataset, names, "."):
                table = arrow.table({key: _lists(arrow, array) for key, array in block.items()})
                writer = writer or parquet.ParquetWriter(aside, table.schema)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()
    return target


def _lists(arrow: Any, array: np.ndarray) -> Any:
    """Convert an array (K, ...) to Arrow; axes after the first become lists of fixed length."""
    column = arrow.array(np.ascontiguousarray(array).reshape(-1))
    for length in reversed(array.shape[1:]):
        column = arrow.FixedSizeListArray.from_arrays(column, length)
    return column
