"""Compiled games with several agents are the games that `GameEnv` makes of the same rules."""

import dataclasses
import functools

import numpy as np
import pytest
from agents.toy_games import CHASE, NUM_CATS, WALK, PythonGame, mask
from agents.twins import play
from envs import begun
from gymnasium.spaces import Box, Discrete

from vecenv import ActionError, ObservationError, make_vec, make_vec_agents
from vecenv.jit import AgentsOf, KernelCompileError

GAMES = 3


def make(kernels, *, max_steps=None, **options):
    return make_vec_agents(kernels, GAMES, max_episode_steps=max_steps, **options)


@pytest.mark.parametrize(
    ("kernels", "mode", "by"),
    [
        (CHASE, "NextStep", "send"),
        (WALK, "SameStep", "out"),
        (CHASE, "Disabled", "out"),
        pytest.param(CHASE, "SameStep", "send", marks=pytest.mark.slow),
        pytest.param(WALK, "NextStep", "step", marks=pytest.mark.slow),
    ],
)
def test_games_go_as_they_do_in_python(kernels, mode, by):
    game = functools.partial(PythonGame, kernels, 9)
    options = {"autoreset_mode": mode, "max_episode_steps": 9}
    num_ends, _ = play(kernels, GAMES, 60, by=by, bare=game, **options)
    assert num_ends > 5


@pytest.mark.parametrize(
    "debug", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["plain", "compiled"]
)
def test_masks_are_those_of_the_agents(debug):
    kernels = dataclasses.replace(CHASE, action_mask=mask)
    envs = make(kernels, mask_infos=True, vector_kwargs={"debug": debug})
    _, infos = envs.reset(seed=2)
    for _ in range(30):
        masks = {name: group.action_masks() for name, group in envs.groups.items()}
        assert masks["cat"].shape == (GAMES * 2, 3)
        assert masks["mouse"].shape == (GAMES * 3, 5)
        np.testing.assert_array_equal(infos["cat"]["action_mask"], masks["cat"])
        cells = envs.games.states.cell[:, :NUM_CATS].reshape(-1)
        expected = ~((cells == 0) & envs.alive["cat"])
        np.testing.assert_array_equal(masks["cat"][:, 0], expected)
        assert masks["mouse"].all()
        *_, infos = envs.step({"cat": np.zeros(6, int), "mouse": np.ones((9, 2), int)})


def test_an_impossible_action_names_game_and_agent_and_steps_nothing():
    envs = begun(make(CHASE), seed=2)
    before = envs.games.states.copy()
    cats, mice = np.zeros(6, int), np.ones((9, 2), int)
    mice[7, 1] = 5
    with pytest.raises(ActionError, match=r"'mouse_1' \(group 'mouse'\) of game 2 is \[1 5\]"):
        envs.step({"cat": cats, "mouse": mice})
    np.testing.assert_array_equal(before, envs.games.states)


def test_a_game_without_agents_after_reset_is_refused():
    def leave_all(state, rng):
        for k in range(3):
            state.alive[k] = 0

    envs = make(dataclasses.replace(WALK, reset=leave_all), vector_kwargs={"debug": True})
    with pytest.raises(ObservationError, match="game 0 of Walk has no agents after reset"):
        envs.reset(seed=0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"groups": {"a": 3}}, TypeError, "group 'a' must be AgentsOf"),
        ({"observation_space": Discrete(3)}, ValueError, "is given beside groups"),
        ({"observe": {"walkers": len}}, TypeError, "one for each of the groups"),
        ({"state_dtype": [("alive", np.int8)]}, ValueError, "state_dtype has fields"),
        (
            {
                "groups": {
                    "a": AgentsOf(1, Box(0, 1, (2,), np.float32), Discrete(2)),
                    "b": AgentsOf(1, Box(0, 1, (2,), np.float64), Discrete(2)),
                },
                "observation_space": None,
                "action_space": None,
                "state_dtype": [("place", np.float64)],
            },
            ValueError,
            "give all groups Box spaces of one dtype",
        ),
        (
            {
                "groups": {
                    "a": AgentsOf(["x"], Discrete(2), Discrete(2)),
                    "b": AgentsOf(["x"], Discrete(2), Discrete(2)),
                }
            },
            ValueError,
            "agent 'x' is in 'a' and in 'b'",
        ),
    ],
)
def test_wrong_kinds_of_game_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(WALK, **changes)


def reset_a_misspelt_field(state, rng):
    state.plce[0, 0] = 0.0


def observe_a_misspelt_field(state, agent, out):
    out[0, 0] = state.plce[agent, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"reset": reset_a_misspelt_field}, {"observe": observe_a_misspelt_field}],
    ids=["reset", "observe"],
)
def test_a_kernel_that_cannot_be_compiled_is_named_with_its_line(changes):
    with pytest.raises(KernelCompileError, match="no field 'plce'; state has place") as caught:
        make(dataclasses.replace(WALK, **changes))
    assert "plce" in str(caught.value).splitlines()[1]


def test_all_agents_of_a_game_are_one_in_a_vector_env_of_arrays():
    envs = make_vec(WALK, 4, backend="jit", debug=True)
    obs, _ = envs.reset(seed=0)
    assert obs.shape == (4, 3, 2, 2)
    obs, rewards, *_ = envs.step(np.zeros((4, 3, 2), np.float32))
    np.testing.assert_array_equal(rewards, envs.states.rewards.sum(axis=1))
