"""Buffers whose rows are files: as those in memory, and whole after kills and full disks."""

import errno
import json
import os
import shutil

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from replay_model import ACTIONS, OBS, CountingEnvs, ListModel, TornModel, check_against, columns_of

from buffers import (
    BufferMemoryError,
    BufferMisuseError,
    CheckpointError,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)
from buffers.replay import folder as folders
from buffers.replay.table import write_columns

CLASSES = {"shared": SharedReplayBuffer, "per env": PerEnvReplayBuffer}
PICTURE = Box(0, 255, (1, 3), np.uint8)
STEPS = {"n_step": 3, "gamma": 0.5, "num_envs": 3}


class Died(BaseException):
    """The process ends here."""


def make(place, kind="shared", capacity=7, **options):
    options = {**STEPS, "seed": 0, **options}
    if place is not None:
        options |= {"storage": "memmap", "folder": place}
    return CLASSES[kind](capacity, OBS, ACTIONS, **options)


def check(buffer, model):
    check_against(buffer, model, 3, 0.5)


def assert_same(batch, other):
    for name, column in batch._asdict().items():
        torch.testing.assert_close(column, getattr(other, name), rtol=0, atol=0)


def fill(buffers, envs, model=None, steps=1):
    for _ in range(steps):
        made = envs.random_steps(range(3))
        for buffer in buffers:
            buffer.add(**columns_of(made))
        if model is not None:
            model.add(made)


@pytest.mark.parametrize("kind", CLASSES)
def test_draws_are_those_of_memory_also_after_reopening(kind, tmp_path):
    envs = CountingEnvs(3)
    memory, model = make(None, kind, 20), ListModel(20, 3, kind == "per env")
    buffer = make(tmp_path / "f", kind, 20)
    for turn in range(60):
        fill([memory, buffer], envs, model)
        batch, other = buffer.sample(16), memory.sample(16)
        assert_same(batch, other)
        if turn % 8 == 7:
            assert_same(buffer.sample(9, replace=False), memory.sample(9, replace=False))
        if turn % 20 == 19:
            if turn < 30:
                buffer.close()
            del buffer
            buffer = make(tmp_path / "f", kind, 20, seed=5)
            memory._random.set_state(buffer._random.get_state())
            memory.cut_episodes()
            for env in range(3):
                envs.cut(env)
            check(buffer, model)
            assert buffer.num_added == memory.num_added


@pytest.mark.parametrize("stage", ["begun", "half a row", "written"])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_process_that_dies_in_an_add_leaves_what_it_has_committed(
    kind, stage, tmp_path, monkeypatch
):
    envs, model = CountingEnvs(3), TornModel(7, 3, kind == "per env")
    buffer = make(tmp_path / "f", kind)
    fill([buffer], envs, model, 6)
    table = buffer._table

    def die(*_):
        raise Died

    def write_half(arrays, rows):
        write_columns(dict([*table._written.items()][:3]), arrays, rows)
        raise Died

    owner, name, instead = {
        "begun": (table, "_write", die), "half a row": (table, "_write", write_half),
        "written": (table, "_commit", die),
    }[stage]  # fmt: skip
    made = envs.random_steps(range(3))
    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(owner, name, instead)
        buffer.add(**columns_of(made))
    shutil.copytree(tmp_path / "f", tmp_path / "left")  # as the process leaves it
    model.tear(made)
    check(buffer, model)  # in the process that went on, too
    other = make(tmp_path / "left", kind)
    check(other, model)
    fill([other], CountingEnvs(3), steps=9)
    assert len(other) == (21 if kind == "per env" else 7)
    assert len(other.sample(30)) == 30


def test_a_power_loss_leaves_what_was_flushed_and_says_what_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_FEW_BYTES", 400)
    envs, model = CountingEnvs(3), ListModel(90, 3, per_env=False)
    buffer = make(tmp_path / "f", capacity=90)
    fill([buffer], envs, model, 50)
    buffer.flush()
    shutil.copytree(tmp_path / "f", tmp_path / "flushed")
    fill([buffer], envs, steps=3)
    limit = buffer._folder.limit
    assert 9 <= limit < 45
    shutil.copytree(tmp_path / "f", tmp_path / "later")
    monkeypatch.setattr(folders, "_boot_id", lambda: "another start")
    # Places that were written since are any mixture.
    rows = np.lib.format.open_memmap(tmp_path / "later" / "rows.npy", "r+")
    rows[np.arange(150, 159) % 90] = 0x5A
    rows.flush()
    check(make(tmp_path / "flushed", capacity=90), model)
    with pytest.warns(UserWarning, match=rf"was stopped.*and {limit} of the oldest transitions"):
        other = make(tmp_path / "later", capacity=90)
    model.rings[0] = model.rings[0][limit:]
    check(other, model)
    assert other.num_added == 150
    fill([other], CountingEnvs(3, 5), model, 2)  # windows of before end before them
    check(other, model)
    fill([other], CountingEnvs(3), steps=40)
    assert len(other) == 90


def test_a_folder_has_no_priorities(tmp_path):
    with pytest.raises(BufferMisuseError, match="no priorities"):
        PrioritizedReplayBuffer(7, OBS, ACTIONS, storage="memmap", folder=tmp_path / "f")


def test_a_folder_has_one_writer(tmp_path):
    buffer = make(tmp_path / "own")
    with pytest.raises(BufferMisuseError, match="is written to by another buffer"):
        make(tmp_path / "own")
    buffer.close()
    buffer.close()
    with pytest.raises(BufferMisuseError, match="was closed"):
        buffer.sample(1)
    make(tmp_path / "own")


