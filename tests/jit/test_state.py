"""The states of JitVectorEnv: saved, loaded, changed while it lives; action masks."""

import numpy as np
import pytest
from envs import begun
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from jit.toy_rolls import assert_same, make, random_actions, roll

from vecenv import SlotError


@pytest.mark.parametrize("mode", list(AutoresetMode)[:2])
def test_goes_on_bit_for_bit_from_a_saved_state(mode, tmp_path):
    envs, actions = make(9, autoreset_mode=mode), random_actions(9)
    roll(envs, actions[:17])
    np.savez(tmp_path / "state.npz", **envs.state_dict())
    expected = [envs.observe(), *(array for row in actions[17:] for array in envs.step(row)[:4])]
    other = make(9, autoreset_mode=mode)
    with np.load(tmp_path / "state.npz") as state:
        other.load_state_dict(state)
    assert other.np_random_seed == envs.np_random_seed
    assert_same(
        [other.observe(), *(array for row in actions[17:] for array in other.step(row)[:4])],
        expected,
    )


def test_entries_of_archives_that_do_not_fit_are_refused(tmp_path):
    envs = begun(make(2))
    state = envs.state_dict()
    wrong = {"states": np.zeros(9, state["states"].dtype), "runs": np.zeros(9)}
    for name, array in wrong.items():
        with pytest.raises(ValueError, match=r"has (shape \(9|dtype float64).* expected"):
            envs.load_state_dict({**state, name: array})
    np.savez_compressed(tmp_path / "state.npz", **state)
    with np.load(tmp_path / "state.npz") as found:
        envs.load_state_dict(found)
    changed = state["runs"].copy()
    changed["episode_over"].view(np.uint8)[:] = 2
    with pytest.raises(ValueError, match="bytes in place of bools that are none"):
        envs.load_state_dict({**state, "runs": changed})


def test_saved_states_of_other_envs_are_refused():
    envs = make(2)
    with pytest.raises(ResetNeeded):
        envs.state_dict()
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=r"'states'.*\(3,\).*2 envs"):
        other = make(3)
        other.reset()
        envs.load_state_dict(other.state_dict())
    with pytest.raises(KeyError, match="runs"):
        envs.load_state_dict({"states": envs.states})
    envs.send([0], [1])
    with pytest.raises(AlreadyPendingCallError):
        envs.load_state_dict({})


def test_states_are_live():
    envs = begun(make(3))
    envs.states.position[1] = 40
    envs.states.trail[2] = (7, 8, 9)
    out = np.zeros((3, 3), np.float32)
    assert envs.observe(out=out) is out
    assert out[1, 0] == 40 and out[2, 2] == 9
    with pytest.raises(SlotError):
        envs.observe(out=out[:2])


def test_action_masks():
    envs = begun(make(3))
    envs.states.position = [0, 3, 6]
    expected = [[False, True, True], [True, True, True], [True, True, False]]
    np.testing.assert_array_equal(envs.action_masks(), expected)
    assert envs.action_masks().dtype == np.int8, "what `sample(mask=)` takes"
    out = np.zeros((3, 3), bool)
    assert envs.action_masks(out=out) is out
    np.testing.assert_array_equal(out, expected)
