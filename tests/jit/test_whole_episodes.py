"""`check_vector_env` plays whole episodes of compiled envs with indices checked."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from jit.toy_env import small_kernels

from vecenv import make_vec_agents
from vecenv.check import VectorEnvCheckError, check_vector_env
from vecenv.check import vector_env as checked
from vecenv.jit import AgentsOf, EnvKernels, JitVectorEnv
from vecenv.jit.cartpole import CartPoleVectorEnv

RULE = "kernels keep to their arrays for whole episodes"
LENGTH = 300  # longer than the runs of a check


def reset(state, rng):
    state.time = 0
    state.visits[:] = 0


def step(state, action, rng):
    state.visits[state.time // 100] += 1
    state.time += 1
    return 0.0, state.time == LENGTH, False


def step_too_far(state, action, rng):
    state.time += 1
    state.visits[state.time // 100] += 1  # the line at fault
    return 0.0, state.time == LENGTH, False


def step_too_far_back(state, action, rng):
    state.time += 1
    state.visits[-1 - state.time // 100] += 1  # the line at fault
    return 0.0, state.time == LENGTH, False


def observe(state, out):
    out[0] = state.time


FIELDS = [("time", np.int32), ("visits", np.int32, (3,))]
WALK = small_kernels(FIELDS, reset, step, observe, name="walk")


def failures_of(envs):
    with pytest.raises(VectorEnvCheckError) as caught:
        check_vector_env(envs, num_steps=5)
    assert envs.closed
    return caught.value


@pytest.mark.parametrize(
    ("step", "index"), [(step_too_far, "index 3"), (step_too_far_back, "index -4")]
)
def test_an_index_out_of_range_late_in_an_episode_is_found(step, index):
    """It is found before any compiled code runs, which it might end."""
    error = failures_of(JitVectorEnv(dataclasses.replace(WALK, step=step), 2, debug=True))
    (text,) = error.failures.values()
    assert list(error.failures) == [RULE]
    assert f"walk: {index} is out of bounds for axis 0 with size 3" in text
    line = int(text.partition(f"{__file__}:")[2].partition(",")[0])
    assert Path(__file__).read_text().splitlines()[line - 1].endswith("# the line at fault")
    assert "all other rules" in str(error)


def test_kernels_that_keep_to_their_arrays_pass_and_bundled_ones_are_not_played():
    report = check_vector_env(JitVectorEnv(WALK, 2, debug=True), num_steps=5)
    assert RULE in report.passed
    assert RULE not in check_vector_env(CartPoleVectorEnv(2, debug=True), num_steps=5).passed


def test_it_is_said_if_no_episode_has_ended(monkeypatch):
    monkeypatch.setattr(checked, "_PYTHON_SECONDS", 0.2)
    envs = JitVectorEnv(
        dataclasses.replace(WALK, step=lambda state, action, rng: (0.0, False, False)), debug=True
    )
    remarks = check_vector_env(envs, num_steps=5).remarks
    assert any("no episode ended: indices are unchecked after that" in one for one in remarks)
    envs = JitVectorEnv(envs.kernels, max_episode_steps=5, debug=True)
    assert not check_vector_env(envs, num_steps=5).remarks


@pytest.mark.parametrize("by_group", [True, False])
def test_games_are_played_too(by_group):
    game = EnvKernels(
        name="game",
        state_dtype=WALK.state_dtype,
        groups={"cat": AgentsOf(2, WALK.observation_space, WALK.action_space)},
        reset=reset,
        step=step_too_far,
        observe=lambda state, agent, out: observe(state, out),
    )
    envs = make_vec_agents(game, 2, debug=True)
    error = failures_of(envs.agents if by_group else envs)
    assert "game: index 3 is out of bounds" in error.failures[RULE]
