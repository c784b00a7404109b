"""SyncVectorEnv: memory of results, factories, spaces, seeds and attributes."""

import functools

import numpy as np
import pytest
from envs import (
    ARRAY_SPACES,
    NUM_ENVS,
    SPACES,
    CounterEnv,
    arrays_in,
    counters,
    random_envs,
)
from equality import assert_same
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from vecenv import EnvCreationError, SyncVectorEnv


@pytest.mark.parametrize("name", [*ARRAY_SPACES])
def test_copy_decides_whether_observations_are_views(name):
    for copy in (True, False):
        envs = random_envs(SPACES[name], copy=copy)
        first, _ = envs.reset(seed=0)
        second = envs.step([0] * NUM_ENVS)[0]
        for one, two in zip(arrays_in(first), arrays_in(second), strict=True):
            assert np.shares_memory(one, two) == (not copy and one.size > 0)


def test_rewards_and_flags_are_always_the_callers():
    envs = SyncVectorEnv(counters([1, 2]), copy=False)
    envs.reset()
    first = envs.step([0, 0])[1:4]
    kept = [np.copy(array) for array in first]
    envs.step([0, 0])
    assert_same([*first], kept)


@pytest.mark.parametrize("error", [FileNotFoundError("no map"), ValueError("bad"), KeyError("x")])
def test_a_failing_factory_is_named_and_the_envs_made_are_closed(error):
    made = []

    def good():
        made.append(CounterEnv())
        return made[-1]

    def broken():
        raise error

    message = f"env 2 of 4 failed with {type(error).__name__}: .*env_fns\\[2\\].*broken"
    with pytest.raises(EnvCreationError, match=message) as caught:
        SyncVectorEnv([good, good, broken, good])
    assert caught.value.__cause__ is error
    assert [env.is_closed for env in made] == [True, True]


def test_a_factory_that_makes_no_env_is_named_and_the_envs_made_are_closed():
    made = []

    def good():
        made.append(CounterEnv())
        return made[-1]

    with pytest.raises(EnvCreationError, match=r"env 1 of 2.*NoneType"):
        SyncVectorEnv([good, lambda: None])
    assert [env.is_closed for env in made] == [True]


def closing_envs(observation_spaces, action_spaces=None, **kwargs):
    """Make envs with these spaces; return the error and whether all envs were closed."""
    made = []

    def make(observation_space, action_space):
        env = CounterEnv()
        env.observation_space, env.action_space = observation_space, action_space
        made.append(env)
        return env

    action_spaces = action_spaces or [spaces.Discrete(2)] * len(observation_spaces)
    env_fns = [
        functools.partial(make, *pair)
        for pair in zip(observation_spaces, action_spaces, strict=True)
    ]
    with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
        SyncVectorEnv(env_fns, **kwargs)
    assert all(env.is_closed for env in made)
    return caught.value


BOX_2, BOX_3 = spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (3,))


@pytest.mark.parametrize(
    ("spaces_of_envs", "mode", "error_type", "parts"),
    [
        ([BOX_2, BOX_2, BOX_3], "same", RuntimeError, ["env 2", "(3,)", "env 0", "(2,)"]),
        ([BOX_2, spaces.Box(-2, 2, (2,))], "same", RuntimeError, ["env 1", "different"]),
        ([BOX_2, spaces.Discrete(2)], "same", RuntimeError, ["env 1", "Discrete(2)"]),
        ([BOX_2, BOX_3], "different", RuntimeError, ["env 1", "(3,)", "shape and dtype"]),
        (
            [BOX_2, spaces.Box(-1, 1, (2,), np.float64)],
            "different",
            RuntimeError,
            ["env 1", "float64"],
        ),
        (
            [BOX_2, BOX_3],
            (spaces.Box(-1, 1, (2, 2)), BOX_2),
            RuntimeError,
            ["env 1", "(3,)", "custom space"],
        ),
        ([BOX_2], "sometimes", ValueError, ["'same' or 'different'", "sometimes"]),
        ([BOX_2], ("a", BOX_2), TypeError, ["(batched space, single space)", "str"]),
    ],
)
def test_envs_with_other_observation_spaces_are_refused(spaces_of_envs, mode, error_type, parts):
    error = closing_envs(spaces_of_envs, observation_mode=mode)
    assert type(error) is error_type
    for part in parts:
        assert part in str(error)


