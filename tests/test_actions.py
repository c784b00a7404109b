"""What actions are taken, what is refused before anything is stepped, and what the message says."""

import functools
from copy import deepcopy

import numpy as np
import pytest
from envs import ARRAY_SPACES, SPACES, RandomEnv, counters
from equality import assert_same
from gymnasium import spaces
from gymnasium.error import InvalidAction, NoAsyncCallError
from gymnasium.vector.utils import batch_space, iterate

from vecenv import ActionError, ActionTypeError, SyncVectorEnv
from vecenv.core.actions import ActionBatcher

BOX = spaces.Box(-1, 1, (2,))
DISCRETE = spaces.Discrete(3)
DICT = spaces.Dict(gear=spaces.Discrete(3), wheel=spaces.Box(-1, 1, (2,)))
TUPLE = spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)])


class EchoEnv(RandomEnv):
    """Keeps the actions it gets."""

    def __init__(self, action_space):
        super().__init__(spaces.Discrete(2), action_space, end_chance=0)
        self.actions = []

    def step(self, action):
        self.actions.append(action)
        return super().step(action)


def echo_envs(space, num_envs=3):
    envs = SyncVectorEnv([functools.partial(EchoEnv, space)] * num_envs)
    envs.reset(seed=0)
    return envs


REFUSED = {
    "too few": (DISCRETE, [0, 1], ActionError, r"shape \(2,\), expected \(3,\)"),
    "too many": (DISCRETE, [0, 1, 2, 0], ActionError, r"shape \(4,\), expected \(3,\)"),
    "one for all": (DISCRETE, 1, ActionTypeError, r"shape \(\), expected \(3,\)"),
    "a column": (DISCRETE, [[0], [1], [2]], ActionError, r"shape \(3, 1\), expected \(3,\)"),
    "floats": (DISCRETE, [0.0, 1.0, 2.0], ActionTypeError, "dtype float64, expected an integer"),
    "text": (DISCRETE, ["a", "b", "c"], ActionTypeError, "dtype <U1, expected an integer"),
    "nothing": (DISCRETE, None, ActionTypeError, r"shape \(\), expected \(3,\)"),
    "objects": (DISCRETE, [None, None, None], ActionTypeError, "dtype object, expected an integ"),
    "ragged": (BOX, [[0, 1], [0], [0, 1]], ActionError, "can't be made one array"),
    "box too few": (BOX, np.zeros((2, 2)), ActionError, r"shape \(2, 2\), expected \(3, 2\)"),
    "box of one env": (BOX, np.zeros(2), ActionError, r"shape \(2,\), expected \(3, 2\)"),
    "box too wide": (BOX, np.zeros((3, 3)), ActionError, r"shape \(3, 3\), expected \(3, 2\)"),
    "box text": (BOX, np.full((3, 2), "a"), ActionTypeError, "dtype <U1, expected a floating dty"),
    "box complex": (BOX, np.zeros((3, 2), complex), ActionTypeError, "dtype complex128, expected"),
    "whole box": (
        spaces.Box(0, 255, (2,), np.uint8),
        np.zeros((3, 2)),
        ActionTypeError,
        "dtype float64, expected an integer dtype",
    ),
    "bits": (spaces.MultiBinary(2), np.zeros((3, 2)), ActionTypeError, "dtype float64, expected"),
    "levels": (
        spaces.MultiDiscrete([2, 3]),
        np.zeros((3, 3), int),
        ActionError,
        r"shape \(3, 3\), expected \(3, 2\)",
    ),
    "no dict": (DICT, [0, 1, 2], ActionTypeError, r"dict with the keys \['gear', 'wheel'\], got l"),
    "dicts": (DICT, [{}, {}, {}], ActionTypeError, "must be a dict with the keys.*got list"),
    "no key": (DICT, {"gear": [0, 1, 2]}, ActionTypeError, r"'wheel'\], got \['gear'\]"),
    "part too short": (
        DICT,
        {"gear": [0, 1], "wheel": np.zeros((3, 2))},
        ActionError,
        r"actions\['gear'\] has shape \(2,\), expected \(3,\)",
    ),
    "no tuple": (TUPLE, 5, ActionTypeError, "must be a tuple of 2 batches.*got int"),
    "tuple per env": (TUPLE, ((0, [0, 1]),) * 3, ActionTypeError, "tuple of 2 batches.*got 3"),
    "tuple part": (
        TUPLE,
        ([0, 1, 2], np.zeros((2, 2), int)),
        ActionError,
        r"actions\[1\] has shape \(2, 2\), expected \(3, 2\)",
    ),
    "texts": (spaces.Text(3), ("a", "b"), ActionError, "has 2 entries, expected 3"),
    "one text": (spaces.Text(3), 7, ActionTypeError, "is one int, expected 3: one of Text"),
}


