"""Checkpoints that contradict themselves are refused, by file and by state, and change nothing.

What an accepted one does to memory is tried in a child of `tests/fuzz/files.py`, which may die.
"""

import errno
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from choices import fast_are, in_turn, product
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from buffers import (
    BufferMisuseError,
    CheckpointError,
    EpisodicReplayBuffer,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)

OBS = Dict({"x": Box(-9, 9, (2,), np.float32), "on": Box(0, 1, (1,), np.bool_)})
ONCE = {"n_step": 3, "gamma": 0.9, "store_next": False}
KINDS = {
    "shared": (SharedReplayBuffer, {"n_step": 3, "gamma": 0.9}),
    "of any envs": (SharedReplayBuffer, {"num_envs": None}),
    "once": (SharedReplayBuffer, ONCE),
    "staged": (SharedReplayBuffer, {**ONCE, "staged": True}),
    "tracked": (SharedReplayBuffer, {"n_step": 3, "gamma": 0.9, "track_env": True}),
    "per_env": (PerEnvReplayBuffer, {**ONCE, "track_env": True}),
    "prioritized": (PrioritizedReplayBuffer, {}),
    "prioritized, staged": (PrioritizedReplayBuffer, {"staged": True}),
    "prioritized, all alike": (PrioritizedReplayBuffer, {"alpha": 0.0}),
    "episodic": (EpisodicReplayBuffer, {}),
    "episodic, staged": (EpisodicReplayBuffer, {"staged": True}),
}


def make(kind, steps=0, seed=1, **more):
    cls, options = KINDS[kind]
    buffer = cls(20, OBS, Discrete(4), **{"num_envs": 2, "seed": seed, **options, **more})
    for t in range(steps):
        buffer.add(**at_steps([t]))
    return buffer


def at_steps(times):
    """Columns of some steps of two envs."""
    t = np.repeat(times, 2)
    obs, after = (
        {"x": np.stack([n, n], 1).astype(np.float32), "on": n[:, None] % 2 == 1} for n in (t, t + 1)
    )
    over = np.where(np.arange(len(t)) % 2, t % 7 == 6, t % 5 == 4)
    return {
        "obs": obs, "next_obs": after, "actions": t % 4, "rewards": t.astype(float),
        "terminations": over, "truncations": np.zeros(len(t), bool),
    }  # fmt: skip


def same_state(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_state, one, other))
    return one == other


def word(name, value, index=0):
    def change(state):
        state[name].view(-1)[index] = value

    return change


def field(name, value, row=3):
    """Change an int32 of a row."""

    def change(state):
        offset = int(state["fields"][name].rpartition(" ")[2])
        state["rows"][row, offset : offset + 4] = torch.tensor([value], dtype=torch.int32).view(
            torch.uint8
        )

    return change


def lengthen(state):
    state["lengths"] = torch.tensor([2**63 - 1, 2**63 - 1, 9, 9])


CONTRADICTIONS = {
    "last written": ("shared", word("last", 10**9)),
    "last written, negative": ("once", word("last", -5, 1)),
    "count": ("shared", word("rings", 21, 1)),
    "begun": ("per_env", word("rings", 5, 2)),
    "added": ("shared", word("rings", 2**62)),
    "total": ("per_env", word("rings", 2**62, 1)),
    "open": ("shared", lambda s: s["is_open"].view(torch.uint8).fill_(7)),
    "link beyond": ("shared", field("link", 10**6)),
    "link negative": ("shared", field("link", -1)),
    "link to a slot there is not": ("once", field("link", 10**6)),
    "link to nothing": ("once", field("link", 0)),
    "link that another row has": (
        "once",
        lambda s: field("link", 25, 2)(s) or field("link", 25)(s),
    ),
    "env beyond": ("tracked", field("env_ids", 2)),
    "env negative": ("tracked", field("env_ids", -1)),
    "slots, fewer": ("once", lambda s: s.update(units=s["units"][:3].contiguous())),
    "bools": ("once", lambda s: s["units"].fill_(7)),
    "bools in rows": ("prioritized", lambda s: s["rows"].fill_(7)),
    "rows, fewer": ("shared", lambda s: s.update(rows=s["rows"][:9].contiguous())),
    "priority": ("prioritized", word("priorities", float("nan"), 3)),
    "priority, negative": ("prioritized", word("priorities", -1.0, 3)),
    "priority, sum": ("prioritized", word("priorities", 1e308, 3)),
    "exponent": ("prioritized", word("priority_numbers", float("inf"), 1)),
    "infinite": ("prioritized, all alike", word("priority_numbers", float("inf"))),
    "largest": ("prioritized", word("priority_numbers", 0.5, 0)),
    "generator of torch": ("staged", lambda s: s["generator"].view(torch.int64)[2].fill_(600)),
    "lengths": ("episodic", word("lengths", 2)),
    "lengths, sum": ("episodic", lengthen),
    "lengths of none": ("episodic", word("lengths", 0)),
    "open lengths": ("episodic", word("open_lengths", 10**9)),
    "fields": ("episodic", lambda s: s.update(fields=[[1, 2]])),
    "settings": ("shared", lambda s: s.update(settings=[])),
    "fields of rows": ("shared", lambda s: s.update(fields="x")),
    "dtype": ("shared", lambda s: s.update(rings=s["rings"].int())),
    "dimensions": ("once", lambda s: s.update(units=s["units"][:, :1].contiguous())),
    "more": ("shared", lambda s: s.update(more=torch.ones(2))),
    "version": ("shared", lambda s: s.update(state_version=torch.ones(2))),
    "version of episodes": ("episodic", lambda s: s.update(state_version=torch.ones(2))),
    "kind": ("shared", lambda s: s.update(kind=torch.ones(2))),
    "no array": ("shared", lambda s: s.update(rows=3)),
}


