import copy

import numpy as np
import pytest
from choices import needs_jit
from envs import begun
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from jit.toy_env import TOY
from jit.toy_rolls import (
    assert_same,
    assert_same_states,
    make,
    random_actions,
    roll,
    slot_for,
    split_jobs,
)

from vecenv import ActionError
from vecenv.check import check_vector_env
from vecenv.core.compiling import is_jit_off

MODES = list(AutoresetMode)


@pytest.fixture
def many_threads(monkeypatch):
    split_jobs(monkeypatch, rows_per_line=2)


@pytest.mark.parametrize("mode", MODES)
def test_keeps_the_rules_of_vector_envs(mode):
    check_vector_env(make(3, autoreset_mode=mode), num_steps=60)


def test_an_env_does_not_depend_on_the_batch_around_it():
    actions = random_actions(60)
    frames = roll(make(60), actions)
    for env_id in (0, 1, 37, 59):
        alone = roll(make(1), actions[:, [env_id]], seed=3 + env_id)
        assert_same([frame[[env_id]] for frame in frames], alone)


@pytest.mark.parametrize("num_threads", [2, 7])
def test_threads_and_chunks_change_nothing(num_threads, many_threads):
    actions = random_actions(101)
    envs = make(101, num_threads=num_threads)
    assert_same(roll(envs, actions), roll(make(101, num_threads=1), actions))
    if not is_jit_off():
        assert envs._runner._num_parts == num_threads
    envs.close()


def test_send_copies_and_a_full_reset_gives_up_what_is_in_flight():
    envs, other = make(3), make(3)
    for each in (envs, other):
        each.reset(seed=1)
    actions = np.array([1, 0, -1])
    envs.send(actions)
    actions[:] = 0
    batch = envs.recv()
    np.testing.assert_array_equal(batch.obs, other.step([1, 0, -1])[0])
    envs.send([1], [2])
    with pytest.raises(AlreadyPendingCallError):
        envs.step([0, 0, 0])
    np.testing.assert_array_equal(envs.reset(seed=9)[0], other.reset(seed=9)[0])
    np.testing.assert_array_equal(envs.step(actions)[0], other.step(actions)[0])


def test_seeds_by_list_by_integer_and_by_none():
    envs = make(3)
    first = envs.reset(seed=[10, 20, 2**64 - 1])[0]
    assert envs.np_random_seed == (10, 20, 2**64 - 1)
    for env_id, seed in enumerate((10, 20, 2**64 - 1)):
        np.testing.assert_array_equal(first[env_id], make(1).reset(seed=seed)[0][0])
    goes_on = envs.reset(seed=[None, 20, None])[0]
    assert (goes_on[[0, 2]] != first[[0, 2]]).any(axis=1).all()
    np.testing.assert_array_equal(goes_on[1], first[1])
    assert (make(3).reset()[0] != make(3).reset()[0]).any(), "without a seed envs differ"
    assert len(set(make(3).np_random_seed)) == 3


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        *(({"seed": seed}, ValueError, None) for seed in (-1, 2**64 - 1, [5, -1])),
        ({"seed": "abc"}, TypeError, None),
        *(({"reset_mask": x}, TypeError, "reset_mask") for x in ([True, False], np.ones(2))),
        *(({"reset_mask": x}, ValueError, "reset_mask") for x in (np.ones(3) > 0, np.zeros(2) > 0)),
        ({"low": 0.1}, ValueError, "low"),
    ],
)
def test_wrong_seeds_masks_and_options_are_refused(given, error, message):
    envs = make(2)
    before = envs.reset(seed=0)[0]
    with pytest.raises(error, match=message):
        envs.reset(**(given if "seed" in given else {"options": given}))
    np.testing.assert_array_equal(envs.observe(), before)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, ">i8"])
