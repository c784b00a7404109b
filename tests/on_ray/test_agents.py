"""Games with several agents in actors."""

import functools

import numpy as np
import pytest
from agents.games import LACK, RAISE, Faulty, Tag
from agents.twins import play
from envs import MODES, mode_id
from equality import assert_same

from vecenv import ObservationError, make_vec_agents

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

TWO = {"backend": "ray", "vector_kwargs": {"num_workers": 2}}


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@pytest.mark.parametrize("by", ["step", "out", "send"])
def test_games_in_actors_do_as_bare_games(by, mode):
    num_ends, num_early = play(Tag, 3, 25, by=by, autoreset_mode=mode, **TWO)
    assert num_ends > 3 and num_early > 10


def test_errors_name_game_and_agent():
    envs = make_vec_agents(Faulty, 4, **TWO)
    envs.reset()
    actions = np.zeros(8, int)
    actions[7] = LACK
    with pytest.raises(ObservationError, match=r"^game 3, agent 'bot_1' is alive and got no obs"):
        envs.step(actions)
    envs.close()


def test_others_go_on_and_the_game_that_failed_is_truncated():
    options = {"num_workers": 2, "on_error": "restart"}
    envs = make_vec_agents(Faulty, 4, backend="ray", vector_kwargs=options)
    envs.reset(seed=0)
    for _ in range(2):
        envs.step(np.zeros(8, int))
    actions = np.zeros(8, int)
    actions[5] = RAISE
    obs, rewards, terminations, truncations, _ = envs.step(actions)
    lost = np.repeat([False, False, True, False], 2)
    assert_same(truncations, lost)
    assert_same(rewards, np.where(lost, 0.0, 1.0))
    assert not terminations.any()
    assert (obs[~lost] == 3).all()
    assert envs.valid.all()
    assert_same(envs.alive, ~lost)
    envs.close()


def test_central_states_come_from_actors():
    envs = make_vec_agents(functools.partial(Tag, length=4), 2, central_state=True, **TWO)
    envs.reset()
    envs.step({"runner": np.zeros(6, int), "catcher": np.zeros((2, 2), np.float32)})
    assert_same(envs.state(), np.array([[1.0, 1.0]] * 2))
    envs.close()
