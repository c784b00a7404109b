"""`check_vector_env` of vector envs of agents."""

import functools

import numpy as np
import pytest
from agents.games import Tag, runners
from choices import fast_are, product
from envs import MODES
from masked_envs import ForbiddingPair

import vecenv.agents.game
from vecenv import VectorEnvCheckError, check_vector_env, make_vec_agents
from vecenv.agents import AgentsVecEnv

TAG = functools.partial(Tag, forgets=True)
RUNNERS = functools.partial(runners, forgets=True)
GAMES = TAG, RUNNERS, ForbiddingPair


@pytest.mark.parametrize(
    ("factory", "mode"), fast_are([*zip(GAMES, MODES, strict=True)], product(GAMES, MODES))
)
def test_games_pass(factory, mode):
    envs = make_vec_agents(factory, 2, backend="sync", autoreset_mode=mode)
    report = check_vector_env(envs, num_steps=25)
    assert not report.skipped
    assert "the same seed gives the same run" in report.passed
    assert "observations of agents that act next are in their space" in report.passed


@pytest.mark.slow  # compiles
def test_compiled_games_pass():
    report = check_vector_env(make_vec_agents("Spread-v0", 3), num_steps=60)
    assert "the same seed gives the same run" in report.passed


def broken(monkeypatch, change):
    """Check a vector env in which something is wrong; return what was found."""
    envs = make_vec_agents(functools.partial(TAG, late=False), 2, backend="sync")
    change(monkeypatch, envs)
    with pytest.raises(VectorEnvCheckError) as raised:
        check_vector_env(envs, num_steps=25)
    return raised.value.failures


def ignore_seeds(monkeypatch, envs):
    reset = AgentsVecEnv.reset
    monkeypatch.setattr(AgentsVecEnv, "reset", lambda self, seed=None, options=None: reset(self))


def reward_with_nan(monkeypatch, envs):
    write_reward = vecenv.agents.game._Columns.write_reward

    def wrong(self, k, agent, reward):
        write_reward(self, k, agent, np.nan if agent == "runner_1" else reward)

    monkeypatch.setattr(vecenv.agents.game._Columns, "write_reward", wrong)


def observe_nan(monkeypatch, envs):
    observe = Tag._observe

    def wrong(self, agent):
        obs = observe(self, agent)
        return obs * np.nan if agent == "runner_1" else obs

    monkeypatch.setattr(Tag, "_observe", wrong)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (reward_with_nan, "rewards are numbers"),
        (observe_nan, "observations of agents that act next are in their space"),
        (ignore_seeds, "the same seed gives the same run"),
    ],
)
def test_what_is_wrong_is_found(monkeypatch, change, rule):
    failures = broken(monkeypatch, change)
    assert rule in failures
    assert np.char.find(failures[rule], ":") > 0  # which says where
