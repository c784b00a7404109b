"""check_vector_env passes what keeps the rules, and says what it could not try."""

import functools
import multiprocessing

import gymnasium as gym
import numpy as np
import pytest
from choices import fast_are, product
from envs import MODES, SPACES, CounterEnv, RandomEnv, mode_id
from gymnasium.vector import AsyncVectorEnv
from gymnasium.vector import SyncVectorEnv as GymnasiumSyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from vector_envs import (
    DISABLED,
    NEXT_STEP,
    SAME_STEP,
    DriftVectorEnv,
)
from versions import needs

from vecenv import SyncVectorEnv, make_vec
from vecenv.check import CheckReport, VectorEnvCheckError, check_vector_env

POPS = "reset changes the options passed to it"
# That each rule is tried is shown by envs that break it: tests/test_check_failures.py.
OF_MODE = {
    NEXT_STEP: "NEXT_STEP: the step after an end ignores its action",
    SAME_STEP: "SAME_STEP: final_obs are in single_observation_space",
    DISABLED: "a partial reset leaves the other envs alone",
}
COPIES, SENDS = "observations returned earlier don't change", "send and recv give what step gives"


# Workers can unpickle this without importing a test module.
cart_pole = functools.partial(gym.make, "CartPole-v1")


@pytest.mark.parametrize(("mode", "num_envs"), [*zip(MODES, (2, 3, 2), strict=True)])
def test_ours_passes(mode, num_envs):
    envs = SyncVectorEnv([cart_pole] * num_envs, autoreset_mode=mode)
    report = check_vector_env(envs, num_steps=100)
    assert {OF_MODE[mode], COPIES, SENDS} <= set(report.passed) and len(report.passed) >= 35
    assert report.skipped == ()
    assert report.remarks == ()


REFUSES = needs("gymnasium", "1.2.1", "takes too few actions, or waits for ever")


@REFUSES
@pytest.mark.parametrize(
    ("mode", "copy"), [(NEXT_STEP, False), (SAME_STEP, True), (DISABLED, True), (DISABLED, False)]
)
def test_gymnasiums_sync_passes(mode, copy):
    """It changes the options passed to reset, which is remarked on."""
    envs = GymnasiumSyncVectorEnv([cart_pole] * 3, copy=copy, autoreset_mode=mode)
    report = check_vector_env(envs, num_steps=100)
    assert OF_MODE[mode] in report.passed and (COPIES in report.passed) == copy
    assert SENDS not in report.passed  # which only vecenv's have
    expected = {POPS} if mode is DISABLED else set()
    assert set(report.remarks) == expected | (
        set() if copy else {"observations are views (copy=False)"}
    )


@REFUSES
@pytest.mark.parametrize(
    ("mode", "shared_memory"),
    fast_are([*zip(MODES, (True, False, True), strict=True)], product(MODES, [True, False])),
)
def test_gymnasiums_async_passes_and_its_workers_end(mode, shared_memory):
    multiprocessing.set_forkserver_preload(["gymnasium"])
    options = {"shared_memory": shared_memory, "context": "forkserver"}  # fork warns of threads
    envs = AsyncVectorEnv([cart_pole] * 2, autoreset_mode=mode, **options)
    report = check_vector_env(envs, num_steps=40)
    assert {OF_MODE[mode], COPIES} <= set(report.passed)
    assert not any(process.is_alive() for process in envs.processes)


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@pytest.mark.parametrize("num_envs", [1, 4])
def test_a_vector_env_of_other_people_passes(mode, num_envs):
    envs = DriftVectorEnv(num_envs, mode)
    report = check_vector_env(envs)
    assert (OF_MODE[mode] in report.passed) == (num_envs > 1 or mode is not DISABLED)
    one = "envs are seeded differently: there is one env"
    assert (one in report.skipped) == (num_envs == 1)
    assert envs.num_closed == 2


@pytest.mark.parametrize("name", fast_are([*SPACES][::3], SPACES))
def test_observations_and_actions_of_any_space_pass(name):
    mode = MODES[list(SPACES).index(name) % 3]
    env_fns = [functools.partial(RandomEnv, SPACES[name], SPACES[name])] * 3
    report = check_vector_env(SyncVectorEnv(env_fns, autoreset_mode=mode), num_steps=12)
    assert OF_MODE[mode] in report.passed


