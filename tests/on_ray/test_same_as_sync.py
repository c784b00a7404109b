"""The same seeds give what SyncVectorEnv gives, whatever the actors and what is in them."""

import functools
import sys
import types

import gymnasium as gym
import numpy as np
import pytest
from envs import (
    MODES,
    NUM_ENVS,
    SPACES,
    CounterEnv,
    arrays_in,
    counters,
    mode_id,
    restart_ended,
)
from equality import assert_same
from gymnasium.vector import AutoresetMode
from twins import assert_steps_alike
from twins import twins as sync_twins

from vecenv import RayVectorEnv, StepSlot, SyncVectorEnv, check_vector_env, make_vec
from vecenv.cage import Cage2VectorEnv
from vecenv.core.infos import take_infos
from vecenv.jit.cartpole import CartPoleVectorEnv
from vecenv.synthetic import SyntheticEnv

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

ASYNC = {"worker_backend": "async", "worker_options": {"num_workers": 1}}
WAYS = {"1 actor": {"num_workers": 1}, "3 actors": {"num_workers": 3}}
WAYS |= {"async in 2 actors": {"num_workers": 2, **ASYNC}}
WAYS |= {"restarting": {"num_workers": 2, "on_error": "restart"}}


twins = functools.partial(sync_twins, make=RayVectorEnv, num_workers=2)


@pytest.mark.parametrize("name", ["dict with objects", "text", "uint8 image"])
def test_any_space(name):
    spread, sync = twins(SPACES[name])
    assert_same(spread.reset(seed=2), sync.reset(seed=2))
    assert_steps_alike(spread, sync, 6, name)
    spread.close()


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@pytest.mark.parametrize("way", WAYS)
def test_any_number_of_actors_and_any_mode(way, mode):
    spread, sync = twins(SPACES["float32(3,)"], mode, **WAYS[way])
    assert_same(spread.reset(seed=2), sync.reset(seed=2))
    assert_steps_alike(spread, sync, 10)
    options = {"reset_mask": np.array([True, False, False, True, False])}
    seeds = [7, None, 8, 9, 1]
    assert_same(spread.reset(seed=seeds, options=options), sync.reset(seed=seeds, options=options))
    assert_steps_alike(spread, sync, 5)
    spread.close()


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@pytest.mark.parametrize("way", ["3 actors", "async in 2 actors"])
def test_any_split_into_sends(way, mode):
    spread, sync = twins(SPACES["nested"], mode, **WAYS[way])
    rng = np.random.default_rng(8)
    assert_same(spread.reset(seed=2), sync.reset(seed=2))
    for step in range(6):
        actions = rng.integers(0, 4, NUM_ENVS)
        expected = sync.step(actions)
        cuts = np.sort(rng.integers(0, NUM_ENVS + 1, size=2))
        for ids in np.split(rng.permutation(NUM_ENVS), cuts):
            if len(ids):
                spread.send(actions[ids], ids)
        left = NUM_ENVS
        while left:
            batch = spread.recv(min_envs=int(rng.integers(1, left + 1)), timeout=30)
            left -= len(batch.env_ids)
            rows = [array[batch.env_ids] for array in arrays_in(expected[0])]
            assert_same(arrays_in(batch.obs), rows, f"step {step}")
            for name, array in zip(("rewards", "terminations"), expected[1:3], strict=True):
                assert_same(getattr(batch, name), array[batch.env_ids])
            found, wanted = batch.infos, take_infos(expected[4], batch.env_ids)
            masks = [key for key in wanted if key.startswith("_") and wanted[key].any()]
            assert_same({k: found[k] for k in masks}, {k: wanted[k] for k in masks})
        assert_same(restart_ended(spread, expected), restart_ended(sync, expected))
    spread.close()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_out_is_filled(dtype):
    env_fns = counters([2, 3, 5])
    spread, sync = RayVectorEnv(env_fns, num_workers=2), SyncVectorEnv(env_fns)
    obs, _ = spread.reset(seed=1)
    sync.reset(seed=1)
    flags = [spread.allocate((3,), np.bool_) for _ in range(2)]
    slot = StepSlot(spread.allocate(obs.shape), spread.allocate((3,), dtype), *flags)
    for _ in range(6):
        result, expected = spread.step([1, 2, 3], out=slot), sync.step([1, 2, 3])
        assert all(came is own for came, own in zip(result[:4], slot, strict=True))
        assert_same((slot.obs, *flags), (expected[0], *expected[2:4]))
        assert slot.rewards.tolist() == expected[1].tolist()
    assert_same(spread.step([1, 1, 1]), sync.step([1, 1, 1]))
    mask = {"reset_mask": np.array([False, True, False])}
    assert_same(spread.reset(options=mask), sync.reset(options=mask))
    spread.close()


