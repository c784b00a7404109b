"""Rows of agents in SB3, and one game as a PettingZoo `ParallelEnv`."""

import functools

import numpy as np
import pytest
from agents.games import Tag, runners
from equality import assert_same

from vecenv import ActionError, make_vec_agents


def rows(factory=runners, num_games=2, **options):
    options.setdefault("autoreset_mode", "SameStep")
    return make_vec_agents(factory, num_games, backend="sync", **options)


def test_sb3_gets_whole_episodes_of_each_agent_and_of_its_absence():
    """Between two `dones` of a row lies the life of an agent, or zeros."""
    pytest.importorskip("stable_baselines3")
    from vecenv.adapters.sb3 import SB3VecEnv

    envs = SB3VecEnv(rows())
    plain = rows()
    envs.seed(3)
    obs = envs.reset()
    plain.reset(seed=[3, 4])
    lives = np.zeros(6)
    rng = np.random.default_rng(0)
    num_lives = num_absences = 0
    for _ in range(60):
        actions = rng.integers(0, 4, 6)
        before = plain.alive.copy()
        expected = plain.step(actions)
        obs, _, dones, infos = envs.step(actions)
        assert_same(obs, expected[0])
        lives += expected[1]
        has_ended = (expected[2] | expected[3]) & plain.valid
        has_come = plain.alive & ~plain.valid
        assert_same(dones, has_ended | has_come)
        for i in range(6):
            info = infos[i]
            assert ("terminal_observation" in info) == dones[i]
            if has_ended[i]:
                num_lives += 1
                assert info["episode"]["r"] == pytest.approx(lives[i], abs=1e-5)
                assert info["TimeLimit.truncated"] == (not expected[2][i])
                is_given = expected[4].get("_final_obs", np.zeros(6, bool))[i]
                final = expected[4]["final_obs"][i] if is_given else obs[i]
                np.testing.assert_array_equal(info["terminal_observation"], final)
                lives[i] = 0
            elif has_come[i]:
                num_absences += 1
                assert not before[i] and "episode" not in info
                assert not info["TimeLimit.truncated"]
                assert not info["terminal_observation"].any()
    assert num_lives > 20 and num_absences > 10
    envs.close()
    plain.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("mode", ["Disabled", "NextStep"])
def test_pettingzoo_s_own_test_passes_for_a_single_game(backend, mode):
    pytest.importorskip("pettingzoo")
    from pettingzoo import ParallelEnv
    from pettingzoo.test import parallel_api_test

    from vecenv.adapters.pettingzoo import GameView

    factory = functools.partial(Tag, late=False)
    view = GameView(make_vec_agents(factory, backend=backend, autoreset_mode=mode))
    assert isinstance(view, ParallelEnv)
    parallel_api_test(view, num_cycles=60)
    view.close()
    view.close()


def test_a_view_gives_what_the_game_gives():
    pytest.importorskip("pettingzoo")
    from vecenv.adapters.pettingzoo import GameView

    view = GameView(
        make_vec_agents(Tag, backend="sync", autoreset_mode="Disabled", central_state=True)
    )
    game = Tag()
    rng = np.random.default_rng(0)
    for seed in (4, None, None):
        found, wanted = view.reset(seed=seed), game.reset(seed=seed)
        while game.agents:
            assert view.agents == game.agents
            for agent in game.agents:
                np.testing.assert_array_equal(found[0][agent], wanted[0][agent])
                assert (found[-1].get(agent) or {}).keys() == (wanted[-1].get(agent) or {}).keys()
            assert found[-1].get("common") == wanted[-1].get("common")
            assert_same(view.state(), game.state())
            assert view.render() == game.render()
            actions = {
                agent: rng.integers(4)
                if "runner" in agent
                else rng.uniform(-1, 1, 2).astype(np.float32)
                for agent in game.agents
            }
            acted = list(game.agents)
            found, wanted = view.step(actions), game.step(actions)
            for agent in acted:
                assert found[1][agent] == wanted[1][agent]
                assert found[2][agent] == wanted[2][agent]
        assert view.agents == []
        assert view.step({}) == ({}, {}, {}, {}, {})
    assert view.state_space == game.state_space
    view.reset()
    with pytest.raises(ValueError, match=r"but no action of \['runner_0'"):
        view.step({"catcher_0": np.zeros(2, np.float32)})
    view.close()


def test_a_view_refuses_actions_that_fit_no_space_by_agent():
    pytest.importorskip("pettingzoo")
    from vecenv.adapters.pettingzoo import GameView

    view = GameView(make_vec_agents(functools.partial(Tag, late=False), backend="sync"))
    view.reset(seed=0)
    good = {agent: view.action_space(agent).sample() for agent in view.agents}
    for agent, action, message in [
        ("runner_1", np.nan, "action of agent 'runner_1' is nan, .* expected one of Discrete"),
        ("runner_1", 1.7, "agent 'runner_1' is 1.7, .* expected one of Discrete"),
        ("catcher_0", 0.5, r"agent 'catcher_0' is 0.5, of shape \(\) .* expected one of Box"),
        ("catcher_0", [0, np.nan], "game 0, agent 'catcher_0' is .*nan"),
    ]:
        with pytest.raises(ActionError, match=message):
            view.step({**good, agent: action})
    assert view.step({**good, "runner_1": [1], "catcher_0": [0, 1]})[1]
    view.close()
