"""Checkpoints that contradict themselves are refused, by file and by state, and change nothing.

What an accepted one does to memory is tried in a child of `tests/fuzz/files.py`, which may die.
"""

import json

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from buffers import (
    BufferMisuseError,
    EpisodicReplayBuffer,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
    restore_generator,
)
from buffers.core import checkpoint
from buffers.core.checkpoint import save_checkpoint
from buffers.replay import layout as at

OBS = Dict({"x": Box(-9, 9, (2,), np.float32), "on": Box(0, 1, (1,), np.bool_)})
ONCE = {"n_step": 3, "gamma": 0.9, "store_next": False}
KINDS = {
    "shared": (SharedReplayBuffer, {"n_step": 3, "gamma": 0.9}),
    "once": (SharedReplayBuffer, ONCE),
    "staged": (SharedReplayBuffer, {**ONCE, "staged": True}),
    "per_env": (PerEnvReplayBuffer, ONCE),
    "prioritized": (PrioritizedReplayBuffer, {}),
    "episodic": (EpisodicReplayBuffer, {}),
}


def make(kind, steps=0, seed=1, **more):
    cls, options = KINDS[kind]
    buffer = cls(20, OBS, Discrete(4), num_envs=2, seed=seed, **options, **more)
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


def part(place, value, index=0):
    """Change a number of an array inside the integers of a replay buffer."""

    def change(state):
        state["state"][int(state["state"][place]) + index] = value

    return change


def word(name, value, index=0):
    def change(state):
        state[name].view(-1)[index] = value

    return change


def field(name, value, row=3):
    """Change an int32 of a row."""

    def change(state):
        offset = next(offset for path, _, _, offset in state["fields"] if path == name)
        state["rows"][row, offset : offset + 4] = torch.tensor([value], dtype=torch.int32).view(
            torch.uint8
        )

    return change


def header(place, value, row=2):
    """Change an int32 at the beginning of a row of an episodic buffer."""

    def change(state):
        state["rows"].view(torch.int32)[row, place] = value

    return change


def lengthen(state):
    state["lengths"] = torch.tensor([2**63 - 1, 2**63 - 1, 9, 9])


CONTRADICTIONS = {
    "last written": ("shared", part(at.LAST, 10**9)),
    "last written, negative": ("once", part(at.LAST, -5, 1)),
    "last written, of another row": ("once", part(at.LAST, 33)),
    "count": ("shared", word("state", 21, at.COUNT)),
    "added": ("shared", word("state", 2**62, at.ADDED)),
    "pointer": ("per_env", part(at.POINTERS, 19, 1)),
    "total": ("per_env", part(at.TOTALS, 2**62, 1)),
    "stopped": ("shared", part(at.STOPPED, 7)),
    "link beyond": ("shared", field("link", 10**6)),
    "link to itself": ("shared", field("link", 4)),
    "link backwards": ("shared", field("link", 2)),
    "link to an older slot": ("shared", field("link", -1)),
    "slot beyond": ("once", field("link", -(10**6))),
    "env beyond": ("once", field("env_ids", 2)),
    "env negative": ("staged", field("env_ids", -1)),
    "env of another ring": ("per_env", field("env_ids", 1)),
    "slots": ("once", word("slots", 5, 3)),
    "slots beyond": ("once", word("slots", 2**31 - 1, 3)),
    "free list": ("once", word("free", 10**9)),
    "free list, twice the same": ("staged", lambda s: s["free"].__setitem__(0, s["free"][1])),
    "free list, length": ("once", word("state", 10**6, at.NUM_FREE)),
    "free list, longer than the places": ("once", lambda s: s.update(free=torch.arange(99))),
    "bools": ("once", lambda s: s["pending"].fill_(7)),
    "bools in rows": ("prioritized", lambda s: s["rows"].fill_(7)),
    "priority": ("prioritized", word("priorities", float("nan"), 3)),
    "priority, negative": ("prioritized", word("priorities", -1.0, 3)),
    "priority, sum": ("prioritized", word("priorities", 1e308, 3)),
    "priority of no row": ("prioritized", lambda s: s["priorities"].copy_(torch.ones(20))),
    "exponent": ("prioritized", word("exponents", float("inf"), 1)),
    "largest": ("prioritized", word("exponents", 0.5, 0)),
    "generator of torch": ("staged", lambda s: s["generator"].view(torch.int64)[2].fill_(600)),
    "lengths": ("episodic", word("lengths", 2)),
    "lengths, sum": ("episodic", lengthen),
    "lengths of none": ("episodic", word("lengths", 0)),
    "open lengths": ("episodic", word("open_lengths", 10**9)),
    "room": ("episodic", header(0, 19)),
    "step": ("episodic", header(1, 19)),
    "remaining": ("episodic", header(2, 19)),
    "bound": ("episodic", header(3, 19)),
    "first episode": ("episodic", lambda s: s.update(first_episode=2**70)),
    "first episode, no number": ("episodic", lambda s: s.update(first_episode="0")),
    "fields": ("episodic", lambda s: s.update(fields=[[1, 2]])),
    "settings": ("shared", lambda s: s.update(settings=[])),
    "constants": ("shared", lambda s: s.update(constants="x")),
    "dtype": ("shared", lambda s: s.update(state=s["state"].int())),
    "dimensions": ("once", lambda s: s.update(finals=s["finals"][:, :1].contiguous())),
    "version": ("shared", lambda s: s.update(state_version=torch.ones(2))),
    "version of episodes": ("episodic", lambda s: s.update(state_version=torch.ones(2))),
    "kind": ("shared", lambda s: s.update(kind=torch.ones(2))),
    "no array": ("shared", lambda s: s.update(rows=3)),
}


