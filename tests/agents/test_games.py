"""Vector envs of agents beside bare games, on every backend; what the rows are."""

import functools

import gymnasium as gym
import numpy as np
import pytest
from agents.games import Crowd, Reusing, Tag, runners
from agents.twins import as_agents, play, random_actions
from envs import MODES, begun, mode_id
from equality import assert_same
from gymnasium.spaces import Box, Discrete
from masked_envs import ForbiddingPair

from vecenv import ActionError, EnvCreationError, SlotError, VecEnv, make_vec_agents
from vecenv.agents import AgentRowsVecEnv, AgentSlot, AgentsVecEnv

WORKERS = {
    "sync": {"backend": "sync"},
    "async 1": {"backend": "async", "vector_kwargs": {"num_workers": 1}},
    "async 3": {"backend": "async", "vector_kwargs": {"num_workers": 3}},
}
NEXT_STEP, SAME_STEP, DISABLED = MODES


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("central_state", "where", "by", "mode"),
    [
        (False, "sync", "step", DISABLED),
        (False, "sync", "out", SAME_STEP),
        (False, "sync", "send", NEXT_STEP),
        slow(False, "sync", "send", DISABLED),
        slow(False, "async 3", "step", DISABLED),
        (False, "async 3", "out", NEXT_STEP),
        slow(False, "async 3", "out", SAME_STEP),
        slow(False, "async 3", "send", NEXT_STEP),
        (False, "async 3", "send", SAME_STEP),
        (True, "sync", "step", NEXT_STEP),
        (True, "sync", "out", SAME_STEP),
        slow(True, "sync", "send", SAME_STEP),
        (True, "sync", "out", DISABLED),
        slow(True, "async 3", "step", SAME_STEP),
        (True, "async 3", "send", NEXT_STEP),
    ],
)
def test_two_groups_that_come_and_go_and_their_central_states_are_those_of_bare_games(
    central_state, where, by, mode
):
    options = {"autoreset_mode": mode, "central_state": central_state, **WORKERS[where]}
    num_ends, num_early = play(Tag, 3, 25, by=by, **options)
    assert num_ends > 3
    assert num_early > 10


@pytest.mark.parametrize("mode", MODES[:2], ids=mode_id)
def test_one_group_does_as_bare_games(mode):
    play(runners, 3, 20, autoreset_mode=mode, **WORKERS["async 1"])


@pytest.mark.parametrize("where", ["sync", "async 1"])
def test_final_observations_survive_games_that_reuse_their_arrays(where):
    envs = make_vec_agents(Reusing, 2, autoreset_mode=SAME_STEP, **WORKERS[where])
    first, _ = envs.reset(seed=0)
    obs, *_, infos = envs.step(np.zeros(4, np.int64))
    for _ in range(2):
        envs.step(np.zeros(4, np.int64))
    envs.close()
    for kept in (first, obs):
        np.testing.assert_array_equal(kept, np.full((4, 2), 7, np.float32))
    assert infos["_final_obs"].all()
    np.testing.assert_array_equal(np.stack(infos["final_obs"]), np.full((4, 2), 3, np.float32))


def test_one_group_is_a_vec_env_and_several_are_dicts():
    one = make_vec_agents(runners, 2, backend="sync")
    assert isinstance(one, AgentRowsVecEnv) and isinstance(one, VecEnv)
    assert one.num_envs == 6 and one.num_games == 2
    assert one.group.name == "runner" and one.group.agents == ("runner_0", "runner_1", "runner_2")
    assert one.single_action_space == Discrete(4)
    assert one.observation_space.shape == (6, 3)
    several = make_vec_agents(Tag, 2, backend="sync")
    assert isinstance(several, AgentsVecEnv)
    assert list(several.groups) == ["runner", "catcher"]
    assert several.groups["catcher"].row(1, "catcher_0") == 1
    with pytest.raises(ValueError, match="has no agent 'runner_0'"):
        several.groups["catcher"].row(1, "runner_0")