COMPILED = {
    "CartPole": functools.partial(CartPoleVectorEnv, max_episode_steps=20),
    "Cage2": functools.partial(Cage2VectorEnv, episode_length=10),
}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=mode_id)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_envs(name, mode):
    here = COMPILED[name](num_envs=7, autoreset_mode=mode)
    spread = RayVectorEnv(COMPILED[name], num_envs=7, num_workers=2, autoreset_mode=mode)
    assert_same(spread.reset(seed=3)[0], here.reset(seed=3)[0])
    here.action_space.seed(4)
    for _ in range(30):
        actions = here.action_space.sample()
        assert_same(spread.step(actions), here.step(actions))
    assert spread.np_random_seed == here.np_random_seed
    with pytest.raises(NotImplementedError, match="no env objects"):
        spread.call("render")
    spread.close()
    here.close()


@pytest.mark.parametrize("way", ["3 actors", "async in 2 actors"])
def test_the_checker_finds_nothing(way):
    spread, _ = twins(SPACES["float32(3,)"], **WAYS[way])
    report = check_vector_env(spread, num_steps=30)
    assert "send and recv give what step gives" in report.passed
    assert not [line for line in report.skipped if "ResetNeeded" in line]


def test_methods_and_attributes_of_envs():
    spread = RayVectorEnv(counters([3] * 5), num_workers=2)
    spread.reset(seed=4)
    assert spread.get_attr("name") == (0, 1, 2, 3, 4)
    assert spread.call("double", 3, offset=1) == (7, 8, 9, 10, 11)
    spread.set_attr("name", [9, 8, 7, 6, 5])
    assert spread.render() == tuple(f"frame of {name}" for name in (9, 8, 7, 6, 5))
    assert spread.np_random_seed == (4, 5, 6, 7, 8)
    assert [generator.random() for generator in spread.np_random]
    with pytest.raises(ValueError, match="`2` values for 5"):
        spread.set_attr("name", [1, 2])
    with pytest.raises(ValueError, match="use `step` directly"):
        spread.call("step", 0)
    spread.close()


def test_timing_counts_calls_and_waiting():
    spread = RayVectorEnv(counters([3] * 4), num_workers=2)
    spread.reset()
    spread.timing.enable()
    for _ in range(5):
        spread.step([0] * 4)
    report = spread.timing.report()
    assert report.num_steps == 16  # four rows of twenty are resets
    assert report.resets.num_steps == 4
    assert "RayVectorEnv" in str(report)
    spread.timing.disable()
    spread.step([0] * 4)
    assert spread.timing.report().num_steps == 16
    spread.close()


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_slow_env_is_seen_in_its_actor(way, tmp_path):
    fns = [functools.partial(SyntheticEnv, wait_ms=30.0 if k == 2 else 3.0) for k in range(4)]
    options = {"worker_options": {"threads_per_worker": 2}} if way == "async" else {}
    spread = RayVectorEnv(fns, num_workers=2, worker_backend=way, **options)
    spread.reset()
    spread.step([0] * 4)
    spread.timing.enable()
    for _ in range(10):
        spread.step([0] * 4)
    report = spread.timing.report()
    # 6 ms in one actor and 33 ms in the other one, by turns; or all side by side.
    work = {"sync": (6, 33), "async": (3, 3, 30, 3)}[way]
    mean = sum(work) / len(work)
    of_straggler = (max(work) - mean) / max(work)
    assert report.shares["hand-over"] < 0.5
    in_envs = report.shares["env compute"] + report.shares["straggler wait"]
    assert report.shares["straggler wait"] / in_envs == pytest.approx(of_straggler, abs=0.1)
    assert [times.name for times in report.slowest if times.is_slow] == ["env 2"]
    assert report.cpu_share < 0.3
    spread.send([0] * 4)
    assert spread.recv(1, max_envs=1).env_ids.size == 1
    spread.recv()
    spread.timing.write_trace(tmp_path / "trace.json")
    assert spread.timing.report().num_steps == 44
    spread.close()


