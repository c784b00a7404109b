"""Games that raise, hang, die or return nonsense: named by game and agent, and survived."""

import functools

import numpy as np
import pytest
from agents.games import (
    DIE,
    GROW,
    HANG,
    LACK,
    NAN,
    NO_DICTS,
    NO_REWARD,
    RAISE,
    STRANGER,
    Faulty,
    Tag,
    Turns,
)
from envs import begun
from equality import assert_same

from buffers import BufferMisuseError, RolloutBuffer
from vecenv import ActionError, EnvCreationError, ObservationError, make_vec_agents

TWO = {"num_workers": 2}


@pytest.fixture
def make():
    made = []

    def make_envs(num_games=4, *, backend="async", length=100, **options):
        options.setdefault("vector_kwargs", TWO if backend == "async" else None)
        envs = make_vec_agents(
            functools.partial(Faulty, length), num_games, backend=backend, **options
        )
        made.append(envs)
        return envs

    yield make_envs
    for envs in made:
        games = envs.agents.games
        games.close(terminate=True) if hasattr(games, "num_workers") else games.close()


def actions(game, k, action, num_games=4):
    chosen = np.zeros(2 * num_games, int)
    chosen[2 * game + k] = action
    return chosen


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (LACK, r"game 3, agent 'bot_1' is alive and got no observation; .*\['bot_0'\]"),
        (STRANGER, r"game 3 returned observations of 'bot_9', which is none of its agents"),
        (GROW, r"game 3, agent 'bot_1' returned an observation of shape \(3,\) .*shape \(2,\)"),
        (NO_REWARD, r"game 3, agent 'bot_1' acted and is not in the rewards, which has \['bot_0'"),
        (NO_DICTS, r"game 3 returned \(\[\{.* from step, expected the dicts \(observations, re"),
    ],
)
def test_nonsense_names_game_and_agent(make, action, message):
    envs = begun(make(backend="async" if action in (LACK, GROW) else "sync"))
    envs.step(np.zeros(8, int))
    with pytest.raises(ObservationError, match=f"^{message}") as raised:
        envs.step(actions(3, 1, action))
    assert "Env 3 is game 3, with the agents 'bot_0', 'bot_1'." in raised.value.__notes__


@pytest.mark.parametrize(("backend", "mode"), [("sync", "NextStep"), ("async", "SameStep")])
def test_nan_of_a_game_stays_in_its_row_and_is_refused_by_buffers(make, backend, mode):
    envs = make(backend=backend, length=3, autoreset_mode=mode)
    rollout = RolloutBuffer(
        3, 8, envs.single_observation_space, envs.single_action_space, autoreset_mode=mode
    )
    rollout.start(envs.reset(seed=0)[0])
    for t, action in enumerate((0, 0, NAN)):  # the last ends the game
        columns = {name: np.zeros(8, np.float32) for name in ("log_probs", "values")}
        chosen = rollout.put(t, actions=actions(3, 1, action), **columns)
        infos = envs.step(chosen, out=rollout.slot(t))[4]
    row = np.arange(8) == 7
    assert_same(np.isnan(rollout.rewards[2].numpy()), row)
    assert rollout.terminations[2].all()
    if mode == "SameStep":
        assert_same(np.isnan(np.stack(infos["final_obs"])).all(axis=1), row)
        assert (rollout.obs_at(3) == 0).all()
    else:
        assert_same(np.isnan(rollout.obs_at(3).numpy()).all(axis=1), row)
    with pytest.raises(BufferMisuseError, match="env 7 in step 2 had a reward that is not finite"):
        rollout.compute_advantages(np.zeros(8, np.float32))
    obs, rewards, *_ = envs.step(np.zeros(8, int))  # of the next game
    assert not np.isnan(obs).any() and not np.isnan(rewards).any()


@pytest.mark.parametrize(("backend", "by"), [("sync", "send"), ("async", "step")])
def test_a_game_that_raises_is_named(make, backend, by):
    envs = begun(make(backend=backend))
    with pytest.raises(KeyError, match="bot_1 has no such arm") as raised:
        if by == "step":
            envs.step(actions(2, 1, RAISE))
        else:
            envs.send(actions(0, 1, RAISE)[:2], [2])
            envs.recv()
    assert "Env 2 is game 2, with the agents 'bot_0', 'bot_1'." in raised.value.__notes__