def test_a_folder_of_another_buffer_is_refused_and_stays(tmp_path):
    make(tmp_path / "f").close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "f").iterdir()}
    for kind, options, text in (
        ("shared", {"capacity": 8}, "capacity is 7, expected 8"),
        ("shared", {"n_step": 2}, "n_step is 3, expected 2"),
        ("per env", {}, "kind is SharedReplayBuffer, expected PerEnvReplayBuffer"),
        ("shared", {"track_env": True}, "env_ids"),
    ):
        with pytest.raises(BufferMisuseError, match=text):
            make(tmp_path / "f", kind, **options)
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "thesis.tex").write_text("all of it")
    with pytest.raises(BufferMisuseError, match="holds other files"):
        make(tmp_path / "g")
    assert [path.name for path in (tmp_path / "g").iterdir()] == ["thesis.tex"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "f").iterdir()} == before


def test_states_of_other_storage_are_refused_and_of_other_folders_warned_of(tmp_path):
    memory, folder = make(None), make(tmp_path / "f")
    fill([memory, folder], CountingEnvs(3), steps=2)
    with pytest.raises(BufferMisuseError, match=r"columns .*'rows'.*, but a buffer like this one"):
        folder.load_state_dict(memory.state_dict())
    assert folder.num_added == 6
    other = make(tmp_path / "g")
    with pytest.warns(UserWarning, match="has had 0 rows added, fewer than the 6"):
        other.load_state_dict(folder.state_dict())
    other.close()
    folder.close()


@pytest.mark.parametrize("name", ["header.json", "rows.npy", "rings.npy", "envs.npy"])
@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "gone"])
def test_damaged_files_are_refused_with_their_name(name, how, tmp_path):
    buffer = make(tmp_path / "f")
    fill([buffer], CountingEnvs(3), steps=4)
    buffer.close()
    path = tmp_path / "f" / name
    content = bytearray(path.read_bytes())
    if how == "flipped":  # content of rows is not looked at
        content[5:60] = bytes(255 - byte for byte in content[5:60])
    path.write_bytes(b"" if how == "empty" else content[:-1] if how == "cut" else content)
    if how == "gone":
        path.unlink()
    with pytest.raises(CheckpointError, match=name):
        make(tmp_path / "f")


def test_counts_that_cannot_be_are_refused(tmp_path):
    buffer = make(tmp_path / "f")
    fill([buffer], CountingEnvs(3), steps=4)
    buffer.close()
    for file, field, value in (
        ("rings", "committed", 2**40), ("rings", "begun", -1), ("envs", "last", 99),
        ("envs", "last", -9),
    ):  # fmt: skip
        shutil.copytree(tmp_path / "f", tmp_path / "g")
        np.lib.format.open_memmap(tmp_path / "g" / f"{file}.npy", "r+")[field] = value
        with pytest.raises(CheckpointError, match="damaged"):
            make(tmp_path / "g")
        shutil.rmtree(tmp_path / "g")
    header = tmp_path / "f" / "header.json"
    found = json.loads(header.read_text())
    for changes in ({"safe": [-1]}, {"safe": [1, 2]}, {"safe": "x"}, {"limit": 0}, {"limit": 2.5}):
        header.write_text(json.dumps({**found, **changes}))
        with pytest.raises(CheckpointError, match="damaged"):
            make(tmp_path / "f")


def test_a_disk_that_is_full_is_found_before_anything_is_made(tmp_path, monkeypatch):
    rows = 2 * shutil.disk_usage(tmp_path).free // (8 * 2**20)
    space = Box(-1, 1, (2**20,))
    with pytest.raises(BufferMemoryError, match=r"No space left on device; use a smaller capacity"):
        SharedReplayBuffer(rows, space, ACTIONS, storage="memmap", folder=tmp_path / "f")
    assert os.listdir(tmp_path / "f") == ["lock"]

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "posix_fallocate", refuse)
        with pytest.raises(BufferMemoryError, match="No space left"):
            make(tmp_path / "f")
    assert os.listdir(tmp_path / "f") == ["lock"]
    make(tmp_path / "f")


def test_states_lead_to_the_folder(tmp_path):
    envs = CountingEnvs(3)
    buffer, memory = make(tmp_path / "f", capacity=20), make(None, capacity=20)
    fill([buffer, memory], envs, steps=9)
    buffer.sample(4), memory.sample(4)
    state = buffer.state_dict()
    assert "rows" not in state
    buffer.close()
    other = make(tmp_path / "f", capacity=20)
    other.load_state_dict(state)
    fill([other, memory], envs, steps=5)  # in the same episodes
    assert_same(other.sample(50), memory.sample(50))
    with pytest.raises(BufferMisuseError, match="not copied"):
        __import__("copy").deepcopy(other)
    other.load_state_dict(state)  # older than the folder: rows that were added since stay
    memory.cut_episodes()
    assert other.num_added == memory.num_added
    other.save(tmp_path / "small")
    assert (tmp_path / "small").stat().st_size < 10_000
    other.load(tmp_path / "small")


@pytest.mark.parametrize("options", [
    {"storage": "disk"}, {"folder": "f"}, {"storage": "memmap"},
    {"storage": "memmap", "folder": "a\0b"}, {"storage": "memmap", "folder": "f", "staged": True},
    {"storage": "memmap", "folder": "f", "store_next": False},
    {"storage": "memmap", "folder": "f", "frame_stack": 1},
])  # fmt: skip
def test_arguments_that_do_not_go_together(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BufferMisuseError, match="needs storage='memmap', which needs device='cpu'"):
        SharedReplayBuffer(7, PICTURE, ACTIONS, num_envs=2, **options)
    assert not os.listdir(tmp_path)
