"""make_vec in all its forms."""

import functools
import logging
import random

import gymnasium as gym
import numpy as np
import pytest
from envs import CounterEnv
from equality import assert_same
from gymnasium.wrappers import (
    FlattenObservation,
    PassiveEnvChecker,
    TimeAwareObservation,
    TimeLimit,
)

import vecenv
from vecenv import AsyncVectorEnv, EnvCreationError, SyncVectorEnv, make
from vecenv.choose import Choice

# What "auto" chooses depends on the machine; tests of the choice call `vecenv.make_vec`.
make_vec = functools.partial(vecenv.make_vec, backend="sync")


def wrappers_of(env):
    found = []
    while isinstance(env, gym.Wrapper):
        found.append(type(env))
        env = env.env
    return found


def first_run(envs):
    obs, infos = envs.reset(seed=3)
    return [(obs, infos), *(envs.step(np.arange(envs.num_envs) % 2) for _ in range(3))]


@pytest.mark.parametrize(
    "source",
    [
        "CartPole-v1",
        "CartPole",
        "gymnasium.envs.classic_control:CartPole-v1",
        gym.spec("CartPole-v1"),
        lambda: gym.make("CartPole-v1"),
        functools.partial(gym.make, "CartPole-v1"),
        [lambda: gym.make("CartPole-v1")] * 3,
        (lambda: gym.make("CartPole-v1"),) * 3,
    ],
    ids=["id", "id without version", "module", "spec", "function", "partial", "list", "tuple"],
)
@pytest.mark.filterwarnings("ignore:.*Using the latest versioned environment")
def test_every_source_makes_the_same_envs(source):
    envs = make_vec(source, 3)
    assert type(envs) is SyncVectorEnv
    assert envs.num_envs == 3
    assert len({id(env.unwrapped) for env in envs.envs}) == 3
    expected = gym.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    assert_same(first_run(envs), first_run(expected))


NO_SOURCE = "env must be a registered id, an EnvSpec, a factory or a l"


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        (("CartPole-v1", 0), {}, ValueError, "num_envs is 0, expected an integer of at least 1"),
        (("CartPole-v1", -2), {}, ValueError, "num_envs is -2"),
        (("CartPole-v1", 2.0), {}, ValueError, r"num_envs is 2\.0"),
        (("CartPole-v1", True), {}, ValueError, "num_envs is True"),
        ((CounterEnv, 0), {}, ValueError, "num_envs is 0"),
        (([CounterEnv] * 3, 2), {}, ValueError, "num_envs is 2, but 3 factories were given"),
        (([],), {}, ValueError, "num_envs is 0|no factories|empty"),
        *(((wrong,), {}, TypeError, NO_SOURCE) for wrong in (5, None, {"a": CounterEnv}, b"x")),
        (([CounterEnv, "CartPole-v1"],), {}, TypeError, NO_SOURCE),
        ((CounterEnv, 2), {"g": 1, "m": 2}, TypeError, r"g, m would go to .* functools.partial"),
        ((CounterEnv, 2), {"n_envs": 2}, TypeError, "n_envs: write num_envs="),  # as others have it
        (("CartPole-v1", 2), {"env_kwargs": 2}, TypeError, "env_kwargs: write the env's arguments"),
    ],
)
def test_wrong_arguments_are_refused(args, options, error, message):
    with pytest.raises(error, match=message):
        make_vec(*args, **options)


def test_arguments_of_gymnasium_make_are_not_the_envs():
    """As in gymnasium.make_vec, whose calls people will bring along."""
    envs = make_vec("CartPole-v1", 2, max_episode_steps=5, disable_env_checker=True)
    envs.reset(seed=1)
    for _ in range(5):
        _, _, _, truncations, _ = envs.step([0, 1])
    assert truncations.all()
    assert all(PassiveEnvChecker not in wrappers_of(env) for env in envs.envs)


@pytest.mark.parametrize("source", [CounterEnv, "CartPole-v1"])
def test_options_of_a_vector_env_among_those_of_the_env_are_told_from_them(source):
    hint = r"lazy is an option of vector envs: pass vector_kwargs={'lazy': True}"
    with pytest.raises((TypeError, EnvCreationError)) as raised:
        vecenv.make_vec(source, 2, backend="async", lazy=True)
    assert hint in "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "functools.partial" not in str(raised.value)


@pytest.mark.parametrize("backend", ["async", "auto", None])
def test_num_workers_means_workers(backend):
    envs = vecenv.make_vec("CartPole-v1", 3, backend=backend, num_workers=3)
    assert type(envs) is AsyncVectorEnv and envs.num_workers == 3
    envs.close()
    with pytest.raises(TypeError, match="num_workers, which backend 'sync' does not take"):
        make_vec("CartPole-v1", 3, num_workers=3)