def test_envs_in_compiled_actors_are_not_told_apart():
    spread = RayVectorEnv(CartPoleVectorEnv, num_envs=8, num_workers=2)
    spread.timing.enable()
    spread.reset()
    for _ in range(3):
        spread.step([0] * 8)
    report = spread.timing.report()
    spread.timing.disable()
    spread.close()
    assert set(report.shares) == {"env calls", "other"}
    assert "unknown" in report.verdict


def test_ids_registered_by_the_caller_are_known_in_actors():
    gym.register("Counter-v7", CounterEnv, disable_env_checker=True)
    try:
        spread = RayVectorEnv([lambda: gym.make("Counter-v7", name=5)] * 2, num_workers=2)
        assert spread.reset()[0].tolist() == [[5, 0, 0]] * 2
        spread.close()
    finally:
        gym.registry.pop("Counter-v7")


def test_make_vec_on_ray():
    on_ray = {"backend": "ray", "vector_kwargs": {"num_workers": 2}}
    spread, sync = make_vec("CartPole-v1", 4, **on_ray), make_vec("CartPole-v1", 4, backend="sync")
    assert spread.spec is not None
    assert spread.spec.kwargs["vectorization_mode"] == "ray"
    assert_same(spread.reset(seed=1), sync.reset(seed=1))
    spread.close()
    again = make_vec(spread.spec)
    assert isinstance(again, RayVectorEnv)
    assert again.num_workers == 2
    again.close()
    options = {"vector_kwargs": {"num_workers": 2, "num_threads": 1}, "autoreset_mode": "SameStep"}
    compiled = make_vec("JitCartPole-v1", 6, backend="ray", **options)
    assert [rows.stop for rows in map(compiled._rows_of, range(2))] == [3, 6]
    twin = CartPoleVectorEnv(6, autoreset_mode="SameStep", max_episode_steps=None)
    assert_same(compiled.reset(seed=1)[0], twin.reset(seed=1)[0])
    compiled.close()


def test_ids_of_modules_that_actors_lack_are_no_hindrance(monkeypatch):
    absent = types.ModuleType("absent_here")
    absent.Absent = type("Absent", (CounterEnv,), {"__module__": "absent_here"})
    monkeypatch.setitem(sys.modules, "absent_here", absent)
    gym.register("Absent-v0", absent.Absent, disable_env_checker=True)
    try:
        spread = RayVectorEnv(counters([3] * 2), num_workers=2)
        assert spread.reset()[0].tolist() == [[0, 0, 0], [1, 0, 0]]
        spread.close()
    finally:
        gym.registry.pop("Absent-v0")


def test_batches_of_one_size():
    """Whole replies come from actors; what is too much waits there for the next recv."""
    spread, sync = twins(SPACES["nested"], num_workers=2)
    assert_same(spread.reset(seed=3), sync.reset(seed=3))
    counts, actions = np.zeros(NUM_ENVS, int), np.zeros(NUM_ENVS, np.int64)
    expected = [sync.step(actions) for _ in range(8)]
    spread.send(actions)
    for _ in range(8):
        batch = spread.recv(max_envs=2)
        assert len(batch.env_ids) == 2
        for row, env_id in enumerate(batch.env_ids.tolist()):
            step = expected[counts[env_id]]
            assert batch.rewards[row] == step[1][env_id]
            assert_same(batch.obs["b"][0][row], step[0]["b"][0][env_id])
            counts[env_id] += 1
        again = batch.env_ids[counts[batch.env_ids] < 8]
        if len(again):
            spread.send(actions[again], again)
    spread.close()
