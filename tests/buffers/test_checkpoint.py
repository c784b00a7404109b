"""Checkpoint files: what goes in comes out, and nothing else is taken."""

import os
import tracemalloc

import numpy as np
import pytest
import torch

from buffers import CheckpointError
from buffers.checkpoint import open_checkpoint, save_checkpoint

META = {"seed": 2**64 - 1, "fields": [["obs", [3], "<f4"]]}


def write(path, columns=None):
    columns = columns or {"rows": [np.arange(30, dtype=np.uint8).reshape(10, 3)]}
    save_checkpoint(path, "Ring", META, columns)
    return path


@pytest.mark.parametrize("size", [0, 1, 7, 64, 1000, (1 << 22) - 1, (1 << 22) + 9])
def test_a_column_in_blocks_is_read_into_other_blocks(tmp_path, size):
    rng = np.random.default_rng(size)
    column = rng.integers(0, 256, (size, 3), dtype=np.uint8)
    other = torch.from_numpy(rng.standard_normal(5))
    cut, other_cut = size // 3, size // 2
    write(tmp_path / "a", {"rows": [column[:cut], column[cut:]], "other": [other]})
    found = np.zeros_like(column)
    with open_checkpoint(tmp_path / "a", "Ring") as reader:
        assert reader.meta == META
        assert reader.columns["rows"] == (np.dtype(np.uint8), (size, 3))
        reader.read("rows", [found[:other_cut], torch.from_numpy(found)[other_cut:]])
        again = torch.zeros(5, dtype=torch.float64)
        reader.read("other", [again])
    np.testing.assert_array_equal(found, column)
    assert again.equal(other)


def test_every_changed_byte_is_noticed(tmp_path):
    path = write(tmp_path / "a")
    content = path.read_bytes()
    unnoticed = []
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        try:
            with open_checkpoint(path, "Ring"):
                unnoticed.append(place)
        except CheckpointError:
            pass
    assert all(content[place] == 0 for place in unnoticed)  # padding between the parts
    assert len(unnoticed) < 128


@pytest.mark.parametrize("keep", [0, 8, 15, 20, 100, -64, -8, -1])
def test_cut_off_files_are_refused(tmp_path, keep):
    path = write(tmp_path / "a")
    path.write_bytes(path.read_bytes()[:keep])
    with (
        pytest.raises(CheckpointError, match=r"cut off|no checkpoint|damaged"),
        open_checkpoint(path, "Ring"),
    ):
        pass


def test_longer_files_are_refused(tmp_path):
    path = write(tmp_path / "a")
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="is damaged: it has"), open_checkpoint(path, "Ring"):
        pass


def test_other_kinds_columns_and_shapes_are_refused(tmp_path):
    path = write(tmp_path / "a")
    with (
        pytest.raises(CheckpointError, match="holds a Ring, expected a Tree"),
        open_checkpoint(path, "Tree"),
    ):
        pass
    with open_checkpoint(path, "Ring") as reader:
        with pytest.raises(CheckpointError, match="has no column 'tree'"):
            reader.read("tree", [np.zeros(1)])
        with pytest.raises(CheckpointError, match=r"uint8 \(10, 3\) for 'rows', expected float64"):
            reader.read("rows", [np.zeros((10, 3))])


def test_other_files_are_refused(tmp_path):
    torch.save({"rows": torch.zeros(3)}, tmp_path / "a")
    with (
        pytest.raises(CheckpointError, match="is no checkpoint of a buffer"),
        open_checkpoint(tmp_path / "a", "Ring"),
    ):
        pass


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = write(tmp_path / "a")
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write(path, {"rows": [np.zeros((5, 3), np.uint8)]})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


def test_memory_does_not_grow_with_the_columns(tmp_path):
    column = np.zeros((64, 1 << 20), np.uint8)
    found = np.zeros_like(column)
    write(tmp_path / "b")  # compiles
    tracemalloc.start()
    write(tmp_path / "a", {"rows": [column]})
    with open_checkpoint(tmp_path / "a", "Ring") as reader:
        reader.read("rows", [found])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20
