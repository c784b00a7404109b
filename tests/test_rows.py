"""Rows of batched observations: memory, conversions, and writing into arrays of the caller."""

import itertools
from collections import OrderedDict

import numpy as np
import pytest
from envs import ARRAY_SPACES, SPACES, Pair, PairSpace, arrays_in
from equality import assert_same
from gymnasium import spaces
from gymnasium.spaces import GraphInstance
from gymnasium.vector.utils import concatenate, create_empty_array

from vecenv import ObservationError, SlotError
from vecenv.core.rows import ObservationRows, StepRows, aligned_zeros, check_slot_array, copy_batch

BOX = spaces.Box(-9, 9, (3,), np.float32)


def samples(space, count, seed=0):
    space.seed(seed)
    return [space.sample() for _ in range(count)]


def put(rows, index, obs):
    """Write a row as the loop over envs does: fast if possible, else by `write`."""
    try:
        rows.target[rows.keys[index]] = obs
    except (TypeError, ValueError, AttributeError, OverflowError, LookupError):
        rows.write(index, obs)


def write(rows, index, obs):
    rows.write(index, obs)


def batch_of(space, items):
    return concatenate(space, items, create_empty_array(space, len(items)))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (7, 3, 1)])
@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float32, np.float64, np.dtype(">i2")])
def test_aligned_zeros(shape, dtype):
    arrays = [aligned_zeros(shape, dtype) for _ in range(9)]
    for array in arrays:
        assert_same(array, np.zeros(shape, dtype))
        assert array.size == 0 or array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous
        assert array.flags.writeable
    for one, other in itertools.pairwise(arrays):
        assert not np.shares_memory(one, other)


@pytest.mark.parametrize("way", [write, put])
@pytest.mark.parametrize("name", SPACES)
def test_a_batch_of_rows_is_the_batch_gymnasium_makes(name, way):
    space = SPACES[name]
    rows = ObservationRows.make(space, 4)
    for round_number in range(2):
        items = samples(space, 4, seed=round_number)
        for index, obs in enumerate(items):
            way(rows, index, obs)
        assert_same(rows.batch(), batch_of(space, items))
        assert_same(rows.take(np.array([2, 0])), batch_of(space, [items[2], items[0]]))


@pytest.mark.parametrize("name", SPACES)
def test_taken_rows_and_copies_stay_when_rows_are_written(name):
    space = SPACES[name]
    rows = ObservationRows.make(space, 3)
    items = samples(space, 6, seed=3)
    for index in range(3):
        rows.write(index, items[index])
    taken, copied = rows.take(np.array([1])), copy_batch(rows.batch())
    for index in range(3):
        rows.write(index, items[3 + index])
    assert_same(taken, batch_of(space, [items[1]]))
    assert_same(copied, batch_of(space, items[:3]))


def test_taken_objects_are_copies_of_what_the_env_may_go_on_changing():
    rows = ObservationRows.make(PairSpace(), 2)
    pair = Pair(1, 2)
    rows.write(0, pair)
    rows.write(1, Pair(3, 4))
    taken = rows.take(np.array([0, 1]))
    pair.left = 100
    assert taken == (Pair(1, 2), Pair(3, 4))


@pytest.mark.parametrize("name", ARRAY_SPACES)
def test_rows_over_the_callers_arrays_write_into_them(name):
    space = ARRAY_SPACES[name]
    own = ObservationRows.make(space, 3)
    target = create_empty_array(space, 3)
    rows = own.over(target)
    items = samples(space, 3, seed=5)
    for index, obs in enumerate(items):
        rows.write(index, obs)
    assert_same(target, batch_of(space, items))
    for array, written in zip(arrays_in(target), arrays_in(rows.batch()), strict=True):
        assert array is written
    own.put(range(3), rows.batch())
    assert_same(own.batch(), target)
    for mine, theirs in zip(arrays_in(own.batch()), arrays_in(target), strict=True):
        assert not np.shares_memory(mine, theirs)


