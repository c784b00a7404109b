"""What actions are taken, what is refused before anything is stepped, and what the message says."""

import functools

import numpy as np
import pytest
from envs import RandomEnv
from equality import assert_same
from gymnasium import spaces
from gymnasium.error import InvalidAction, NoAsyncCallError

from vecenv import ActionError, ActionTypeError, SyncVectorEnv

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
    "one for all": (DISCRETE, 1, ActionTypeError, r"shape \(\), expected \(3,\)"),
    "floats": (DISCRETE, [0.0, 1.0, 2.0], ActionTypeError, "dtype float64, expected an integer"),
    "nothing": (DISCRETE, None, ActionTypeError, r"shape \(\), expected \(3,\)"),
    "ragged": (BOX, [[0, 1], [0], [0, 1]], ActionError, "can't be made one array"),
    "box too wide": (BOX, np.zeros((3, 3)), ActionError, r"shape \(3, 3\), expected \(3, 2\)"),
    "bits": (spaces.MultiBinary(2), np.zeros((3, 2)), ActionTypeError, "dtype float64, expected"),
    "no dict": (DICT, [0, 1, 2], ActionTypeError, r"dict with the keys \['gear', 'wheel'\], got l"),
    "no key": (DICT, {"gear": [0, 1, 2]}, ActionTypeError, r"'wheel'\], got \['gear'\]"),
    "part too short": (
        DICT,
        {"gear": [0, 1], "wheel": np.zeros((3, 2))},
        ActionError,
        r"actions\['gear'\] has shape \(2,\), expected \(3,\)",
    ),
    "tuple part": (
        TUPLE,
        ([0, 1, 2], np.zeros((2, 2), int)),
        ActionError,
        r"actions\[1\] has shape \(2, 2\), expected \(3, 2\)",
    ),
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
