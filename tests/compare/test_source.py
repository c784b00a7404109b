"""Which env is meant by a name, and what is said if there is none."""

import pickle
from contextlib import closing

import gymnasium as gym
import pytest
from compare.toy_envs import Counter

from vecenv import make_vec
from vecenv.compare.stepping import BackendUnavailableError, read_env_kwargs, read_source


def test_ids_are_found_with_module_and_without_version():
    for name in ("CartPole-v1", "CartPole", "vecenv:Synthetic-v0", "Synthetic-v0"):
        source = read_source(name)
        env = source.env_fn()()
        assert isinstance(env, gym.Env)


def test_keyword_arguments_reach_the_env():
    assert read_source("compare.toy_envs:Counter", {"length": 9}).env_fn()().length == 9
    env = read_source("Synthetic-v0", {"episode_length": 9}).env_fn()()
    assert env.unwrapped._length == 9


def test_what_makes_envs_can_be_pickled():
    made = pickle.loads(pickle.dumps(read_source("compare.toy_envs:Counter").env_fn()))()
    assert isinstance(made, Counter)


def test_cartpole_has_a_compiled_twin_and_other_envs_say_that_they_have_none():
    envs = read_source("CartPole-v1").make_compiled(3)
    assert (type(envs).__name__, envs.num_envs) == ("CartPoleVectorEnv", 3)
    with pytest.raises(BackendUnavailableError, match="Blackjack-v1 is not compiled"):
        read_source("Blackjack-v1").make_compiled(3)
    with pytest.raises(BackendUnavailableError, match="is a factory of single envs"):
        read_source("compare.toy_envs:Counter").make_compiled(3)
    with pytest.raises(BackendUnavailableError, match="has no single envs"):
        read_source("vecenv.jit.cartpole:CARTPOLE").env_fn()


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("CartPole-v2", ValueError, "did you mean CartPole-v1"),
        ("compare.toy_envs:nothing", ValueError, "callables there: .*Counter.*no_level"),
        ("compare.toy_envs:NOT_CALLABLE", ValueError, "is 3, expected a callable"),
        ("no_such_module:Env-v0", ImportError, "no_such_module"),
    ],
)
def test_unknown_names_are_answered_with_what_there_is(name, error, words):
    with pytest.raises(error, match=words):
        read_source(name)


@pytest.mark.parametrize(
    ("texts", "words"),
    [(["cpu_ms"], "'cpu_ms', expected NAME=VALUE"), (["a=1", "a=2"], "'a' twice"), (["=3"], "=3")],
)
def test_wrong_keyword_arguments_are_shown(texts, words):
    with pytest.raises(ValueError, match=words):
        read_env_kwargs(texts)


def test_keyword_arguments_are_pairs_with_or_without_a_sign():
    expected = {"size": 5, "name": "a=b"}
    assert read_env_kwargs(["size=5", "name=a=b"]) == expected
    assert read_env_kwargs(["size", "5", "name", "a=b"]) == expected


def test_make_vec_and_evaluate_take_a_factory_by_its_name_as_the_commands_do():
    with closing(make_vec("compare.toy_envs:Counter", 2, backend="sync", length=9)) as envs:
        assert [env.length for env in envs.envs] == [9, 9]
    with closing(make_vec("vecenv.jit.cartpole:CARTPOLE", 2)) as envs:
        assert type(envs.unwrapped).__name__ == "JitVectorEnv"
    with pytest.raises(gym.error.Error) as caught:
        make_vec("compare.toy_envs:Nothing")
    told = "And the module compare.toy_envs has no factory or EnvKernels 'Nothing'."
    assert caught.value.__notes__ == [told]
    with pytest.raises(gym.error.NameNotFound, match="Nothing"):
        make_vec("Nothing-v0")