def test_a_reset_mask_has_entries_for_games_or_equal_ones_for_their_rows():
    envs = begun(make_vec_agents(functools.partial(runners, late=False), 2, backend="sync"))
    stepped = envs.step(np.zeros(6, int))[0]
    mask = np.array([False, True])
    now, _ = envs.reset(options={"reset_mask": mask})
    np.testing.assert_array_equal(now[:3], stepped[:3])
    assert (now[3:, 0] == 0).all()
    assert_same(envs.valid, np.repeat([True, False], 3))
    again, _ = envs.reset(options={"reset_mask": np.repeat(mask, 3)})
    np.testing.assert_array_equal(again[:3], stepped[:3])
    with pytest.raises(ValueError, match="some agents of game 1 and not others"):
        envs.reset(options={"reset_mask": np.arange(6) == 4})


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_saved_state_goes_on_bit_for_bit(backend):
    def make():
        return as_agents(make_vec_agents(Tag, 2, backend=backend, central_state=True))

    envs, rng = make(), np.random.default_rng(1)
    envs.reset(seed=0)
    for _ in range(5):
        envs.step(random_actions(envs.groups, rng))
    saved, seen = envs.state_dict(), []
    other = make()
    other.load_state_dict(saved)
    for name, group in envs.groups.items():
        assert_same(other.groups[name].alive, group.alive)
    assert_same(other.state(), envs.state())
    for _ in range(15):
        actions = random_actions(envs.groups, rng)
        seen.append(envs.step(actions)[:4])
        assert_same(other.step(actions)[:4], seen[-1])
    envs.close()
    other.close()


def test_rows_have_the_final_states_of_their_games():
    """`count, num_games` of each."""
    game = functools.partial(runners, length=4)
    envs = begun(
        make_vec_agents(game, 3, backend="sync", central_state=True, autoreset_mode="SameStep")
    )
    num_finals = 0
    for _ in range(9):
        before, infos = envs.state(), envs.step(np.zeros(9, int))[4]
        for row in np.flatnonzero(infos.get("_final_state", np.zeros(9, bool))):
            num_finals += 1
            game = row // 3
            np.testing.assert_array_equal(infos["final_state"][row], before[game] + [1, 0])
            np.testing.assert_array_equal(envs.state()[game], [0, before[game, 1] + 1])
        is_last = infos.get("_final_obs", np.zeros(9, bool))
        assert not (is_last & ~infos.get("_final_state", is_last)).any()
    assert num_finals >= 12 and num_finals % 3 == 0


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_games_are_rendered(backend):
    envs = make_vec_agents(runners, 2, backend=backend)
    envs.reset()
    envs.send(np.zeros(3, int), [1])
    envs.recv()
    assert envs.render() == ("count 0", "count 1")
    envs.close()


def test_agents_without_declared_names_take_seats():
    spaces = (Box(-1, 99, (2,), np.float32), Discrete(2))
    envs = make_vec_agents(Crowd, 2, backend="sync", max_agents=4, agent_spaces=spaces)
    obs, infos = envs.reset(seed=0)
    assert list(infos["agent"][infos["_agent"]]) == ["walker-0"] * 2
    names = {0: "walker-0"}
    for _ in range(19):
        was_alive = envs.alive[:4].copy()
        obs, rewards, terminations, _, infos = envs.step(np.zeros(8, int))
        assert_same(envs.valid[:4], was_alive)
        assert rewards[:4].sum() == was_alive.sum()
        given = infos.get("_agent", np.zeros(8, bool))[:4]
        for row in np.flatnonzero(given):
            names[row] = infos["agent"][row]
        for row in np.flatnonzero(envs.valid[:4] | envs.alive[:4]):
            assert obs[row, 0] == int(names[row].rpartition("-")[2])
        assert_same(obs[:4], obs[4:])
        assert not (terminations & envs.alive).any()


def test_more_agents_than_seats_are_refused():
    spaces = (Box(-1, 99, (2,), np.float32), Discrete(2))
    envs = make_vec_agents(Crowd, 2, backend="sync", max_agents=2, agent_spaces=spaces)
    envs.reset()
    with pytest.raises(ValueError, match=r"^game 0 has the agent 'walker-2' beside .*max_agents=2"):
        for _ in range(3):
            envs.step(np.zeros(4, int))
    with pytest.raises(EnvCreationError, match=r"no `possible_agents`.*max_agents=.*agent_spaces="):
        make_vec_agents(Crowd, 2, backend="sync")
    with pytest.raises(EnvCreationError, match="max_agents and agent_spaces are for games without"):
        make_vec_agents(runners, 2, backend="sync", max_agents=3, agent_spaces=spaces)


