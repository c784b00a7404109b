"""Adds of tensors on a device, which the host does not see, against those of arrays on the CPU."""

import copy
import pickle
from functools import partial
from itertools import cycle, repeat

import device_kernels
import numpy as np
import pytest
import torch
from choices import fast_are, product
from gymnasium.spaces import Box, Dict, Discrete
from jit.on_device.host_device import refuse_host
from replay_model import RINGS

from buffers import (
    BufferMisuseError,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)
from buffers.core.staging import LateNumbers
from buffers.replay.device_kernels import MAX_COLUMNS, add_kernel, count_kernel
from buffers.replay.storage import ReplayStorage

FLOATS = Box(-9, 9, (3,), np.float32)
BOTH = Dict({"a": Box(-9, 9, (2,), np.float64), "b": Box(0, 255, (5,), np.uint8)})
OPTIONS = {
    "plain": {},
    "three steps": {"n_step": 3, "gamma": 0.9},
    "stored once": {"store_next": False},
    "both": {"n_step": 2, "gamma": 0.9, "store_next": False},
    "whose": {"track_env": True},
}
NUM_ENVS = 4
WAYS = [device_kernels.plain, pytest.param(device_kernels.lowered, marks=pytest.mark.cuda)]
ODD = Dict({"a": Box(0, 255, (16,), np.uint8), "b": Box(0, 255, (7,), np.uint8)})


class Stream:
    """Steps of some envs: most observations go on, some do not though nothing ended."""

    def __init__(self, space, seed=0, num_envs=NUM_ENVS):
        self.space, self.rng, self.num_envs = space, np.random.default_rng(seed), num_envs
        space.seed(seed)
        self.obs = self.sample()

    def sample(self):
        items = [self.space.sample() for _ in range(self.num_envs)]
        if isinstance(self.space, Dict):
            return {name: np.stack([item[name] for item in items]) for name in self.space}
        return np.stack(items)

    def step(self):
        rng, following, other, num_envs = self.rng, self.sample(), self.sample(), self.num_envs
        over = rng.random((2, num_envs)) < 0.15
        rows = {
            "obs": self.obs, "next_obs": following, "actions": rng.integers(0, 3, num_envs),
            "rewards": rng.standard_normal(num_envs, np.float32),
            "terminations": over[0], "truncations": over[1],
        }  # fmt: skip
        is_other = (over[0] | over[1] | (rng.random(num_envs) < 0.1))[:, None]
        if isinstance(self.space, Dict):
            self.obs = {k: np.where(is_other, other[k], following[k]) for k in following}
        else:
            self.obs = np.where(is_other, other, following)
        return rows


def moved(column):
    if isinstance(column, dict):
        return {name: moved(part) for name, part in column.items()}
    return torch.from_numpy(column.copy())


def pair(kind, space, option, capacity=23, num_rooms=None, num_envs=NUM_ENVS):
    """One on the CPU and one that does what those on devices do."""
    capacity = 6 if kind is PerEnvReplayBuffer else capacity
    options = {"num_envs": num_envs, "seed": 0, **OPTIONS[option]}
    plain, direct = (
        kind(capacity, space, Discrete(3), staged=staged, **options) for staged in (False, True)
    )
    direct._takes_tensors = direct._storage.takes_tensors
    if num_rooms:
        direct.reserve_final_obs(num_rooms)
    return plain, direct


def columns_of(batch):
    for column in (
        batch.obs, batch.next_obs, batch.actions, batch.rewards, batch.terminations,
        batch.truncations, batch.discounts, batch.env_ids,
    ):  # fmt: skip
        yield from column.values() if isinstance(column, dict) else [column]


def check_same(plain, direct):
    assert len(plain) == len(direct)
    assert plain.num_added == direct.num_added
    order = plain.order()
    assert order.equal(direct.order())
    one, other = (columns_of(buffer.get(order)) for buffer in (plain, direct))
    for expected, found in zip(one, other, strict=True):
        if expected is not None:
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    if isinstance(plain, PrioritizedReplayBuffer):
        assert plain.priorities.equal(direct.priorities)