def test_actions_of_any_integer_dtype_and_layout(dtype):
    envs, twin = begun(make(4)), begun(make(4))
    for row in random_actions(4):
        twice = np.repeat(row, 2).astype(dtype)[::2]
        twice.flags.writeable = False
        np.testing.assert_array_equal(envs.step(twice)[0], twin.step(row.tolist())[0])


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([0, 0, 2, 0], r"actions\[2\] \(env 2\) is 2, expected an integer from -1 to 1"),
        ([0, 0, 0, -2], r"actions\[3\] \(env 3\) is -2"),
        (np.array([0, 2**63, 0, 0], np.uint64), r"actions\[1\] \(env 1\) is 9223372036854775808"),
        ([0, 0, 0], r"shape \(3,\), expected \(4,\)"),
        ([0.0, 1.0, 0.0, 0.0], "dtype float64"),
    ],
)
def test_wrong_actions_are_refused_before_anything_runs(actions, message):
    envs = make(4)
    before = envs.reset(seed=0)[0]
    state = envs.state_dict()
    with pytest.raises(ActionError, match=message):
        envs.step(actions)
    with pytest.raises(ActionError, match=message):
        envs.send(actions)
    np.testing.assert_array_equal(envs.observe(), before)
    assert_same_states(envs.state_dict(), state)


def test_disabled_autoreset_refuses_to_step_ended_envs():
    envs = begun(make(3, autoreset_mode="Disabled", max_episode_steps=1))
    obs = envs.step([0, 0, 0])[0]
    with pytest.raises(ResetNeeded, match=r"\[0, 1, 2\]"):
        envs.step([0, 0, 0])
    envs.reset(options={"reset_mask": np.array([False, True, False])})
    with pytest.raises(ResetNeeded, match=r"\[0, 2\]"):
        envs.step([0, 0, 0])
    with pytest.raises(ResetNeeded, match=r"\[2\]"):
        envs.send([0, 0], [1, 2])
    np.testing.assert_array_equal(envs.observe()[[0, 2]], obs[[0, 2]])
    envs.send([0], [1])
    assert envs.recv().truncations.tolist() == [True]


@pytest.mark.parametrize("mode", MODES[:2])
def test_statistics_of_episodes(mode):
    envs = begun(make(7, autoreset_mode=mode, episode_infos=True, max_episode_steps=12))
    assert np.isnan(envs.last_returns).all() and not envs.last_lengths.any()
    returns, lengths, counts = np.zeros(7), np.zeros(7, int), np.zeros(7, int)
    was_over = np.zeros(7, bool)
    for row in random_actions(7, 100):
        _, rewards, terminations, truncations, infos = envs.step(row)
        returns += rewards
        lengths += ~was_over
        over = terminations | truncations
        counts += over
        assert ("episode" in infos) == over.any()
        if over.any():
            np.testing.assert_array_equal(infos["_episode"], over)
            np.testing.assert_array_equal(infos["episode"]["r"], np.where(over, returns, 0))
            np.testing.assert_array_equal(infos["episode"]["l"], np.where(over, lengths, 0))
            np.testing.assert_array_equal(envs.last_returns[over], returns[over])
            np.testing.assert_array_equal(envs.last_lengths[over], lengths[over])
            returns[over], lengths[over] = 0, 0
        was_over = over if mode is AutoresetMode.NEXT_STEP else was_over
        np.testing.assert_array_equal(envs.num_episodes, counts)
    assert counts.min() > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "num_envs is 0"),
        ({"max_episode_steps": 0}, "max_episode_steps is 0"),
        ({"num_threads": -1}, "num_threads is -1"),
        ({"autoreset_mode": "later"}, "later"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_spaces_are_gymnasiums_without_their_memory():
    envs = make(1000)
    assert envs.observation_space == batch_space(TOY.observation_space, 1000)
    assert envs.observation_space.sample() in envs.observation_space
    assert envs.action_space == batch_space(TOY.action_space, 1000)
    assert envs.action_space.sample() in envs.action_space
    assert copy.deepcopy(envs.observation_space) == envs.observation_space
    assert envs.observation_space.low.strides == (0, 4)
    assert envs.action_space.nvec.strides == (0,)


@needs_jit
def test_a_step_with_out_allocates_no_arrays():
    import tracemalloc

    envs = make(100_000, num_threads=1)
    slot, actions = slot_for(envs), np.zeros(100_000, dtype=np.int32)
    envs.reset(seed=0)
    for _ in range(10):
        envs.step(actions, out=slot)
    tracemalloc.start()
    for _ in range(10):
        envs.step(actions, out=slot)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 50_000, "less than the smallest array of one value per env"


def test_send_names_the_env_of_a_wrong_action():
    envs = begun(make(4))
    with pytest.raises(ActionError, match=r"actions\[1\] \(env 3\) is 5"):
        envs.send([0, 5], [1, 3])