@pytest.mark.parametrize("call", ["step", "send"])
@pytest.mark.parametrize("name", REFUSED)
def test_wrong_actions_are_refused_and_nothing_is_stepped(name, call):
    space, actions, error, message = REFUSED[name]
    envs = echo_envs(space)
    with pytest.raises(error, match=message):
        getattr(envs, call)(actions)
    assert envs.get_attr("actions") == ([], [], [])
    with pytest.raises(NoAsyncCallError):
        envs.recv()
    envs.step(envs.action_space.sample())  # the vector env stays usable
    assert [len(found) for found in envs.get_attr("actions")] == [1, 1, 1]


@pytest.mark.parametrize("name", ["too few", "floats", "one for all"])
def test_errors_can_be_caught_as_gymnasiums_and_as_pythons(name):
    space, actions, error, _ = REFUSED[name]
    with pytest.raises(InvalidAction):
        echo_envs(space).step(actions)
    with pytest.raises(ValueError, match="actions"):
        echo_envs(space).step(actions)
    assert issubclass(error, TypeError) == (name != "too few")


def test_a_missing_action_is_explained():
    with pytest.raises(ActionError, match="pass one action per env, including envs about to reset"):
        echo_envs(DISCRETE).step([0, 1])


@pytest.mark.parametrize(
    ("space", "actions", "message"),
    [
        (BOX, [[0, 0], [0, np.nan], [0, 0]], r"actions\[1\] \(env 1\) is .*nan.*has no NaN"),
        (spaces.Box(-1, 1, ()), [0.5, 0.5, np.nan], r"actions\[2\] \(env 2\) is nan"),
        (
            DICT,
            {"gear": [0, 0, 0], "wheel": np.full((3, 2), np.nan)},
            r"actions\['wheel'\]\[0\] \(env 0\)",
        ),
    ],
)
def test_nan_names_the_env(space, actions, message):
    envs = echo_envs(space)
    with pytest.raises(ActionError, match=message):
        envs.step(actions)
    assert envs.get_attr("actions") == ([], [], [])