@pytest.mark.parametrize(
    ("kind", "option", "space"),
    fast_are(
        [
            *zip(repeat(SharedReplayBuffer), OPTIONS, cycle(["floats", "both"])),
            (PerEnvReplayBuffer, "three steps", "floats"),
            (PerEnvReplayBuffer, "both", "both"),
            (PrioritizedReplayBuffer, "plain", "both"),
            (PrioritizedReplayBuffer, "both", "floats"),
        ],
        product(RINGS, OPTIONS, ["floats", "both"]),
    ),
)
def test_rows_are_those_of_the_cpu_and_nothing_waits(kind, option, space, monkeypatch):
    space = {"floats": FLOATS, "both": BOTH}[space]
    plain, direct = pair(kind, space, option, num_rooms=64)
    steps = Stream(space)
    for number in range(40):  # past many ends of the ring
        rows = steps.step()
        plain.add(**rows)
        tensors = {name: moved(column) for name, column in rows.items()}
        if number == 0:
            direct.add(**tensors)
            continue
        with monkeypatch.context() as patch:
            refuse_host(patch)
            direct.add(**tensors)
        assert len(direct) == len(plain)
        if number % 3 == 0:
            check_same(plain, direct)
    check_same(plain, direct)
    assert not direct._storage.staging._blocks.nbytes  # for arrays of the host
    other = pair(kind, space, option)[1]
    other.load_state_dict(direct.state_dict())  # which is checked there
    check_same(plain, other)
    for copied in (other, pickle.loads(pickle.dumps(direct))):
        copied._takes_tensors = direct._takes_tensors
        again = plain if copied is not other else pair(kind, space, option)[0]
        if again is not plain:
            again.load_state_dict({**plain.state_dict()})
        rows = Stream(space, 1).step()
        again.add(**rows)
        copied.add(**{name: moved(column) for name, column in rows.items()})
        check_same(again, copied)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "option", "space"),
    [
        (SharedReplayBuffer, "plain", FLOATS),
        (SharedReplayBuffer, "both", BOTH),
        (SharedReplayBuffer, "whose", ODD),
        (PerEnvReplayBuffer, "plain", BOTH),
        (PerEnvReplayBuffer, "three steps", ODD),
        (PrioritizedReplayBuffer, "stored once", FLOATS),
        (PrioritizedReplayBuffer, "plain", Box(-9, 9, (13,), np.float32)),
    ],
)
def test_rows_that_one_kernel_writes_are_those_of_the_cpu(way, kind, option, space, monkeypatch):
    plain, direct = pair(kind, space, option, num_rooms=64)
    steps = Stream(space)
    for number in range(25):  # past the end of the ring
        rows = steps.step()
        plain.add(**rows)
        with monkeypatch.context() as patch:
            seen = device_kernels.use(patch, way)
            direct.add(**{name: moved(column) for name, column in rows.items()})
            assert 1 <= seen.count("add_thread") <= 2
            assert seen.count("count_thread") == (kind is not PerEnvReplayBuffer)
        if number % 4 == 0:
            check_same(plain, direct)
    check_same(plain, direct)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_envs", [1, 3, 9, 23])
@pytest.mark.parametrize("kind", [SharedReplayBuffer, PerEnvReplayBuffer])
def test_four_rows_a_thread_are_any_number_of_rows(way, kind, num_envs, monkeypatch):
    """Less than four, several times four and some more, and all that the ring has."""
    space = Dict({"a": Box(0, 255, (7,), np.uint8), "b": FLOATS, "empty": Box(0, 1, (0,))})
    plain, direct = pair(kind, space, "plain", num_envs=num_envs)
    steps = Stream(space, num_envs=num_envs)
    seen = device_kernels.use(monkeypatch, way)
    for _ in range(5):
        rows = steps.step()
        plain.add(**rows)
        direct.add(**{name: moved(column) for name, column in rows.items()})
        check_same(plain, direct)
    assert "add_thread" in seen


@pytest.mark.parametrize("has_kernel", [False, True])
def test_views_of_the_row_that_is_overwritten_are_copied_first(has_kernel, monkeypatch):
    _, direct = pair(SharedReplayBuffer, FLOATS, "plain", capacity=1, num_envs=1)
    if has_kernel:
        device_kernels.use(monkeypatch, device_kernels.plain)
    steps = Stream(FLOATS, num_envs=1)
    rows = {name: moved(column) for name, column in steps.step().items()}
    direct.add(**rows)
    held = direct.rows()
    direct.add(**{**rows, "obs": held["next_obs"], "next_obs": held["obs"]})
    assert direct.rows()["obs"].equal(rows["next_obs"])
    assert direct.rows()["next_obs"].equal(rows["obs"])