# What is read from a file is checked by the same functions, but piece by piece.
IN_FILES = ("link beyond", "env of another ring", "slots", "free list", "bools in rows", "room")
IN_FILES += ("bools", "priority", "generator of torch", "lengths", "open lengths", "dimensions")
WAYS = [(name, "state") for name in CONTRADICTIONS] + [(name, "file") for name in IN_FILES]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_what_contradicts_itself_is_refused(name, way, tmp_path):
    kind, change = CONTRADICTIONS[name]
    steps = 8 if name == "priority of no row" else 13
    state = make(kind, steps).state_dict()
    change(state)
    buffer = make(kind, 6, seed=2)
    before = {k: v.clone() for k, v in buffer.state_dict().items() if torch.is_tensor(v)}
    if way == "file":
        columns = {k: [v] for k, v in state.items() if torch.is_tensor(v)}
        meta = {k: v for k, v in state.items() if not torch.is_tensor(v)}
        save_checkpoint(tmp_path / "a", type(buffer).__name__, meta, columns)
    with pytest.raises(BufferMisuseError):
        buffer.load(tmp_path / "a") if way == "file" else buffer.load_state_dict(state)
    after = buffer.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())


@pytest.mark.parametrize("place", [at.OCCUPIED, at.CUMULATED, at.OBS_DIMS, at.ACTION_DIMS])
def test_what_follows_from_the_rest_is_not_believed(place):
    buffer, other = make("per_env", 13), make("per_env")
    state = buffer.state_dict()
    begin = int(state["state"][place])
    state["state"][begin : begin + 1] = 10**9
    other.load_state_dict(state)
    assert torch.equal(other.sample(9).indices, buffer.sample(9).indices)
    assert (other._state < 10**6).all()


def write_header(path, header):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    start = b"RLBUFFER" + len(text).to_bytes(8, "little") + text + checkpoint._checksum_of(text)
    path.write_bytes(start + bytes(-len(start) % 64) + bytes(8 * 2))