def test_a_wrapper_that_adds_infos_passes():
    envs = RecordEpisodeStatistics(make_vec("CartPole-v1", 3, backend="sync"))
    check_vector_env(envs)


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_without_the_end_of_an_episode_the_report_says_so(mode):
    report = check_vector_env(SyncVectorEnv([cart_pole] * 2, autoreset_mode=mode), num_steps=3)
    assert "rules about the end of an episode: no episode ended in 3 steps; raise num_steps" in (
        report.skipped
    )
    assert not [rule for rule in report.passed if rule.startswith(mode.name)] or mode is SAME_STEP


def test_envs_that_always_start_alike_are_held_to_it():
    """Counter envs know no chance, so seeds can't be checked; their starts can."""

    class SameStart(CounterEnv):
        def reset(self, *, seed=None, options=None):
            obs, info = super().reset(seed=seed, options=options)
            obs[1] = 0  # not the number of the episode
            return obs, info

        def step(self, action):
            obs, *rest = super().step(action)
            obs[1] = 0
            return (obs, *rest)

    report = check_vector_env(SyncVectorEnv([SameStart, SameStart]), num_steps=10)
    assert "envs are seeded differently: starts don't depend on the seed" in report.skipped
    assert "an ended episode is followed by a new one" in report.passed
    assert "a partial reset resets the envs of its mask" in report.passed


def test_a_vector_env_that_has_been_reset_is_not_blamed():
    envs = make_vec("CartPole-v1", 2, backend="sync")
    envs.reset()
    report = check_vector_env(envs)
    assert (
        "step before the first reset raises ResetNeeded: the vector env has been reset before"
        in report.skipped
    )


def test_the_report_reads_well():
    report = CheckReport(("a", "b"), ("c: why",), ("d",))
    assert str(report) == "2 rules passed, 1 could not be tried\nskipped: c: why\nremark: d"
    assert report.full() == "passed: a\npassed: b\nskipped: c: why\nremark: d"


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(TypeError, match=r"expected a .*VectorEnv, got CounterEnv"):
        check_vector_env(CounterEnv())
    with pytest.raises(ValueError, match="num_steps is 0"):
        check_vector_env(DriftVectorEnv(), num_steps=0)


class MaskedTalker(gym.Env):
    """Raises at action 1, which masks forbid; its observations have a part that no space has."""

    observation_space = gym.spaces.Dict({"seen": gym.spaces.Box(0, 1, (1,), np.float32)})
    action_space = gym.spaces.Discrete(2)

    def __init__(self, masks, extra):
        self.masks, self.extra = masks, extra

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 9
        return self.results()

    def step(self, action):
        if action == 1:
            raise ValueError("action 1 is not allowed")
        self.left -= 1
        obs, info = self.results()
        return obs, 0.0, self.left == 0, False, info

    def results(self):
        obs = {"seen": self.np_random.random(1, np.float32), **self.extra}
        mask = self.masks.get(self.left, [1, 0])
        return obs, {} if mask is None else {"action_mask": np.array(mask, np.int8)}


@pytest.mark.parametrize("mask", [None, [0, 0]], ids=["missing", "zeros"])
def test_a_wrong_mask_is_named_instead_of_what_the_env_raises_at(mask):
    envs = SyncVectorEnv([functools.partial(MaskedTalker, {5: mask}, {})] * 2)
    with pytest.raises(VectorEnvCheckError) as caught:
        check_vector_env(envs, num_steps=30)
    (told,) = caught.value.failures.values()
    wanted = "env 0 gave no infos['action_mask']" if mask is None else "of env 0 allows no action"
    assert told.startswith("step 4: ") and wanted in told
    check_vector_env(SyncVectorEnv([functools.partial(MaskedTalker, {}, {})] * 2), num_steps=30)


def test_parts_of_observations_that_no_space_declares_are_named():
    extra = {"secret": np.zeros(3, np.float32)}
    envs = SyncVectorEnv([functools.partial(MaskedTalker, {}, extra)] * 2)
    with pytest.raises(VectorEnvCheckError) as caught:
        check_vector_env(envs, num_steps=30)
    assert list(caught.value.failures) == ["observations have no parts but those of the space"]
    (told,) = caught.value.failures.values()
    assert "obs['secret'] of env 0 is not in its observation_space" in told