# What is read from a file is checked by the same functions.
IN_FILES = ("link beyond", "env beyond", "bools in rows")
IN_FILES += ("bools", "priority", "generator of torch", "lengths", "open lengths", "dimensions")
WAYS = [(name, "state") for name in CONTRADICTIONS] + [(name, "file") for name in IN_FILES]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_what_contradicts_itself_is_refused(name, way, tmp_path):
    kind, change = CONTRADICTIONS[name]
    state = make(kind, 13).state_dict()
    change(state)
    buffer = make(kind, 6, seed=2)
    before = {k: v.clone() for k, v in buffer.state_dict().items() if torch.is_tensor(v)}
    if way == "file":
        torch.save({"kind": type(buffer).__name__, **state}, tmp_path / "a")
    with pytest.raises(BufferMisuseError):
        buffer.load(tmp_path / "a") if way == "file" else buffer.load_state_dict(state)
    after = buffer.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())


@pytest.mark.parametrize("kind", ["once", "episodic"])
@pytest.mark.parametrize("how", ["cut", "empty", "pickle", "text"])
def test_files_that_are_none_of_a_buffer_are_refused_and_run_nothing(how, kind, tmp_path):
    buffer, path, ran = make(kind, 5), tmp_path / "a", tmp_path / "ran"
    buffer.save(path)
    content = path.read_bytes()
    if how == "pickle":
        torch.save({**buffer.state_dict(), "kind": Runs(str(ran))}, path)
    else:
        path.write_bytes({"cut": content[:-300], "empty": b"", "text": b"a text"}[how])
    before = buffer.state_dict()
    with pytest.raises(CheckpointError, match=r"is damaged, cut off, or no checkpoint"):
        buffer.load(path)
    assert not ran.exists()
    after = buffer.state_dict()
    assert all(same_state(after[name], value) for name, value in before.items())


