"""Rows of batched observations: memory, conversions, and writing into arrays of the caller."""

from collections import OrderedDict

import numpy as np
import pytest
from envs import Pair
from equality import assert_same
from gymnasium import spaces
from gymnasium.spaces import GraphInstance
from gymnasium.vector.utils import concatenate, create_empty_array

from vecenv import ObservationError, SlotError
from vecenv.core.rows import ObservationRows, StepRows, copy_batch

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
