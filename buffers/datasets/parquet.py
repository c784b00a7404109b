"""Parquet files as LeRobot has them: a row for each frame, in one file or in several."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from buffers.datasets.arrays import BLOCK_BYTES, Block, FlatColumns, Wanted
from buffers.datasets.dataset import DatasetError, EpisodeDataset, load_library, reading
from buffers.datasets.held import as_dataset, flat_blocks
from vecenv.files import whole_file

__all__ = ["from_parquet", "to_parquet"]

_NAMES = {
    "obs": "observation",
    "next_obs": "next_observation",
    "actions": "action",
    "rewards": "next.reward",
    "terminations": "next.terminated",
    "truncations": "next.truncated",
    "boundaries": "boundaries",
    "episode_index": "episode_index",
    "frame_index": "frame_index",
    "extras": "",
}


def from_parquet(
    path: str | os.PathLike[str],
    observation_space: Space,
    action_space: Space,
    *,
    columns: Mapping[str, str | None] | None = None,
    extra_columns: Mapping[str, Space] | None = None,
    check_bounds: bool = True,
) -> EpisodeDataset:
    """Episodes in Parquet files like LeRobot's, read some MiB at a time; needs pyarrow.

    Columns: `observation.state`, or `observation.KEY` for a Dict space; `action`, `next.reward`,
    `episode_index`, `frame_index`. Numbers, and lists of a fixed number of them, also nested;
    pictures in videos are not read. A data set without rewards is read by
    columns={"rewards": None}. Whether the end of an episode is a termination no column of
    LeRobot's says, so all are cut, unless columns={"terminations": ...} names one. The last frame
    of an episode has no next observation; see `from_arrays`.

    Args:
        path: A file, or a folder with all files below it, in the order of their names; of a folder
            with `meta/info.json` those below `data`, and the number of frames is compared with
            what it says.
        observation_space: Of a single environment.
        action_space: Of a single environment.
        columns: Other names, as in `from_arrays`.
        extra_columns: Names and spaces of further columns.
        check_bounds: Refuse values that the spaces do not contain.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
        DatasetError: A file can't be read, lacks a column, or frames are missing.
    """
    parquet = load_library("pyarrow.parquet")
    asked = FlatColumns(observation_space, action_space, columns, extra_columns, check_bounds)
    files = _files(Path(path))
    wanted, num_rows = None, 0
    for file in files:
        with reading(str(file)), parquet.ParquetFile(file) as opened:
            num_rows += opened.metadata.num_rows
            there = opened.schema_arrow.names
        found = asked.find(str(file), there)
        if wanted is not None and found != wanted:
            raise DatasetError(f"{file} has other columns than {files[0]}: {sorted(there)}")
        wanted = found
    assert wanted is not None
    _check_info(Path(path), num_rows)

    def read() -> Iterator[Block]:
        for file in files:
            yield from _blocks(parquet, file, wanted)

    return asked.dataset(os.fspath(path), read, wanted)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        root = path / "data" if (path / "meta" / "info.json").is_file() else path
        if not (found := sorted(root.rglob("*.parquet"))):
            raise DatasetError(f"{root} has no .parquet file")
        return found
    if not path.exists():
        raise DatasetError(f"{path} can't be read: there is no such file")
    return [path]


def _check_info(path: Path, num_rows: int) -> None:
    """Raise DatasetError if the files have not as many frames as LeRobot's notes say."""
    file = path / "meta" / "info.json"
    if not file.is_file():
        return
    with reading(str(file)):
        told = json.loads(file.read_text(encoding="utf-8"))["total_frames"]
    if told != num_rows:
        raise DatasetError(
            f"{path}: meta/info.json tells {told} frames, but the files have {num_rows}; files are "
            "missing, or were cut"
        )