class Runs:
    """What a pickle would call."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


WAYS = ("from its file", "file", "state")


@pytest.mark.parametrize(("kind", "way"), fast_are(in_turn(KINDS, WAYS), product(KINDS, WAYS)))
def test_a_restored_buffer_goes_on_bit_for_bit(kind, way, tmp_path):
    buffer, made = make(kind, 13), make(kind, 6, seed=2)
    if "prioritized" in kind:
        buffer.update_priorities([0, 3], [5.0, 0.0])
    buffer.save(tmp_path / "a")
    if way == "from its file":
        made = type(buffer).from_file(tmp_path / "a")
    elif way == "file":
        made.load(tmp_path / "a")
    else:
        made.load_state_dict(buffer.state_dict())
    for t in range(13, 17):
        one, other = made.sample(8), buffer.sample(8)
        for name in ("offsets" if "episodic" in kind else "indices", "rewards"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        for each in (buffer, made):
            each.add(**at_steps([t]))
    one, other = made.state_dict(), buffer.state_dict()
    assert all(same_state(one[name], other[name]) for name in {**one, **other})


ODD = OrderedDict(z=Box(-2, 5, (2, 3), np.int16), a=MultiDiscrete([3, 4], start=[1, -1]))
SPACES = [
    Tuple((Dict(ODD), MultiBinary([2, 2]), Discrete(3, start=-1))),
    Box(np.array([-np.inf, 0.0]), np.array([1.0, np.inf]), dtype=np.float64),
]


@pytest.mark.parametrize("space", SPACES, ids=["nest", "bounds"])
def test_spaces_and_options_are_in_the_file(space, tmp_path):
    extras = {"logits": Box(-9, 9, (2,)), "choice": Discrete(4)}
    options = {"num_envs": np.int64(2), "gamma": np.float32(0.5), "extra_columns": extras}
    buffer = PerEnvReplayBuffer(
        7, space, MultiDiscrete([2, 3]), over="envs", track_env=True, **options
    )
    buffer.save(tmp_path / "a")
    made = PerEnvReplayBuffer.from_file(tmp_path / "a")
    assert (made.observation_space, made.action_space) == (space, MultiDiscrete([2, 3]))
    assert (made.capacity, made.num_envs, made.gamma, made.over) == (7, 2, 0.5, "envs")
    assert made.rows().keys() == buffer.rows().keys()
    other = tmp_path / "b"
    made.save(other)
    assert other.read_bytes() == (tmp_path / "a").read_bytes()


def test_stacks_of_frames_and_exponents_are_in_the_file(tmp_path):
    stacks = Box(0, 255, (2, 4, 3), np.uint8)
    options = {"num_envs": 1, "frame_stack": 3, "alpha": 0.7}
    buffer = PrioritizedReplayBuffer(9, stacks, Discrete(2), **options)
    buffer.beta = 0.5
    buffer.save(tmp_path / "a")
    made = PrioritizedReplayBuffer.from_file(tmp_path / "a", device="cpu")
    assert (made.alpha, made.beta) == (0.7, 0.5)
    assert made.memory() == buffer.memory()


def test_files_that_make_no_buffer_are_refused(tmp_path):
    path = tmp_path / "a"
    make("once", 5).save(path)
    with pytest.raises(CheckpointError, match=r"of a 'SharedReplayBuffer', expected a PerEnv"):
        PerEnvReplayBuffer.from_file(path)
    with pytest.raises(BufferMisuseError, match="device is 'no'"):
        SharedReplayBuffer.from_file(path, device="no")
    folder = tmp_path / "folder"
    disk = SharedReplayBuffer(9, OBS, Discrete(4), storage="memmap", folder=folder)
    disk.save(tmp_path / "b")
    with pytest.raises(CheckpointError, match="does not say how its buffer was made"):
        SharedReplayBuffer.from_file(tmp_path / "b")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        SharedReplayBuffer.from_file(folder / "rows.npy")
    for name, value in {
        "capacity": -1, "num_envs": "2", "spaces": [["Box", 1, 2], ["Discrete", 2, 0, "int64"]],
        "frame_stack": {"code": 1}, "extra_columns": 3, "over": "envs", "n_step": 2,
        "storage": "memmap",
    }.items():  # fmt: skip
        state = torch.load(path, weights_only=True)
        state["made_with"][name] = value
        torch.save(state, tmp_path / "c")
        if name == "storage":  # never taken from a file
            assert len(SharedReplayBuffer.from_file(tmp_path / "c")) == 10
            continue
        with pytest.raises(CheckpointError):
            SharedReplayBuffer.from_file(tmp_path / "c")


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    buffer, path = make("once", 5), tmp_path / "a"
    buffer.save(path)
    before = path.read_bytes()
    buffer.add(**at_steps([5]))

    def refuse(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", refuse)
        with pytest.raises(OSError, match=r"No space left on device: .*/a"):
            buffer.save(path)
    with monkeypatch.context() as patch:  # as torch's writer says it
        patch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(RuntimeError("unexpected")))
        with pytest.raises(OSError, match="can't be written: unexpected"):
            buffer.save(path)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_was_compressed_is_refused(tmp_path):
    """It may be small and fill all memory."""
    buffer = SharedReplayBuffer(10, Box(-1, 1, (2,)), Discrete(3))
    buffer.save(tmp_path / "replay.pt")
    compressed = zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "replay.pt") as old, compressed as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(CheckpointError, match="it is compressed"):
        buffer.load(tmp_path / "small.pt")