def test_observations_may_have_any_stride_where_they_are_one():
    plain, direct = pair(SharedReplayBuffer, Discrete(9), "stored once", num_envs=1, num_rooms=64)
    for number in range(6):
        rows = Stream(Discrete(9), number, num_envs=1).step()
        rows = {**rows, "obs": np.array([number]), "next_obs": np.array([number + 1])}
        plain.add(**rows)
        tensors = {name: moved(column) for name, column in rows.items()}
        for name in ("obs", "next_obs"):
            tensors[name] = torch.arange(20)[int(rows[name][0]) :][::2][:1]
        direct.add(**tensors)
    check_same(plain, direct)


@pytest.mark.parametrize("kind", [SharedReplayBuffer, PrioritizedReplayBuffer])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_copies_take_more_after_an_add_in_a_graph(kind, copied, monkeypatch):
    state = {"capturing": False}
    monkeypatch.setattr(ReplayStorage, "is_capturing", lambda self: state["capturing"])
    _, direct = pair(kind, FLOATS, "plain")
    rows = Stream(FLOATS).step()
    tensors = {name: moved(column) for name, column in rows.items()}
    direct.add(**tensors)
    state["capturing"] = True
    direct.add(**tensors)
    state["capturing"] = False
    again = copied(direct)
    again.add(**rows)
    assert (len(direct), len(again)) == (8, 12)