def test_a_device_for_envs_of_python_says_which_envs_have_one():
    with pytest.raises(EnvCreationError, match="unexpected keyword argument 'device'") as raised:
        make_vec("CartPole-v1", 2, device="cuda")
    assert "device= is where compiled envs are" in "".join(raised.value.__notes__)


@pytest.mark.parametrize(
    ("env", "wrong", "told"),
    [
        ("Cage2-v0", "red", r"takes no argument 'red'; did you mean 'red_agent'\? It takes auto"),
        ("Cage4-v0", "redd", r"'redd'; help\(vecenv.cage.*Cage4VectorEnv\) lists them"),
        ("JitCartPole-v1", "gravty", r"values of the kernels' parameters go into params="),
    ],
)
def test_a_wrong_argument_of_compiled_envs_is_answered_with_what_they_take(env, wrong, told):
    with pytest.raises(TypeError, match=told):
        vecenv.make_vec(env, 2, **{wrong: 1})


def test_only_the_first_env_has_the_passive_checker():
    envs = make_vec("CartPole-v1", 3)
    has_checker = [PassiveEnvChecker in wrappers_of(env) for env in envs.envs]
    assert has_checker == [True, False, False]
    assert all(TimeLimit in wrappers_of(env) for env in envs.envs)


@pytest.mark.parametrize("source", ["CartPole-v1", functools.partial(gym.make, "CartPole-v1")])
def test_wrappers_wrap_every_env_in_order(source):
    envs = make_vec(source, 2, wrappers=[TimeAwareObservation, FlattenObservation])
    assert envs.single_observation_space.shape == (5,)
    for env in envs.envs:
        assert wrappers_of(env)[:2] == [FlattenObservation, TimeAwareObservation]
    with pytest.raises(EnvCreationError, match=r"env 0 of 2.*ZeroDivisionError"):
        make_vec(source, 2, wrappers=[lambda env: 1 / 0])


def test_spec_describes_what_was_made():
    envs = make_vec("Pendulum-v1", 3, g=1.5)
    assert str(envs) == "SyncVectorEnv(Pendulum-v1, num_envs=3)"
    assert (envs.spec.id, envs.spec.kwargs) == ("Pendulum-v1", {"g": 1.5})
    assert make_vec(CounterEnv).spec is None


def chosen(caplog, *args, **kwargs):
    """Make a vector env with backend="auto"; return it and why that backend was chosen."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="vecenv"):
        envs = vecenv.make_vec(*args, **{"backend": "auto", **kwargs})
    (record,) = [r for r in caplog.records if r.getMessage().startswith("backend 'auto' chose")]
    return envs, record.getMessage()


def test_a_single_env_is_stepped_here_and_made_once(caplog):
    made = []

    def factory():
        made.append(CounterEnv(3))
        return made[-1]

    envs, why = chosen(caplog, factory)
    assert envs.envs == made
    assert "chose 'sync'" in why and "there is only one env" in why


def test_arguments_of_workers_mean_workers(caplog):
    envs, why = chosen(caplog, "CartPole-v1", 2, vector_kwargs={"num_workers": 1, "timeout": 60.0})
    assert type(envs) is AsyncVectorEnv
    assert envs.num_workers == 1
    assert why.endswith("only AsyncVectorEnv takes num_workers, timeout")
    envs.close()


def test_the_choice_is_logged_and_made(caplog, monkeypatch):
    monkeypatch.setattr(make, "choose_backend", lambda factories: Choice("async", {}, "it pays"))
    envs, why = chosen(caplog, "CartPole-v1", 3)
    assert why == "backend 'auto' chose 'async' for CartPole-v1: it pays"
    assert (type(envs), envs.num_envs) == (AsyncVectorEnv, 3)
    envs.close()


def test_a_factory_that_returns_one_env_is_refused():
    env = CounterEnv(3)
    with pytest.raises(EnvCreationError, match="returned the env that was made for env 0"):
        vecenv.make_vec([lambda: env] * 2, backend="auto")


def test_envs_that_can_be_made_once_are_stepped_here(caplog):
    in_use = set()

    class Exclusive(CounterEnv):
        def __init__(self, port):
            super().__init__(3)
            if port in in_use:
                raise OSError(f"port {port} is in use")
            in_use.add(port)
            self.port = port

        def close(self):
            in_use.discard(self.port)

    envs, _ = chosen(caplog, [functools.partial(Exclusive, port) for port in range(3)])
    assert type(envs) is SyncVectorEnv and in_use == {0, 1, 2}
    envs.close()
    assert not in_use


def test_the_trial_leaves_the_global_generators_alone():
    class Careless(CounterEnv):
        def __init__(self):
            super().__init__(3)
            self.height = random.random() + np.random.random()  # noqa: NPY002  # the global one

    random.seed(1)
    np.random.seed(1)  # noqa: NPY002  # the global one
    expected = [Careless().height for _ in range(2)]
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002  # the global one
    envs = vecenv.make_vec(Careless, 2, backend="auto")
    assert envs.get_attr("height") == tuple(expected)
