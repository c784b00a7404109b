"""Spaces padded to be equal, and the agent indicator."""

import functools

import numpy as np
import pytest
from agents.games import Mixed, Tag, runners
from equality import assert_same
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from masked_envs import ForbiddingPair

from vecenv import ActionError, EnvCreationError, make_vec_agents
from vecenv.agents.grouping import pad_action_space, pad_observation_space


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_padded_agents_are_one_group_with_masks(backend):
    envs = make_vec_agents(Mixed, 2, backend=backend, pad=True)
    assert envs.group.agents == ("short", "long")
    assert envs.single_observation_space == Box(0, 9, (4,), np.float32)
    assert envs.single_action_space == Discrete(5)
    obs, _ = envs.reset(seed=0)
    assert_same(obs, np.array([[3, 3, 0, 0], [7, 7, 7, 7]] * 2, np.float32))
    assert_same(envs.action_masks(), np.array([[1, 1, 0, 0, 0], [1] * 5] * 2, np.int8))
    envs.step(np.array([1, 4, 0, 3]))
    with pytest.raises(ActionError, match=r"game 1, agent 'short' got the action 2.*action_masks"):
        envs.step(np.array([1, 4, 2, 3]))
    with pytest.raises(ActionError, match="game 0, agent 'long' got the action 5"):
        envs.step(np.array([1, 5, 0, 3]))
    envs.close()


def test_padded_vectors_of_actions_are_cut():
    envs = make_vec_agents(functools.partial(Mixed, "vectors"), 2, backend="sync", pad=True)
    assert envs.single_action_space == Box(-1, 1, (3,), np.float32)
    envs.reset()
    actions = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
    envs.step(actions)
    (seen,) = envs.agents.games.envs[1].game.seen
    assert_same(seen["short"], actions[2, :1])
    assert_same(seen["long"], actions[3])
    assert not envs.has_action_masks


@pytest.mark.parametrize("where", ["obs", "info"])
def test_masks_of_padded_agents_are_padded(where):
    envs = make_vec_agents(
        functools.partial(ForbiddingPair, where, sizes=(3, 5)), 2, backend="sync", pad=True
    )
    if where == "obs":
        assert envs.single_observation_space == Dict(
            {"action_mask": Box(0, 1, (5,), np.int8), "observation": Box(0, 1, (2,), np.float32)}
        )
    envs.reset(seed=1)
    for _ in range(5):
        games = [env.game for env in envs.agents.games.envs]
        masks = envs.action_masks()
        for g, game in enumerate(games):
            for k, agent in enumerate(game.possible_agents):
                own = game.masks[agent][0] if agent in game.agents else None
                wanted = np.ones(5) if own is None else [*own, *[0] * (5 - len(own))]
                np.testing.assert_array_equal(masks[2 * g + k], wanted)
        envs.step(masks.argmax(1))


def test_what_cannot_be_padded_is_refused():
    for factory in (functools.partial(Mixed, "unlike"), Tag):
        with pytest.raises(EnvCreationError, match="can't be padded to one space"):
            make_vec_agents(factory, backend="sync", pad=True)
    for one, other in [
        (Box(0, 1, (2, 2)), Box(0, 1, (3, 2))),
        (Box(0, 1, (2,)), Box(0, 1, (2,), np.float64)),
        (Discrete(3), Discrete(3, start=1)),
        (Dict(a=Discrete(2)), Dict(b=Discrete(2))),
        (Dict(a=Discrete(2)), Dict(a=Box(0, 1, (2,)))),
    ]:
        with pytest.raises(ValueError, match=r"agent 'y' observes .* agent 'x' .*can't be padded"):
            pad_observation_space({"x": one, "y": other})
    with pytest.raises(ValueError, match="acts in"):
        pad_action_space({"x": Box(0, 1, (2,)), "y": Box(0, 2, (3,))})


def test_the_agent_indicator_says_who_observes():
    envs = make_vec_agents(
        functools.partial(runners, late=False), 2, backend="sync", agent_indicator=True
    )
    plain = make_vec_agents(functools.partial(runners, late=False), 2, backend="sync")
    rows, bare = envs.reset(seed=2)[0], plain.reset(seed=2)[0]
    for _ in range(20):
        assert_same(rows[:, :3], bare)
        known = envs.alive | envs.valid
        assert_same(rows[:, 3:], np.tile(np.eye(3, dtype=np.float32), (2, 1)) * known[:, None])
        actions = np.zeros(6, int)
        rows, bare = envs.step(actions)[0], plain.step(actions)[0]
    assert envs.single_observation_space.contains(rows[0])
    padded = make_vec_agents(Mixed, 1, backend="sync", pad=True, agent_indicator=True)
    assert_same(padded.reset()[0][0], np.array([3, 3, 0, 0, 1, 0], np.float32))
    with pytest.raises(EnvCreationError, match=r"agent_indicator=True appends.*group 'catcher'"):
        make_vec_agents(Tag, backend="sync", agent_indicator=True)


def test_padded_multidiscrete_actions_have_masks():
    envs = make_vec_agents(functools.partial(Mixed, "several"), 1, backend="sync", pad=True)
    assert envs.single_action_space == MultiDiscrete([4, 3])
    envs.reset()
    assert_same(
        envs.action_masks(), np.array([[1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], np.int8)
    )
    envs.step(np.array([[1, 2], [3, 2]]))
    with pytest.raises(ActionError, match="agent 'short' got the action"):
        envs.step(np.array([[2, 2], [3, 2]]))


def test_chosen_groups_are_padded_one_by_one():
    envs = make_vec_agents(
        Mixed, 1, backend="sync", pad=True, groups={"a": ["long"], "b": ["short"]}
    )
    assert envs.groups["b"].single_action_space == Discrete(2)
    assert not envs.groups["b"].has_action_masks
