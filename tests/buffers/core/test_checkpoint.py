"""Checkpoint files: what goes in comes out, and nothing else is taken."""

import errno
import fcntl
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


def test_part_files_of_killed_saves_are_removed_by_the_next_save_to_that_path(tmp_path):
    path = tmp_path / "a[b]"
    left, under_way = (tmp_path / f".a[b].{digit * 12}.part" for digit in "0f")
    others = [tmp_path / name for name in (".a[b].part", ".ab.000000000000.part", "a[b].part")]
    for part in (left, under_way, *others):
        part.write_bytes(b"half")
    with open(under_way, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as its writer does
        write(path)
    assert not left.exists()
    assert all(part.exists() for part in (under_way, *others, path))
    write(path)
    assert not under_way.exists()


def test_saves_to_one_path_at_the_same_time_leave_one_another_alone(tmp_path, monkeypatch):
    write_all, parts = checkpoint._write_all, []

    def write_another_meanwhile(*args):
        monkeypatch.setattr(checkpoint, "_write_all", write_all)
        write(tmp_path / "a", {"rows": [np.zeros((1, 3))]})
        parts.extend(tmp_path.glob("*.part"))
        write_all(*args)

    monkeypatch.setattr(checkpoint, "_write_all", write_another_meanwhile)
    write(tmp_path / "a")
    assert len(parts) == 1  # that of the first, while the second was done
    with open_checkpoint(tmp_path / "a", "Ring") as reader:
        assert reader.columns["rows"] == (np.dtype(np.uint8), (10, 3))
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_part_that_another_save_removes_before_it_is_locked_is_begun_anew(tmp_path, monkeypatch):
    lock, locked = checkpoint._lock, []

    def lock_too_late(file):
        if not locked:
            os.unlink(file.name)
        locked.append(file.name)
        return lock(file)

    monkeypatch.setattr(checkpoint, "_lock", lock_too_late)
    write(tmp_path / "a")
    assert len(set(locked)) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_checkpoint_that_others_may_not_read_is_not_readable_while_it_is_written(
    tmp_path, monkeypatch
):
    path, write_all, modes = tmp_path / "a", checkpoint._write_all, []

    def look(file, *args):
        modes.append(stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        write_all(file, *args)

    monkeypatch.setattr(checkpoint, "_write_all", look)
    for mode in (0o600, 0o640, 0o400):
        path.touch()
        path.chmod(mode)
        write(path)
        assert (modes[-1], stat.S_IMODE(path.stat().st_mode)) == (mode, mode)
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


def test_links_that_look_like_part_files_are_left_alone(tmp_path):
    other, trap = tmp_path / "other", tmp_path / f".a.{'0' * 12}.part"
    other.write_bytes(b"precious")
    trap.symlink_to(other)
    write(tmp_path / "a")
    assert trap.is_symlink() and other.read_bytes() == b"precious"


def test_headers_too_large_to_be_read_are_not_written(tmp_path):
    meta = {"names": "x" * (9 << 20)}
    with pytest.raises(BufferMisuseError, match="spaces of fewer arrays"):
        save_checkpoint(tmp_path / "a", "Ring", meta, {"rows": [np.zeros(1)]})


def test_a_write_that_the_disk_refuses_names_the_file(tmp_path, monkeypatch):
    def refuse(file, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "_write", refuse)
    with pytest.raises(OSError, match=r"No space left on device: .*full.npz"):
        save_checkpoint(tmp_path / "full.npz", "kind", {}, {"a": [np.zeros(3)]})
    assert not list(tmp_path.iterdir())