def test_nan_in_a_send_names_the_env_it_was_for():
    envs = echo_envs(BOX)
    with pytest.raises(ActionError, match=r"actions\[1\] \(env 0\) is \[nan  0.\]"):
        envs.send([[0.0, 0.0], [np.nan, 0.0]], [2, 0])
    envs.send([[0.0, 0.0]], [0])
    assert envs.recv().env_ids.tolist() == [0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("kind", ["infinities", "largest"])
def test_actions_that_are_huge_but_numbers_pass_without_a_warning(kind, dtype):
    """Looking for NaN by a sum must not overflow aloud."""
    space = spaces.Box(-np.inf, np.inf, (2,), dtype)
    big = np.inf if kind == "infinities" else np.finfo(dtype).max
    actions = np.array([[big, -big], [big, big], [-big, -big]], dtype)
    envs = echo_envs(space)
    envs.step(actions)
    assert_same([found[0] for found in envs.get_attr("actions")], list(actions))
    actions[2, 0] = np.nan
    with pytest.raises(ActionError, match="env 2"):
        envs.step(actions)


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (DISCRETE, [0, 1, 2]),
        (DISCRETE, (0, 1, 2)),
        (DISCRETE, np.array([0, 1, 2], np.uint8)),
        (DISCRETE, [np.int64(0), np.int32(1), 2]),
        (BOX, [[0, 1], [1, 0], [0, 0]]),
        (BOX, np.zeros((3, 2), np.float64)),
        (BOX, np.zeros((6, 4))[::2, ::2]),
        (spaces.MultiBinary(2), np.ones((3, 2), bool)),
        (spaces.MultiDiscrete([3, 3]), [[0, 1], [1, 2], [2, 0]]),
        (DICT, {"wheel": np.zeros((3, 2)), "gear": [0, 1, 2]}),
        (TUPLE, [[0, 1, 2], [[0, 1]] * 3]),
    ],
)
def test_what_numpy_takes_is_taken(space, actions):
    envs = echo_envs(space)
    envs.step(actions)
    envs.send(actions)
    envs.recv()
    one, two = zip(*envs.get_attr("actions"), strict=True)
    for env_actions in (one, two):
        for k, action in enumerate(env_actions):
            if isinstance(space, spaces.Dict):
                assert action["gear"] == actions["gear"][k]
                assert action["wheel"].tolist() == actions["wheel"][k].tolist()
            elif isinstance(space, spaces.Tuple):
                assert action[0] == actions[0][k]
                assert list(action[1]) == actions[1][k]
            else:
                assert np.array_equal(action, actions[k])


@pytest.mark.parametrize("name", SPACES)
def test_actions_come_to_the_envs_as_gymnasium_hands_them_out(name):
    """By step, by send and by sends of some, with the types of Gymnasium's `iterate`."""
    envs = echo_envs(SPACES[name])
    batched = batch_space(SPACES[name], 3)
    batched.seed(5)
    actions = batched.sample()
    expected = list(iterate(batched, actions))
    envs.step(actions)
    envs.send(actions)
    envs.recv()
    for env_actions, one in zip(envs.get_attr("actions"), expected, strict=True):
        assert_same(env_actions, [one, one])


@pytest.mark.parametrize("name", ARRAY_SPACES)
def test_send_keeps_a_copy_of_the_actions(name):
    """The caller may reuse its arrays at once."""
    envs = echo_envs(SPACES[name])
    envs.action_space.seed(3)
    actions = envs.action_space.sample()
    expected = list(iterate(envs.action_space, deepcopy(actions)))
    envs.send(actions)
    for array in leaves(actions):
        array[...] = 1
    envs.recv()
    assert_same([found[0] for found in envs.get_attr("actions")], expected)


def leaves(actions):
    if isinstance(actions, np.ndarray):
        yield actions
    else:
        for part in actions.values() if isinstance(actions, dict) else actions:
            yield from leaves(part)


@pytest.mark.parametrize("name", SPACES)
def test_sends_of_some_envs_take_one_action_each(name):
    space = SPACES[name]
    batcher = ActionBatcher(space, batch_space(space, 5), 5)
    two = batch_space(space, 2)
    two.seed(1)
    actions = two.sample()
    ids = np.array([3, 1])
    checked = batcher.check(actions, ids)
    assert_same(batcher.snapshot(checked), list(iterate(two, actions)))
    with pytest.raises(ActionError):
        batcher.check(actions)  # for all five
    with pytest.raises(ActionError):
        batcher.check(actions, np.array([3, 1, 2]))


def test_out_of_range_actions_are_the_envs_business():
    """Gymnasium leaves them to the env too, which may raise, clip or wrap them."""
    envs = echo_envs(DISCRETE)
    envs.step([7, -1, 100])
    assert [found[0] for found in envs.get_attr("actions")] == [7, -1, 100]


def test_actions_for_envs_about_to_reset_are_needed_but_ignored():
    envs = SyncVectorEnv(counters([1, 1]))
    envs.reset()
    envs.step([0, 0])
    with pytest.raises(ActionError, match="including envs about to reset"):
        envs.step([0])
    envs.step([7, 7])
    assert not any(("step", 7) in calls for calls in envs.get_attr("calls"))