def test_rows_are_allocated_by_the_allocator_given():
    requests = []

    def allocate(shape, dtype):
        requests.append((shape, np.dtype(dtype)))
        return np.zeros(shape, dtype)

    space = spaces.Dict(a=BOX, b=spaces.Tuple([spaces.Discrete(3), spaces.Text(3)]))
    ObservationRows.make(space, 5, allocate)
    assert requests == [((5, 3), np.dtype("f4")), ((5,), np.dtype("i8"))]


@pytest.mark.parametrize(
    ("space", "obs", "expected"),
    [
        (BOX, [1, 2, 3], [1, 2, 3]),
        (BOX, np.arange(3), [0, 1, 2]),
        (BOX, np.arange(3, dtype=np.float64) / 4, [0, 0.25, 0.5]),
        (BOX, np.arange(6, dtype=np.float32)[::2], [0, 2, 4]),
        (BOX, (True, False, True), [1, 0, 1]),
        (spaces.Box(-9, 9, (2, 2)), [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        (spaces.Box(-9, 9, (2, 2)), np.eye(2, dtype=int), [[1, 0], [0, 1]]),
        (spaces.Box(-9, 9, ()), 3, 3),
        (spaces.Box(-9, 9, ()), np.float64(0.5), 0.5),
        (spaces.Box(-9, 9, ()), np.array(2.5), 2.5),
        (spaces.Discrete(9), np.int8(4), 4),
        (spaces.Discrete(9), True, 1),
        (spaces.Discrete(9), np.bool_(True), 1),
        (spaces.Discrete(9), np.array(4), 4),
        (spaces.MultiBinary(2), np.array([True, False]), [1, 0]),
    ],
)
@pytest.mark.parametrize("way", [write, put])
def test_what_loses_nothing_in_kind_is_converted(space, obs, expected, way):
    rows = ObservationRows.make(space, 2)
    way(rows, 1, obs)
    assert_same(rows.batch(), np.array([np.zeros_like(expected), expected], space.dtype))


@pytest.mark.parametrize(
    ("space", "obs", "message"),
    [
        (BOX, np.zeros(4, np.float32), r"env 1 .*shape \(4,\) and dtype float32.*shape \(3,\)"),
        (BOX, np.zeros((1, 3), np.float32), r"env 1 .*shape \(1, 3\)"),
        (BOX, 2.0, r"env 1 .*shape \(\)"),
        (BOX, np.zeros(3, complex), r"env 1 .*dtype complex128, expected .* dtype float32"),
        (BOX, None, r"env 1 .*expected shape \(3,\) and dtype float32.*correct the env"),
        (spaces.Discrete(3), 0.5, r"env 1 .*dtype float64, expected shape \(\) and dtype int64"),
        (spaces.Discrete(3), [1], r"env 1 .*shape \(1,\)"),
        (spaces.Discrete(3), "up", r"env 1 "),
        (spaces.Box(0, 255, (2,), np.uint8), [0.5, 1.5], r"env 1 .*float64.*dtype uint8"),
        (spaces.Box(0, 255, (1, 2), np.uint8), np.zeros((1, 2)), r"env 1 .*float64.*dtype uint8"),
        (spaces.Box(-1, 1, (2, 3)), np.zeros((1, 3), np.float32), r"env 1 .*shape \(1, 3\)"),
        (spaces.Box(-1, 1, (2, 3)), np.float32(0), r"env 1 .*shape \(\)"),
        (spaces.Box(-1, 1, (), np.float16), np.zeros(1, np.float16), r"env 1 .*shape \(1,\)"),
        (spaces.Dict(a=BOX), {}, r"env 1 returned dict without part 'a'"),
        (spaces.Dict(a=BOX), {"a": [1]}, r"env 1 .*shape \(1,\)"),
        (spaces.Dict(a=BOX), None, r"env 1 returned NoneType"),
        (spaces.Dict(a=BOX), np.zeros(3), r"env 1 returned ndarray"),
        (spaces.Tuple([BOX, BOX]), (np.zeros(3, np.float32),), r"env 1 returned tuple"),
    ],
)
@pytest.mark.parametrize("way", [write, put])
def test_what_does_not_fit_names_the_env(space, obs, message, way):
    rows = ObservationRows.make(space, 3)
    with pytest.raises(ObservationError, match=message):
        way(rows, 1, obs)


def good_slot():
    return np.zeros((4, 3), np.float32)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 4), np.float32), r"out.obs has shape \(4, 4\) and .*expected shape \(4, 3\)"),
        (np.zeros((3, 3), np.float32), r"out.obs has shape \(3, 3\)"),
        (np.zeros((4, 3)), r"dtype float64, expected shape \(4, 3\) and dtype float32"),
        (np.zeros((3, 4), np.float32).T, r"must be C-contiguous.*strides are \(4, 16"),
        (np.zeros((8, 3), np.float32)[::2], r"C-contiguous.*use `envs.allocate`"),
        (np.broadcast_to(np.float32(0), (4, 3)), r"C-contiguous, aligned"),
        ([[0.0] * 3] * 4, "must be a NumPy array, got list"),
        (None, "must be a NumPy array, got NoneType"),
    ],
)
def test_slots_of_wrong_kind_are_refused(array, message):
    with pytest.raises(SlotError, match=message):
        ObservationRows.make(BOX, 4).over(array)


