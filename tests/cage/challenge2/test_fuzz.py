"""Whatever comes in, compiled code stays inside its arrays; and it runs as plain Python too."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from cage.challenge2.harbour import HARBOUR
from cage.golden import RULES_OF_TRACE, load_trace

from vecenv.cage.challenge2.replay import (
    Replay,
    apply_rows,
    commit_rows,
    options_rows,
    replay_episodes,
)
from vecenv.cage.challenge2.rules.dynamics import action_mask
from vecenv.cage.challenge2.scenario import cage2_scenario
from vecenv.cage.challenge2.tables import STATE_DTYPE, compile_tables
from vecenv.core.compiling import cached_njit

FOLDER = pathlib.Path(__file__).parent
EDGES = np.array(
    [0, 1, 2, 3, 7, 8, 12, 13, 14, 15, 16, 63, 64, 144, 145, 255, 256, 2**31, 2**62, 2**63 - 1]
)


@cached_njit
def mask_rows(states, out, tables):
    for row in range(states.shape[0]):
        action_mask(states[row], out[row], tables)


def wild_numbers(rng, shape):
    """Integers of all sizes, with the edges of every range in them."""
    numbers = rng.integers(-(2**63), 2**63 - 1, shape, dtype=np.int64)
    numbers >>= rng.integers(0, 63, shape)
    edges = rng.choice(np.concatenate([EDGES, -EDGES - 1]), shape)
    return np.where(rng.random(shape) < 0.7, edges, numbers)


@pytest.mark.parametrize("scenario", [cage2_scenario(), HARBOUR], ids=["cage2", "harbour"])
def test_any_input_on_any_state_stays_inside(scenario):
    """States of random bytes, inputs of random size: the guard rows around stay untouched."""
    rng = np.random.default_rng(1)
    num_hosts = len(scenario.hosts)
    tables = compile_tables(scenario, red_agents=(), green=True)
    for _ in range(40):
        raw = rng.integers(0, 256, (66, STATE_DTYPE.itemsize), dtype=np.uint8)
        raw[rng.random(66) < 0.3] &= rng.integers(0, 2, STATE_DTYPE.itemsize, dtype=np.uint8)
        guards = raw[[0, 65]].copy()
        states = raw.reshape(-1).view(STATE_DTYPE).view(np.recarray)[1:65]
        obs = np.full((66, 4 * num_hosts), 7, np.uint8)
        errors = np.zeros(64, np.uint8)
        types, targets = np.zeros(64, np.uint64), np.zeros(64, np.uint64)
        for _ in range(5):
            options_rows(states, types, targets, tables)
            assert (types <= 5).all()
            moves = wild_numbers(rng, (2, 64))
            commit_rows(states, moves[0], moves[1], tables)
            apply_rows(states, wild_numbers(rng, (64, 7)), obs[1:65], errors, tables)
        assert set(np.unique(obs[1:65])) <= {0, 1}
        assert (obs[[0, 65]] == 7).all()
        np.testing.assert_array_equal(raw[[0, 65]], guards)
        masks = np.zeros((64, 300), bool)
        mask_rows(states, masks, tables)
        assert not masks[:, int(tables.num_actions) :].any()


@pytest.mark.parametrize("rules", ["faithful", "debugged"])
def test_any_action_number_is_taken_as_some_action(rules):
    """Numbers that are no action count as Sleep; Python refuses them before they get here."""
    rng = np.random.default_rng(2)
    wild, tame = (Replay(200, cage2_scenario(rules)) for _ in range(2))
    for _ in range(50):
        inputs = rng.integers(0, 6, (200, 7))
        inputs[:, 0] = actions = wild_numbers(rng, 200)
        for replay, blue in (wild, actions), (tame, actions * ((actions >= 0) & (actions < 145))):
            inputs[:, 0] = blue
            obs, errors = np.zeros((200, 52), np.uint8), np.zeros(200, np.uint8)
            apply_rows(replay.states, inputs, obs, errors, replay._tables)
    assert wild.states.tobytes() == tame.states.tobytes()
    assert (wild.true_state()["access"] <= 2).all()


@pytest.mark.slow
def test_nothing_indexes_outside_with_bounds_checked():
    files = [FOLDER / f"test_{name}.py" for name in ("replay", "fuzz", "twin", "draws")]
    chosen = "not bounds_checked and not many_seeds"
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-k", chosen]
    checked, root = {**os.environ, "NUMBA_BOUNDSCHECK": "1"}, FOLDER.parents[2]
    subprocess.run([*command, *files], cwd=root, env=checked, check=True, timeout=600)


@pytest.mark.parametrize("name", ["shared", "debugged"])
def test_beginnings_of_episodes_replay(name):
    """Few steps, so that it can be run with the compiler off as well."""
    trace = load_trace(name)
    part = {k: array[:6, :40] if array.ndim > 1 else array[:6] for k, array in trace.items()}
    result = replay_episodes(part, cage2_scenario(RULES_OF_TRACE[name]))
    assert result.policy_agrees.all() and not result.errors.any()
    for key, array in result.fields.items():
        np.testing.assert_array_equal(array, part[key], err_msg=key)
