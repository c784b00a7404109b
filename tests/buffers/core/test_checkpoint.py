"""Checkpoint files: what goes in comes out, and nothing else is taken."""

import errno
import os
import stat
import tracemalloc

import numpy as np
import pytest
import torch
from choices import fast_are

from buffers import BufferMisuseError, CheckpointError
from buffers.core import checkpoint
from buffers.core.checkpoint import open_checkpoint, save_checkpoint

META = {"seed": 2**64 - 1, "fields": [["obs", [3], "<f4"]]}


def write(path, columns=None):
    columns = columns or {"rows": [np.arange(30, dtype=np.uint8).reshape(10, 3)]}
    save_checkpoint(path, "Ring", META, columns)
    return path


@pytest.mark.parametrize(
    "size",
    fast_are([0, 1, 7, 1000, (1 << 22) + 9], [0, 1, 7, 64, 1000, (1 << 22) - 1, (1 << 22) + 9]),
)
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


def test_every_changed_byte_of_a_column_is_noticed(tmp_path):
    path = write(tmp_path / "a")
    content, column = path.read_bytes(), np.arange(30, dtype=np.uint8).tobytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        try:
            with open_checkpoint(path, "Ring") as reader:
                assert reader.meta == META
                reader.require({"rows": (np.dtype(np.uint8), (None, 3))})
                assert reader.array("rows").tobytes() == column
        except CheckpointError:
            pass
        else:  # names and times in the archive, which are there twice or not read
            assert not content.index(column) <= place < content.index(column) + len(column)


def test_numpy_reads_a_checkpoint(tmp_path):
    write(tmp_path / "a")
    with np.load(tmp_path / "a") as found:
        assert found["rows"].tolist() == np.arange(30).reshape(10, 3).tolist()


@pytest.mark.parametrize("keep", [0, 8, 30, 100, -64, -8, -1])
def test_cut_off_files_are_refused(tmp_path, keep):
    path = write(tmp_path / "a")
    path.write_bytes(path.read_bytes()[:keep])
    with (
        pytest.raises(CheckpointError, match=r"cut off|no checkpoint|damaged"),
        open_checkpoint(path, "Ring"),
    ):
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
    tracemalloc.start()
    write(tmp_path / "a", {"rows": [column]})
    with open_checkpoint(tmp_path / "a", "Ring") as reader:
        reader.read("rows", [found])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


def test_saves_to_one_path_at_the_same_time_leave_one_another_alone(tmp_path, monkeypatch):
    fsync, parts = os.fsync, []

    def write_another_meanwhile(number):
        monkeypatch.setattr(os, "fsync", fsync)
        write(tmp_path / "a", {"rows": [np.zeros((1, 3))]})
        parts.extend(tmp_path.glob(".*"))
        fsync(number)

    monkeypatch.setattr(os, "fsync", write_another_meanwhile)
    write(tmp_path / "a")
    assert len(parts) == 1  # that of the first, while the second was done
    with open_checkpoint(tmp_path / "a", "Ring") as reader:
        assert reader.columns["rows"] == (np.dtype(np.uint8), (10, 3))
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_checkpoint_that_others_may_not_read_is_not_readable_while_it_is_written(
    tmp_path, monkeypatch
):
    path, fsync, modes = tmp_path / "a", os.fsync, []

    def look(number):
        modes.append(stat.S_IMODE(os.fstat(number).st_mode))
        fsync(number)

    monkeypatch.setattr(os, "fsync", look)
    for mode in (0o600, 0o640, 0o400):
        path.touch()
        path.chmod(mode)
        write(path)
        assert (modes[-1], stat.S_IMODE(path.stat().st_mode)) == (mode | 0o600, mode)
        path.unlink()


def test_links_and_other_things_than_files_stay_what_they_are(tmp_path):
    path, link = tmp_path / "a", tmp_path / "link"
    link.symlink_to(path)
    write(link)
    assert link.is_symlink() and path.is_file()
    with open_checkpoint(link, "Ring"):
        pass
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe", os.devnull):
        with pytest.raises(OSError, match="is no regular file"):
            write(other)
        with pytest.raises(OSError, match="is no regular file"), open_checkpoint(other, "Ring"):
            pass
    assert not os.path.isfile(os.devnull)


def test_headers_too_large_to_be_read_are_not_written(tmp_path):
    meta = {"names": "x" * (9 << 20)}
    with pytest.raises(BufferMisuseError, match="spaces of fewer arrays"):
        save_checkpoint(tmp_path / "a", "Ring", meta, {"rows": [np.zeros(1)]})


def test_a_write_that_the_disk_refuses_names_the_file(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "_write_column", refuse)
    with pytest.raises(OSError, match=r"No space left on device: .*full.npz"):
        save_checkpoint(tmp_path / "full.npz", "kind", {}, {"a": [np.zeros(3)]})
    assert not list(tmp_path.iterdir())