def _blocks(parquet: Any, file: Path, wanted: Wanted) -> Iterator[Block]:
    with reading(str(file)):
        opened = parquet.ParquetFile(file)
    with opened:
        with reading(str(file)):
            groups = map(opened.metadata.row_group, range(opened.num_row_groups))
            size = sum(group.total_byte_size for group in groups)
        rows = BLOCK_BYTES * opened.metadata.num_rows // max(size, 1)
        rows = min(max(256, rows), BLOCK_BYTES)
        batches = opened.iter_batches(batch_size=rows, columns=wanted.all())
        begin = 0
        while True:
            with reading(f"{file}, rows from {begin} on,"):
                if (batch := next(batches, None)) is None:
                    return
                arrays = {key: _array(file, key, batch, begin) for key in wanted.all()}
            begin += batch.num_rows
            yield Block(str(file), arrays)


def _array(file: Path, key: str, batch: Any, begin: int) -> np.ndarray:
    """A column as an array (K, ...); lists of lists have as many axes more."""
    column, shape = batch.column(key), [batch.num_rows]
    while hasattr(column.type, "value_type") and not column.null_count:
        lengths = column.value_lengths().to_numpy(zero_copy_only=False) if len(column) else []
        length = int(lengths[0]) if len(lengths) else 0
        if not (np.asarray(lengths) == length).all():
            wrong = int(np.flatnonzero(np.asarray(lengths) != length)[0])
            row = wrong * batch.num_rows // len(lengths)
            raise DatasetError(
                f"{file}, {_place(batch, row, begin)}: {key} has {lengths[wrong]} numbers, but "
                f"{length} before; expected as many in each row"
            )
        shape.append(length)
        column = column.flatten()
    if column.null_count:
        missing = column.is_null().to_numpy(zero_copy_only=False)
        row = int(np.argmax(missing)) * batch.num_rows // len(missing)
        raise DatasetError(f"{file}, {_place(batch, row, begin)}: {key} is missing (null)")
    array = column.to_numpy(zero_copy_only=False)
    if array.dtype.kind not in "biuf":
        raise DatasetError(f"{file}: {key} is of type {batch.column(key).type}, expected numbers")
    return array.reshape(shape)


def _place(batch: Any, row: int, begin: int) -> str:
    """What messages call a row of a batch."""
    names = batch.schema.names
    if {"episode_index", "frame_index"} <= set(names):
        numbers = [batch.column(key)[row].as_py() for key in ("episode_index", "frame_index")]
        return f"episode {numbers[0]}, step {numbers[1]}"
    return f"row {begin + row}"


def to_parquet(source: Any, path: str | os.PathLike[str]) -> Path:
    """Write a buffer, or a data set, into a new Parquet file with LeRobot's names; needs pyarrow.

    Columns: `observation.state`, or `observation.KEY` for nested spaces; `next_observation` in the
    same way, `action`, `next.reward`, `next.terminated`, `next.truncated`, `boundaries`,
    `episode_index`, `frame_index`, and extra columns by their names; arrays are lists of fixed
    lengths. So `from_parquet` gives back the same episodes, bit for bit. Some MiB are in memory at
    a time. The file appears under its name when it is whole.

    Args:
        source: A buffer, as `from_buffer` takes it, or an `EpisodeDataset`.
        path: Of the file.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
        FileExistsError: There is something of this name.
        DatasetError: The source does not fit; nothing is written.
    """
    arrow, parquet = load_library("pyarrow"), load_library("pyarrow.parquet")
    target, dataset = Path(path), as_dataset(source)
    if target.exists():
        raise FileExistsError(f"{target} is there already; choose another name")
    names = {**_NAMES}
    if not isinstance(dataset.observation_space, spaces.Dict | spaces.Tuple):
        names["obs"] = "observation.state"
    with whole_file(target) as aside:
        writer = None
        try:
            for block in flat_blocks(dataset, names, "."):
                table = arrow.table({key: _lists(arrow, array) for key, array in block.items()})
                if writer is None:
                    writer = parquet.ParquetWriter(aside, table.schema)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()
    return target


def _lists(arrow: Any, array: np.ndarray) -> Any:
    """An array (K, ...) as one of Arrow, whose axes but for the first are lists of lists."""
    column = arrow.array(np.ascontiguousarray(array).reshape(-1))
    for length in reversed(array.shape[1:]):
        column = arrow.FixedSizeListArray.from_arrays(column, length)
    return column