@pytest.mark.parametrize("is_shifted", [False, True])
def test_columns_that_a_kernel_cannot_take_are_written_one_by_one(is_shifted, monkeypatch):
    """Those that begin in the middle of a word, and more than it has arguments for."""
    many = Dict({f"{number}": FLOATS for number in range(MAX_COLUMNS // 2)})
    space = Box(-9, 9, (4,), np.float32) if is_shifted else many
    plain, direct = pair(SharedReplayBuffer, space, "plain")
    seen = device_kernels.use(monkeypatch, device_kernels.plain)
    steps = Stream(space)
    for number in range(3):
        rows = steps.step()
        plain.add(**rows)
        tensors = {name: moved(column) for name, column in rows.items()}
        if is_shifted and number == 1:
            shifted = torch.zeros(1 + 4 * NUM_ENVS)[1:].view(NUM_ENVS, 4)
            tensors["obs"] = shifted.copy_(tensors["obs"])
        direct.add(**tensors)
    assert seen.count("add_thread") == (4 if is_shifted else 0)
    check_same(plain, direct)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "kernel",
    [*(partial(add_kernel, unit) for unit in ("uint64", "uint32", "uint8")), count_kernel],
)
def test_kernels_of_adds_spill_nothing(kernel):
    device_kernels.check_resources(kernel(), most_registers=64)


@pytest.mark.parametrize(
    ("kind", "option"),
    fast_are(
        [
            *((SharedReplayBuffer, option) for option in ("plain", "both", "whose")),
            (PerEnvReplayBuffer, "plain"),
            (PrioritizedReplayBuffer, "stored once"),
        ],
        product(RINGS, OPTIONS),
    ),
)
def test_adds_of_both_sides_and_cuts_may_take_turns(kind, option):
    plain, direct = pair(kind, FLOATS, option)
    steps, rng = Stream(FLOATS), np.random.default_rng(5)
    for number in range(80):
        rows = steps.step()
        plain.add(**rows)
        way = rng.integers(3)
        if way == 0:
            direct.add(**rows)
        else:
            direct.add(**{name: moved(column) for name, column in rows.items()})
        if number % 7 == 0:
            ids = rng.permutation(NUM_ENVS)[:2]
            plain.cut_episodes(ids)
            direct.cut_episodes(ids)
        if number % 11 == 0:  # of one env, which tensors go through the host for
            part = {name: column[2:3] for name, column in steps.step().items()}
            plain.add(**part, env_ids=np.array([2]))
            direct.add(**{n: moved(c) for n, c in part.items()}, env_ids=np.array([2]))
        if number % 5 == 0:
            check_same(plain, direct)
    check_same(plain, direct)


@pytest.mark.parametrize(
    ("kind", "option"),
    fast_are(
        [
            (SharedReplayBuffer, "plain"),
            (SharedReplayBuffer, "both"),
            (PerEnvReplayBuffer, "three steps"),
            (PrioritizedReplayBuffer, "both"),
        ],
        product(RINGS, ["plain", "three steps", "both"]),
    ),
)
def test_a_captured_add_goes_on_where_the_device_is(kind, option, monkeypatch):
    """What is called while a graph is captured does what a replay does: the host learns nothing."""
    needed = 64
    plain, direct = pair(kind, FLOATS, option, num_rooms=needed)
    steps, state = Stream(FLOATS), {"capturing": False}
    monkeypatch.setattr(ReplayStorage, "is_capturing", lambda self: state["capturing"])
    for number in range(30):
        rows = steps.step()
        plain.add(**rows)
        state["capturing"] = number % 4 != 0
        before = direct._state.copy()
        direct.add(**{name: moved(column) for name, column in rows.items()})
        if state["capturing"]:
            np.testing.assert_array_equal(direct._state, before)
        state["capturing"] = False
        if number % 5 == 4:
            check_same(plain, direct)
        if number % 9 == 8:
            rows = steps.step()
            plain.add(**rows)
            direct.add(**rows)
            check_same(plain, direct)
    check_same(plain, direct)
    assert direct.sample(16).size == 16
    other = pair(kind, FLOATS, option)[1]
    other.load_state_dict(direct.state_dict())
    check_same(plain, other)
    direct.load_state_dict(other.state_dict())
    check_same(plain, direct)
    if kind is PrioritizedReplayBuffer:
        batch = direct.sample(8)
        with pytest.raises(BufferMisuseError, match=r"pass batch\.indices"):
            direct.update_priorities(batch, torch.ones(8))
        direct.update_priorities(batch.indices, np.ones(8))


def test_what_cannot_be_captured_is_refused(monkeypatch):
    _, direct = pair(SharedReplayBuffer, FLOATS, "stored once")
    steps, state = Stream(FLOATS), {"capturing": True}
    monkeypatch.setattr(ReplayStorage, "is_capturing", lambda self: state["capturing"])

    def add(rows, **more):
        direct.add(**{name: moved(column) for name, column in rows.items()}, **more)

    with pytest.raises(BufferMisuseError, match="add some before an add is captured"):
        add(steps.step())
    state["capturing"] = False
    add(steps.step())
    state["capturing"] = True
    with pytest.raises(BufferMisuseError, match=r"call reserve_final_obs\(27\) before"):
        add(steps.step())
    part = {name: column[:1] for name, column in steps.step().items()}
    with pytest.raises(BufferMisuseError, match="expected whole steps of all 4 envs"):
        add(part, env_ids=np.array([0]))
    state["capturing"] = False
    assert len(direct) == 4
    direct.reserve_final_obs(27)
    state["capturing"] = True
    add(steps.step())
    state["capturing"] = False
    assert len(direct) == 8


def test_room_for_final_observations_grows_between_adds():
    """Every episode takes one step, so every row has a final observation."""
    plain, direct = pair(SharedReplayBuffer, FLOATS, "stored once", capacity=200)
    steps = Stream(FLOATS)
    for _ in range(70):
        rows = steps.step()
        rows["truncations"][:] = True
        plain.add(**rows)
        direct.add(**{name: moved(column) for name, column in rows.items()})
    assert len(direct._storage.successors.finals) >= 196
    check_same(plain, direct)


def test_the_host_knows_the_least_that_a_late_number_may_be(monkeypatch):
    numbers = LateNumbers(torch.device("cpu"))
    arrived = []

    class Event:
        def __init__(self, number):
            self.number = number

        def record(self, stream):
            pass

        def query(self):
            return self.number in arrived

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    numbers._events = [Event(number) for number in range(8)]
    numbers.reset(100)
    assert numbers.at_least() == 100
    for value in (98, 95):  # into pages 7 and 6, the latter comes late
        numbers.note(torch.tensor(value), 10)
    assert numbers.at_least() == 80
    arrived.append(7)
    assert numbers.at_least() == 88
    for _ in range(20):  # more than there are pages for
        numbers.note(torch.tensor(50), 1)
    assert numbers.at_least() == 68
    arrived += range(8)
    assert numbers.at_least() == 50 - 13  # the last ones were not sent
    numbers.note(torch.tensor(44), 1)
    assert numbers.at_least() == 44
    numbers.reset(7)
    assert numbers.at_least() == 7