@pytest.mark.parametrize("env", ["CartPole-v1", lambda: gym.make("CartPole-v1")])
def test_envs_of_one_agent_are_sent_to_make_vec(env):
    with pytest.raises((TypeError, EnvCreationError), match=r"agent.*make it with make_vec"):
        make_vec_agents(env, 2, backend="auto" if isinstance(env, str) else "sync")


def test_groups_are_chosen_by_names_or_a_function():
    by_name = make_vec_agents(
        functools.partial(runners, 4),
        backend="sync",
        groups={"red": ["runner_2", "runner_0"], "blue": ["runner_1", "runner_3"]},
    )
    assert by_name.groups["red"].agents == ("runner_2", "runner_0")
    by_rule = make_vec_agents(
        functools.partial(runners, 4), backend="sync", groups=lambda agent: f"team {agent[-1]}"
    )
    assert list(by_rule.groups) == ["team 0", "team 1", "team 2", "team 3"]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (lambda agent: "all", "agents of a group have equal spaces"),
        ({"all": ["runner_0"]}, r"\['runner_1', 'runner_2', 'catcher_0'\] are in no group"),
        ({"a": ["runner_9"]}, "group 'a' has agent 'runner_9'; the game has"),
        ({"a": ["runner_0"], "b": ["runner_0"]}, "'runner_0' is in 'a' and in 'b'"),
        ({"state": ["runner_0"]}, "'state' is no name of a group"),
        ({"a": []}, "group 'a' has no agents"),
    ],
)
def test_groups_that_fit_no_game_are_refused(groups, message):
    with pytest.raises(EnvCreationError, match=message):
        make_vec_agents(Tag, backend="sync", groups=groups)


def test_games_of_different_agents_are_refused():
    with pytest.raises(RuntimeError, match="that of env 0") as raised:
        make_vec_agents([runners, functools.partial(runners, 4)], backend="sync")
    assert "An env here is a game of several agents." in raised.value.__notes__
    renamed = functools.partial(Tag, 1, with_catcher=False, late=False)

    def other():
        game = renamed()
        game.possible_agents[0] = game.runners[0] = "runner_7"
        game._spaces["runner_7"] = game._spaces["runner_0"]
        return game

    with pytest.raises(ValueError, match=r"game 1 has the agents .*runner_7.*game 0.*runner_0"):
        make_vec_agents([renamed, other], backend="sync")


def test_actions_are_checked_by_game_and_agent():
    envs = begun(make_vec_agents(functools.partial(Tag, late=False), 2, backend="sync"))
    good = {"runner": np.zeros(6, int), "catcher": np.zeros((2, 2), np.float32)}
    nan = {**good, "catcher": np.array([[0, 0], [0, np.nan]], np.float32)}
    for actions, message in [
        (np.zeros(8), r"a dict with the groups \['runner', 'catcher'\], got ndarray"),
        ({"runner": good["runner"]}, r"got \['runner'\]"),
        ({**good, "runner": np.zeros(5, int)}, "there is none for game 1, agent 'runner_2'"),
        ({**good, "runner": np.zeros(7, int)}, r"group 'runner': actions has shape \(7,\)"),
        ({**good, "runner": np.zeros(6)}, "group 'runner': actions has dtype float64"),
        (nan, r"action of game 1, agent 'catcher_0' is \[ 0. nan\]"),
    ]:
        with pytest.raises(ActionError, match=message):
            envs.step(actions)
    assert envs.step(good)[1]["runner"].shape == (6,)