COLUMN = ["state", "<i8", [0]]
HEADERS = {
    "nested": b"[" * 100_000,
    "a list": b"[]",
    "no text": b"\xff\xfe",
    "large number": {"version": 1, "columns": [["state", "<i8", [10**400]], COLUMN]},
    "infinite": b'{"version": 1, "kind": "SharedReplayBuffer", "columns": [["a", "<i8", [1e999]]]}',
    "empty items": {"columns": [["state", "|S0", [10**12]], ["rows", "<i8", [0]]]},
    "no numbers": {"columns": [["state", "|V0", [10**12]], ["rows", "<i8", [0]]]},
    "syntax": {"columns": [["state", "f4,,f4", [0]], ["rows", "<i8", [0]]]},
    "nothing, large": {"columns": [["state", "<i8", [0, 10**15]], ["rows", "<i8", [0]]]},
    "columns": {"columns": {"state": 1}, "meta": []},
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_ask_for_memory_or_make_no_sense_are_refused(name, tmp_path):
    head = HEADERS[name]
    if isinstance(head, dict):
        head = {"version": 1, "kind": "SharedReplayBuffer", "meta": {}, **head}
    write_header(tmp_path / "a", head)
    with pytest.raises(BufferMisuseError):
        make("shared").load(tmp_path / "a")


def test_shapes_are_compared_before_anything_is_read(tmp_path, monkeypatch):
    buffer = make("once", 5)
    buffer.save(tmp_path / "a")
    monkeypatch.setattr(checkpoint.CheckpointReader, "_read_into", None)
    smaller = SharedReplayBuffer(9, OBS, Discrete(4), num_envs=2, **ONCE)
    with pytest.raises(BufferMisuseError, match="capacity is 20, expected 9"):
        smaller.load(tmp_path / "a")


def test_a_file_that_ends_while_it_is_read_leaves_an_empty_buffer_of_use(tmp_path, monkeypatch):
    read = checkpoint.CheckpointReader.read

    def cut_off(reader, name, blocks):
        if name == "rows":
            raise reader.refusal("became shorter while it was read")
        read(reader, name, blocks)

    for kind in KINDS:
        buffer = make(kind, 13)
        buffer.save(tmp_path / kind)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.CheckpointReader, "read", cut_off)
            with pytest.raises(BufferMisuseError, match="became shorter"):
                buffer.load(tmp_path / kind)
        assert len(buffer) == 0
        buffer.load(tmp_path / kind)
        buffer.sample(5)


def test_generators_go_on_from_whole_states_only():
    generator, other = torch.Generator(), torch.Generator()
    for count in (0, 1, 622, 1, 1, 700):
        torch.rand(count, generator=generator)
        restore_generator(other, generator.get_state())
        assert torch.equal(torch.rand(700, generator=other), torch.rand(700, generator=generator))
    state = generator.get_state()
    state.view(torch.int64)[2] = 624  # words beyond the table
    with pytest.raises(BufferMisuseError, match="is not that of a generator"):
        restore_generator(other, state)
    for wrong in (state[:-1], state.float(), None, np.zeros(5056, np.uint8)):
        with pytest.raises(BufferMisuseError, match="is not that of a generator"):
            restore_generator(other, wrong)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("kind", ["shared", "once", "per_env", "prioritized"])
def test_the_same_transitions_are_the_same_bytes_in_a_file(kind, staged, tmp_path):
    for name, sizes in (("one by one", [1] * 24), ("several at once", [1, 3, 2, 4, 1, 1] * 2)):
        buffer, t = make(kind, staged=staged), 0
        for size in sizes:
            buffer.add(**at_steps(np.arange(t, t + size)))
            t += size
        buffer.save(tmp_path / name)
    assert (tmp_path / "one by one").read_bytes() == (tmp_path / "several at once").read_bytes()


@pytest.mark.parametrize("staged", [False, True])
def test_the_same_episodes_are_the_same_bytes_in_a_file(staged, tmp_path):
    def add(buffer, length):
        rows = at_steps(np.arange(length + 1))
        obs = {name: column[::2] for name, column in rows["obs"].items()}
        numbers = {name: rows[name][:-2:2] for name in ("actions", "rewards")}
        buffer.add_episode({"obs": obs, **numbers})

    fresh, used = (make("episodic", staged=staged) for _ in range(2))
    for length in (12, 12, 1, 2, 3, 4):
        add(used, length)
    used.clear()
    for name, buffer in (("fresh", fresh), ("used", used)):
        for length in (8, 2, 3, 9):
            add(buffer, length)
        buffer.save(tmp_path / name)
    assert (tmp_path / "fresh").read_bytes() == (tmp_path / "used").read_bytes()
