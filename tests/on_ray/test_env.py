"""RayVectorEnv: compiled envs in actors, timing, ids; the rules of all backends: test_backends."""

import functools

import gymnasium as gym
import pytest
from envs import CounterEnv, mode_id
from equality import assert_same
from gymnasium.vector import AutoresetMode

from vecenv import RayVectorEnv, make_vec
from vecenv.cage import Cage2VectorEnv
from vecenv.jit.cartpole import CartPoleVectorEnv
from vecenv.synthetic import SyntheticEnv

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

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


@pytest.mark.parametrize("way", ["step", "recv"])
def test_a_slow_env_is_seen_in_its_actor(tmp_path, way):
    fns = [functools.partial(SyntheticEnv, wait_ms=30.0 if k == 2 else 3.0) for k in range(4)]
    spread = RayVectorEnv(fns, num_workers=2)
    spread.reset()
    spread.step([0] * 4)
    spread.timing.enable()
    before = spread.busy_ns.copy()
    for _ in range(10):
        if way == "step":
            spread.step([0] * 4)
        else:
            spread.send([0] * 4)
            spread.recv()
    report = spread.timing.report()
    busy_ns = spread.busy_ns - before
    assert report.shares["env compute"] > 0.5 > report.shares["hand-over"]
    assert "the actors" in report.verdict
    assert busy_ns[0] > 10 * 6e6
    assert busy_ns[1] > max(10 * 33e6, 2 * busy_ns[0])  # 6 ms in one actor, 33 in the other one
    spread.timing.write_trace(tmp_path / "trace.json")
    spread.close()


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
    assert isinstance(spread, RayVectorEnv) and spread.num_workers == 2
    assert_same(spread.reset(seed=1), sync.reset(seed=1))
    spread.close()
    options = {"vector_kwargs": {"num_workers": 2, "num_threads": 1}, "autoreset_mode": "SameStep"}
    compiled = make_vec("JitCartPole-v1", 6, backend="ray", **options)
    assert compiled._env_chunks() == [0, 3, 6]
    twin = CartPoleVectorEnv(6, autoreset_mode="SameStep", max_episode_steps=None)
    assert_same(compiled.reset(seed=1)[0], twin.reset(seed=1)[0])
    compiled.close()