@pytest.mark.parametrize(
    ("action", "mode"),
    [
        (RAISE, "NextStep"),
        pytest.param(RAISE, "SameStep", marks=pytest.mark.slow),
        (LACK, "SameStep"),
        (STRANGER, "NextStep"),
        pytest.param(DIE, "NextStep", marks=pytest.mark.slow),
        (DIE, "SameStep"),
        pytest.param(HANG, "NextStep", marks=pytest.mark.slow),
    ],
)
def test_others_go_on_and_the_game_that_failed_is_truncated(make, action, mode):
    options = {**TWO, "on_error": "restart"}
    if action == HANG:
        options["timeout"] = 1.0
    envs = begun(make(vector_kwargs=options, autoreset_mode=mode))
    for _ in range(3):
        obs, rewards, *_ = envs.step(np.zeros(8, int))
        assert (rewards == 1).all()
    obs, rewards, terminations, truncations, infos = envs.step(actions(2, 1, action))
    # With the process that was killed its other game, 3, is gone too.
    lost = np.repeat([False, False, True, action in (DIE, HANG)], 2)
    assert_same(truncations, lost)
    assert not terminations.any()
    assert envs.valid.all()
    assert_same(rewards, np.where(lost, 0.0, 1.0))
    is_same = mode == "SameStep"
    assert_same(envs.alive, np.ones(8, bool) if is_same else ~lost)
    assert (obs[~lost] == 4).all()
    reasons = infos["final_info"] if is_same else infos
    assert (reasons["restarts"][lost] == 1).all()
    if is_same:
        assert_same(infos["_final_obs"], lost)
        assert all(infos["final_obs"][row].shape == (2,) for row in np.flatnonzero(lost))
        assert (obs[lost] == 0).all()
    obs, rewards, terminations, truncations, _ = envs.step(np.zeros(8, int))
    assert not (terminations | truncations).any()
    assert envs.alive.all()
    if is_same:
        assert_same(obs[:, 0], np.where(lost, 1, 5).astype(np.float32))
        assert envs.valid.all()
    else:
        assert_same(envs.valid, ~lost)
        assert_same(obs[:, 0], np.where(lost, 0, 5).astype(np.float32))


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_game_without_agents_at_reset_is_refused(backend):
    factories = [Faulty, functools.partial(Faulty, num_agents_at_reset=0)]
    envs = make_vec_agents(factories, backend=backend, vector_kwargs=None)
    with pytest.raises(ObservationError, match=r"^game 1 has no agents after reset"):
        envs.reset()
    envs.close()


def test_games_in_which_agents_take_turns_are_refused():
    with pytest.raises(EnvCreationError, match=r"in turns_v0 agents take turns.*ParallelEnv"):
        make_vec_agents(Turns, backend="sync")


@pytest.mark.parametrize(
    ("env", "kind", "message"),
    [
        ([], ValueError, "env is an empty list"),
        ("agents.gamez", ModuleNotFoundError, "agents has no such module"),
        (3, TypeError, "env must be an id, a module with parallel_env, or a factory"),
        (
            "no_such_package.env_v1",
            ModuleNotFoundError,
            r"no module 'no_such_package'.*pip install",
        ),
        ("Sprea-v0", ModuleNotFoundError, "did you mean Spread-v0.*pip install"),
        ("agents.games", TypeError, "module agents.games has no parallel_env"),
        (lambda: 3, EnvCreationError, "expected a ParallelEnv, got int 3"),
    ],
)
def test_what_is_no_game_is_refused(env, kind, message):
    with pytest.raises(kind, match=message):
        make_vec_agents(env, backend="sync")


def test_a_central_state_needs_a_space():
    def game():
        found = Tag()
        del found.state_space
        return found

    with pytest.raises(EnvCreationError, match="has no `state_space`, which central_state=True"):
        make_vec_agents(game, backend="sync", central_state=True)


class Odd(Faulty):
    """Bots whose game does what `change` makes of it: of itself, of what a step returns."""

    def __init__(self, change, length=100):
        super().__init__(length)
        self.change = change

    def step(self, actions):
        result = super().step(actions)
        return self.change(self, [*result[:4], {agent: {} for agent in actions}]) or result


def with_part(part, value):
    def change(game, result):
        result[part] = {**result[part], "bot_1": value}
        return tuple(result)

    return change


def agents_are(make):
    def change(game, result):
        game.agents = make(game.agents)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_part(1, None), r"game 0, agent 'bot_1' got the reward None, expected one number"),
        (with_part(2, np.zeros(2, bool)), r"agent 'bot_1' got the flags array\(\[False, False\]\)"),
        (with_part(4, "hello"), r"agent 'bot_1' got the infos 'hello' of type str, expected a"),
        (agents_are(lambda names: [*names, "bot_0"]), r"game 0 has agents twice in its `agents`"),
    ],
)
def test_odd_results_name_game_and_agent(change, message):
    envs = begun(make_vec_agents(functools.partial(Odd, change), 2, backend="sync"))
    with pytest.raises(ObservationError, match=message):
        envs.step(np.zeros(4, int))


def test_agents_that_have_ended_are_gone_although_the_game_still_lists_them():
    def change(game, result):
        if game.count == 4:
            game.agents = ["bot_1"]
            result = [{"bot_1": part["bot_1"]} for part in result]
        elif game.count > 1:
            game.agents = ["bot_0", "bot_1"]
            result[2] = {**result[2], "bot_0": game.count < 4}
            result[0] = {**result[0], "bot_0": np.zeros(2, np.float32)}
        return tuple(result)

    envs = begun(make_vec_agents(functools.partial(Odd, change), 1, backend="sync"))
    alive, valid = [], []
    for _ in range(6):
        _, _, terminations, _, _ = envs.step(np.zeros(2, int))
        alive.append(bool(envs.alive[0]))
        valid.append(bool(envs.valid[0]))
        assert bool(terminations[0]) == (len(alive) == 2)
        assert envs.valid[1] and envs.alive[1]
    assert alive == [True, False, False, False, True, True]  # away in the fourth step
    assert valid == [True, True, False, False, False, True]


def test_nan_actions_are_refused_before_a_send_too():
    envs = begun(make_vec_agents(functools.partial(Tag, late=False), 3, backend="sync"))
    good = {"runner": np.zeros(6, int), "catcher": np.zeros((2, 2), np.float32)}
    nan = {**good, "catcher": np.array([[0, 0], [np.nan, 0]], np.float32)}
    with pytest.raises(ActionError, match=r"game 0, agent 'catcher_0' is \[nan\s+0\.?\]"):
        envs.send(nan, [2, 0])
    envs.send(good, [2, 0])  # nothing was sent
    assert sorted(envs.recv().game_ids) == [0, 2]
