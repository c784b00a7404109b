"""The extended observation, action masks, and the observation in any dtype."""

import numpy as np
import pytest
from cage.challenge2.free_run import FreeRun
from cage.challenge2.harbour import HARBOUR

from vecenv.cage.challenge2.kernels import OBSERVATIONS, cage_kernels, observation_space
from vecenv.cage.challenge2.network.scenario import blue_actions, cage2_scenario
from vecenv.cage.challenge2.network.state import STATE_DTYPE
from vecenv.cage.challenge2.network.tables import compile_tables
from vecenv.cage.challenge2.play.policies import make_policy
from vecenv.cage.challenge2.rules.codes import B_LINE, DECOY, MEANDER, NO_RED
from vecenv.cage.challenge2.rules.observation import observe
from vecenv.core.compiling import cached_njit

# Each network and each dtype is compiled for itself.
DTYPES = {"CAGE Challenge 2": {}, "Harbour": {"obs_dtype": np.uint8}}
AGENTS = (B_LINE, MEANDER, NO_RED)  # in the order of the observation's last three values


@pytest.mark.parametrize("green", [False, True])
@pytest.mark.parametrize("scenario", [cage2_scenario(), HARBOUR], ids=["cage2", "harbour"])
def test_extended_observation_remembers_scans_and_decoys(scenario, green):
    num_hosts = len(scenario.hosts)
    options = {"observation": "extended", **DTYPES[scenario.name]}
    run = FreeRun(300, AGENTS, scenario=scenario, seed=3, green=green, **options)
    assert run.extended.dtype == run.envs.single_observation_space.dtype
    policy = make_policy("uniform", scenario, seed=3)
    memory = np.zeros((300, num_hosts))
    decoys = np.zeros((300, num_hosts), int)
    actions_by_index = blue_actions(scenario)
    for _ in range(60):
        actions = policy.act(run.obs, run.alerts())
        run.step(actions)
        plain = run.obs.reshape(300, num_hosts, 4)
        is_scan = (plain[:, :, 0] == 1) & (plain[:, :, 1] == 0)
        any_scan = is_scan.any(axis=1)
        memory[any_scan] = np.minimum(memory[any_scan], 1)
        memory[is_scan] = 2
        for row, action in enumerate(actions):
            _, kind, _, host = actions_by_index[action]
            if kind == 4:
                decoys[row, host] = 0
            if kind >= DECOY and run.states["blue_success"][row] == 1:
                decoys[row, host] |= 1 << (kind - DECOY)
        out = run.extended
        np.testing.assert_array_equal(out[:, : 4 * num_hosts], run.obs)
        np.testing.assert_array_equal(out[:, 4 * num_hosts : 5 * num_hosts], memory)
        counts = np.bitwise_count(decoys)
        np.testing.assert_array_equal(out[:, 5 * num_hosts : 6 * num_hosts], counts)


@pytest.mark.parametrize(
    "policy",
    [
        "sleep",
        "uniform",
        "obs_restore",
    ],
)
@pytest.mark.parametrize("scenario", [cage2_scenario(), HARBOUR], ids=["cage2", "harbour"])
def test_the_true_agent_always_fits_what_was_seen(policy, scenario):
    options = {"observation": "extended", **DTYPES[scenario.name]}
    run = FreeRun(900, AGENTS, scenario=scenario, seed=5, **options)
    blue = make_policy(policy, scenario, seed=5)
    is_agent = np.stack([run.states["red_agent"] == agent for agent in AGENTS], axis=1)
    for _ in range(60):
        run.step(blue.act(run.obs, run.alerts()))
        fits = run.extended[:, -3:]
        assert (fits[is_agent] == 1).all()
    if policy == "sleep":
        assert (fits.sum(axis=1) == 1).all()  # nothing hides from it


def test_a_quiet_start_gives_red_away_within_three_steps():
    run = FreeRun(300, AGENTS, seed=5, observation="extended")
    run.play(make_policy("sleep"), 3)
    assert (run.extended[:, -3:].sum(axis=1) == 1).all()


@cached_njit
def observe_row(states, row, out, tables):
    observe(states[row], out, tables)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_observation_is_written_in_any_dtype_and_nowhere_else(dtype):
    states = np.zeros(1, STATE_DTYPE).view(np.recarray)
    states["obs_bits"] = np.uint64(0xA5C3F00F12345678)
    out = np.full(60, 9, dtype)
    observe_row(states, 0, out[3:55], compile_tables(cage2_scenario()))
    expected = [int(states["obs_bits"][0]) >> bit & 1 for bit in range(52)]
    assert out[3:55].tolist() == expected
    assert (out[:3] == 9).all() and (out[55:] == 9).all()


def test_kernels_describe_themselves():
    scenario = cage2_scenario()
    assert observation_space(scenario).shape == (52,)
    space = observation_space(scenario, "extended", np.int8)
    assert space.shape == (81,) and space.dtype == np.int8
    assert space.high.max() == 8 and space.low.min() == 0
    for observation in set(OBSERVATIONS) - {"memory"}:
        kernels = cage_kernels(HARBOUR, observation=observation)
        assert kernels.action_space.n == 2 + 5 * 7
        assert kernels.state_dtype == STATE_DTYPE
    with pytest.raises(ValueError, match=r"must be one of bits, extended, memory; got 'full'"):
        cage_kernels(scenario, observation="full")
    with pytest.raises(TypeError, match="red_policy must be an njit function or None, got 'b'"):
        cage_kernels(scenario, red_policy="b")