def test_envs_with_other_action_spaces_are_refused():
    error = closing_envs([BOX_2] * 3, [spaces.Discrete(2), spaces.Discrete(2), spaces.Discrete(3)])
    assert type(error) is RuntimeError
    assert "action space of env 2 is Discrete(3), expected Discrete(2), that of env 0" in str(error)


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        ([1, 2, 3], ValueError, r"num_envs=2 but got length=3"),
        ([], ValueError, r"num_envs=2 but got length=0"),
        (1.5, TypeError, "must be None, an integer or a list of them, got 1.5"),
        ("12", TypeError, "must be None, an integer or a list of them"),
        ([1, "2"], TypeError, "seed|integer"),
        ([1, 2.5], TypeError, "seed|integer"),
    ],
)
def test_wrong_seeds_are_refused_and_nothing_is_reset(seed, error, message):
    envs = SyncVectorEnv(counters([9, 9]))
    envs.reset()
    envs.step([0, 0])
    with pytest.raises(error, match=message):
        envs.reset(seed=seed)
    assert [len(calls) for calls in envs.get_attr("calls")] == [2, 2]
    assert envs.step([0, 0])[1].tolist() == [2, 2]


@pytest.mark.parametrize("options", [[{"a": 1}] * 2, "a", 3])
def test_options_that_are_no_dict_are_refused_and_nothing_is_reset(options):
    envs = SyncVectorEnv(counters([9, 9]))
    envs.reset()
    with pytest.raises(TypeError, match=r"options is .*, expected None or a dict"):
        envs.reset(options=options)
    assert [len(calls) for calls in envs.get_attr("calls")] == [1, 1]


@pytest.mark.parametrize("seed", [3, np.int64(3), [3, 4], (3, 4), np.array([3, 4])])
def test_seeds_of_the_envs(seed):
    envs = SyncVectorEnv(counters([9, 9]))
    envs.reset(seed=seed)
    for i, calls in enumerate(envs.get_attr("calls")):
        assert calls == [("reset", 3 + i, None)]
        assert type(calls[0][1]) is int


def test_close_closes_every_env_and_raises_the_first_error():
    class Stuck(CounterEnv):
        def close(self):
            super().close()
            raise OSError(f"port of {self.name} is stuck")

    envs = SyncVectorEnv([CounterEnv, lambda: Stuck(1), lambda: Stuck(2), CounterEnv])
    with pytest.raises(OSError, match="port of 1 is stuck") as caught:
        envs.close()
    assert caught.value.__notes__ == ["This came from env 1 of 4, in close()."]
    assert [env.is_closed for env in envs.envs] == [True] * 4
    envs.close()
    with pytest.raises(ClosedEnvironmentError):
        envs.reset()


def test_envs_can_be_replaced_one_by_one():
    envs = SyncVectorEnv(counters([9, 9]))
    envs.envs[1] = CounterEnv(name=8)
    envs.reset()
    assert envs.step([0, 0])[0].tolist() == [[0, 0, 1], [8, 0, 1]]


def test_no_env_at_all_is_refused():
    with pytest.raises(ValueError, match="needs at least one env"):
        SyncVectorEnv([])


class Breaks(CounterEnv):
    def reset(self, *, seed=None, options=None):
        if options:
            raise ValueError("lost key")
        return super().reset(seed=seed)

    def step(self, action):
        if action == 1:
            raise ValueError("broken joint")
        return super().step(action)


def test_after_an_envs_exception_sync_asks_for_a_reset_too():
    envs = SyncVectorEnv([lambda: CounterEnv(5), lambda: Breaks(5)])
    envs.reset()
    with pytest.raises(ValueError, match="broken joint"):
        envs.step([0, 1])
    with pytest.raises(ResetNeeded, match="ValueError: broken joint"):
        envs.step([0, 0])
    envs.reset()
    envs.step([0, 0])
    with pytest.raises(ValueError, match="lost key"):
        envs.reset(options={"key": 1})
    with pytest.raises(ResetNeeded, match="ValueError: lost key"):
        envs.step([0, 0])