def test_read_only_slots_are_refused():
    array = good_slot()
    array.flags.writeable = False
    with pytest.raises(SlotError, match="writeable=False"):
        ObservationRows.make(BOX, 4).over(array)


def test_memory_maps_are_arrays_too(tmp_path):
    """Subclasses of ndarray have the layout they have."""
    mapped = np.memmap(tmp_path / "obs", np.float32, "w+", shape=(4, 3))
    rows = ObservationRows.make(BOX, 4).over(mapped)
    rows.write(2, np.ones(3, np.float32))
    assert mapped.sum() == 3
    check_slot_array("obs", mapped, (4, 3), (np.dtype("f4"),))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"b": good_slot()}, r"out.obs has the parts \['b'\], expected \['a'\]"),
        ({}, r"parts \[\], expected \['a'\]"),
        ({"a": np.zeros((4, 2), np.float32)}, r"out.*shape \(4, 2\).*expected shape \(4, 3\)"),
        (good_slot(), r"out.obs .*\['a'\]"),
        (None, r"out.obs .*\['a'\]"),
    ],
)
def test_nested_slots_need_the_parts_of_the_space(batch, message):
    with pytest.raises(SlotError, match=message):
        ObservationRows.make(spaces.Dict(a=BOX), 4).over(batch)


def test_spaces_without_fixed_shape_have_no_slot():
    for space in (spaces.Text(3), PairSpace(), spaces.Dict(a=BOX, b=spaces.Text(3))):
        rows = ObservationRows.make(space, 2)
        batch = create_empty_array(space, 2)
        with pytest.raises(SlotError, match="has none, step without `out`"):
            rows.over(batch)


def test_copies_share_no_memory_and_keep_types():
    graph = GraphInstance(np.ones((2, 2)), None, None)
    batch = {"a": np.ones(3), "b": (np.ones(2), (graph, "text")), "c": OrderedDict(d=np.ones(1))}
    batch["d"] = np.array([[Pair(1, 2)]], object)
    copied = copy_batch(batch)
    assert_same(copied, batch)
    assert not np.shares_memory(copied["a"], batch["a"])
    assert not np.shares_memory(copied["b"][1][0].nodes, graph.nodes)
    assert not np.shares_memory(copied["c"]["d"], batch["c"]["d"])
    assert copied["d"][0, 0] is not batch["d"][0, 0]


def test_results_of_some_envs_are_written_into_their_rows():
    rows = StepRows.make(BOX, 4)
    obs = np.arange(6, dtype=np.float32).reshape(2, 3)
    flags = np.array([True, False]), np.array([False, True])
    rows.put(np.array([3, 1]), (obs, np.array([5.0, 6.0]), *flags))
    assert_same(rows.obs.batch()[[3, 1]], obs)
    assert rows.rewards.tolist() == [0, 6, 0, 5]
    assert rows.terminations.tolist() == [False, False, False, True]
    assert rows.truncations.tolist() == [False, True, False, False]