def test_slots_are_checked():
    envs = begun(make_vec_agents(runners, 2, backend="sync"))
    flags = [np.zeros(6, bool) for _ in range(2)]
    slot = AgentSlot(np.zeros((6, 3), np.float32), np.zeros(6), *flags, np.zeros(6, np.int8))
    with pytest.raises(SlotError, match=r"out.valid has shape \(6,\) and dtype int8"):
        envs.step(np.zeros(6, int), out=slot)
    with pytest.raises(SlotError, match=r"out.obs has shape \(4, 3\)"):
        envs.step(np.zeros(6, int), out=slot._replace(obs=np.zeros((4, 3), np.float32)))
    dicts = as_agents(envs)
    with pytest.raises(SlotError, match=r"out has the groups \['runners'\]"):
        dicts.step({"runner": np.zeros(6, int)}, out={"runners": slot})


def test_masks_of_observations_and_infos_are_rows_and_dead_agents_may_do_anything():
    for where in ("obs", "info"):
        for backend in ("sync", "async"):
            envs = make_vec_agents(functools.partial(ForbiddingPair, where), 2, backend=backend)
            games = [ForbiddingPair(where) for _ in range(2)]
            envs.reset(seed=3)
            for g, game in enumerate(games):
                game.reset(seed=3 + g)
            assert envs.has_action_masks
            rng = np.random.default_rng(0)
            for step in range(1, 6):
                masks = envs.action_masks()
                assert masks.dtype == np.int8 and masks.shape == (4, 4)
                wanted = [
                    game.masks[a][0] if a in game.agents else np.ones(4)
                    for game in games
                    for a in game.possible_agents
                ]
                np.testing.assert_array_equal(masks, wanted, err_msg=f"{where} {step}")
                assert_same(envs.action_masks([2, 0]), masks[[2, 0]])
                into = np.zeros((4, 4), bool)
                assert envs.action_masks(out=into) is into
                assert_same(into, masks.astype(bool))
                actions = (rng.random((4, 4)) + masks).argmax(1)
                for g, game in enumerate(games):
                    game.step({a: actions[2 * g + int(a[-1])] for a in game.agents})
                if step % 2:
                    envs.step(actions)
                else:  # by sends, in turn
                    for g in (1, 0):
                        envs.send(actions[2 * g : 2 * g + 2], [g])
                    envs.recv(min_envs=1, max_envs=1)
                    envs.recv()
            envs.close()


def test_masks_are_in_the_infos_if_asked_for():
    envs = make_vec_agents(ForbiddingPair, 2, backend="sync", mask_infos=True)
    infos = envs.reset(seed=0)[1]
    for _ in range(3):
        assert_same(infos["action_mask"], envs.action_masks())
        assert infos["_action_mask"].all()
        infos = envs.step(envs.action_masks().argmax(1))[4]


def test_masks_that_are_missing_or_allow_nothing_name_game_and_agent():
    from vecenv import ActionMaskError, NoActionMaskError

    envs = begun(make_vec_agents(functools.partial(ForbiddingPair, None), 2, backend="sync"))
    assert not envs.has_action_masks
    with pytest.raises(NoActionMaskError, match=r"info\['action_mask'\].*array of 4 times 0 or 1"):
        envs.action_masks()
    for where in ("obs", "info"):
        factories = [functools.partial(ForbiddingPair, where, empty_at=k) for k in (None, 1)]
        envs = begun(make_vec_agents(factories, backend="sync"))
        envs.step(envs.action_masks().argmax(1))
        with pytest.raises(ActionMaskError, match=r"game 1, agent 'player_0'.*allows no action"):
            envs.action_masks()


def test_a_game_with_the_methods_that_the_documentation_names_is_enough():
    class Bare:
        possible_agents = ("left", "right")

        def observation_space(self, agent):
            return Discrete(2)

        def action_space(self, agent):
            return Discrete(2)

        def reset(self, seed=None, options=None):
            self.agents = list(self.possible_agents)
            return dict.fromkeys(self.agents, 0), {agent: {} for agent in self.agents}

        def step(self, actions):
            over, obs = dict.fromkeys(actions, False), dict.fromkeys(actions, 1)
            return obs, actions, over, over, {agent: {} for agent in actions}

    envs = begun(make_vec_agents(Bare, 2, backend="sync"), seed=1)
    assert envs.step(np.array([0, 1, 1, 0]))[1].tolist() == [0, 1, 1, 0]
