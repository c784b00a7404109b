"""SB3VecEnv against stable-baselines3's own DummyVecEnv, on the points its tests check."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from envs import CounterEnv, counters
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from masked_envs import Minefield, kernels

import vecenv
from vecenv.cage import Cage2VectorEnv, evaluate
from vecenv.jit import JitVectorEnv

pytest.importorskip("stable_baselines3")
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor, load_results
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from vecenv.adapters.sb3 import SB3VecEnv, make_sb3_env

SAME_STEP = AutoresetMode.SAME_STEP
LENGTHS = [2, 3, 5]


class GoalEnv(CounterEnv):
    """The same in a Dict, and with actions of another kind."""

    observation_space = spaces.Dict(
        where=CounterEnv.observation_space, parity=spaces.Discrete(2), bits=spaces.MultiBinary(2)
    )
    action_space = spaces.Box(-1, 1, (2,))

    def _observe(self):
        step = self.step_number
        bits = np.array([step % 2, 1], np.int8)
        return {"where": super()._observe(), "parity": step % 2, "bits": bits}


def sync(lengths=LENGTHS, **kwargs):
    return vecenv.SyncVectorEnv(counters(lengths, **kwargs), autoreset_mode=SAME_STEP)


def backends():
    options = {"autoreset_mode": SAME_STEP}
    yield "sync", sync
    yield "async", lambda: vecenv.AsyncVectorEnv(counters(LENGTHS), num_workers=2, **options)
    yield "gymnasium", lambda: gym.vector.SyncVectorEnv(counters(LENGTHS), **options)
    yield "jit", lambda: vecenv.make_vec("JitCartPole-v1", 3, **options)
    yield "cage", lambda: Cage2VectorEnv(3, episode_length=4, step_infos="red_type", **options)


@pytest.fixture(params=backends(), ids=lambda pair: pair[0])
def envs(request):
    envs = SB3VecEnv(request.param[1]())
    yield envs
    envs.close()


def random_actions(envs):
    return np.array([envs.action_space.sample() for _ in range(envs.num_envs)])


def assert_infos_equal(ours, theirs):
    for info, other in zip(ours, theirs, strict=True):
        expected = dict(other)
        if not expected.pop("TimeLimit.truncated"):  # DummyVecEnv says so at every step
            info = {key: value for key, value in info.items() if key != "TimeLimit.truncated"}
        else:
            assert info.pop("TimeLimit.truncated") is True
        if "episode" in expected:
            expected["episode"]["t"] = info["episode"]["t"]
        np.testing.assert_equal(info, expected)


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("kind", [CounterEnv, GoalEnv])
def test_all_that_dummy_vec_env_returns(kind, truncates):
    def make(name):
        return lambda: Monitor(kind(name, LENGTHS[name], truncates=truncates))

    theirs = DummyVecEnv([make(name) for name in range(3)])
    plain = [lambda name=name: kind(name, LENGTHS[name], truncates=truncates) for name in range(3)]
    ours = SB3VecEnv(vecenv.SyncVectorEnv(plain, autoreset_mode=SAME_STEP))
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    for envs in (ours, theirs):
        envs.seed(3)
    np.testing.assert_equal(ours.reset(), dict(e) if isinstance(e := theirs.reset(), dict) else e)
    for _ in range(12):
        actions = random_actions(theirs)
        results = [envs.step(actions) for envs in (ours, theirs)]
        for mine, other in zip(*(result[:3] for result in results), strict=True):
            np.testing.assert_equal(mine, dict(other) if isinstance(other, dict) else other)
            assert getattr(mine, "dtype", None) == getattr(other, "dtype", None)
        assert_infos_equal(results[0][3], results[1][3])
        np.testing.assert_equal(ours.reset_infos, theirs.reset_infos)
    np.testing.assert_equal(
        [env.calls for env in ours.envs.envs], theirs.get_attr("calls"), "the envs saw the same"
    )


def test_every_backend_keeps_the_form(envs):
    assert isinstance(envs, VecEnv) and isinstance(envs, SB3VecEnv)
    obs = envs.reset()
    num_ended = 0
    for _ in range(60):
        before = obs.copy()
        obs, rewards, dones, infos = envs.step(random_actions(envs))
        assert obs.shape == (3, *envs.observation_space.shape)
        assert obs.dtype == envs.observation_space.dtype
        assert rewards.shape == dones.shape == (3,)
        assert (rewards.dtype, dones.dtype) == (np.float32, np.bool_)
        assert isinstance(infos, list) and all(type(info) is dict for info in infos)
        for i in range(3):
            assert ("terminal_observation" in infos[i]) == dones[i]
            if dones[i]:
                num_ended += 1
                assert isinstance(infos[i]["TimeLimit.truncated"], bool)
                assert infos[i]["terminal_observation"].shape == obs[i].shape
                assert set(infos[i]["episode"]) == {"r", "l", "t"}
                assert not np.array_equal(infos[i]["terminal_observation"], before)
    assert num_ended > 3


def test_arrays_and_infos_are_the_callers(envs):
    first = envs.reset()
    copied = first.copy()
    obs, rewards, dones, infos = envs.step(random_actions(envs))
    infos[0]["mark"] = True
    kept = [array.copy() for array in (obs, rewards, dones)]
    later = envs.step(random_actions(envs))
    np.testing.assert_equal(first, copied)
    for array, copy in zip((obs, rewards, dones), kept, strict=True):
        np.testing.assert_equal(array, copy)
    assert "mark" not in later[3][0]


def test_seeds_count_for_one_reset(envs):
    assert list(envs.seed(7)) == [7, 8, 9]
    first = envs.reset().copy()
    envs.seed(7)
    np.testing.assert_equal(envs.reset()[:, :1], first[:, :1])
    envs.seed(7)
    envs.reset()
    assert envs._seeds == [None] * 3


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_attributes_and_methods_of_single_envs(backend):
    envs = make_sb3_env(counters([3, 3, 3]), backend=backend)
    assert envs.get_attr("name") == [0, 1, 2]
    assert envs.get_attr("name", indices=1) == [1]
    assert envs.get_attr("name", indices=[2, 0]) == [2, 0]
    assert envs.env_method("double", 5, indices=[0, 2], offset=1) == [11, 13]
    envs.set_attr("length", 9)
    assert envs.get_attr("length") == [9, 9, 9]
    envs.set_attr("length", [1, 2], indices=[1])
    assert envs.get_attr("length") == [9, [1, 2], 9]
    assert envs.has_attr("name") and not envs.has_attr("nothing")
    envs.close()


def masked_envs():
    options = {"autoreset_mode": SAME_STEP}
    for form in ("info", "obs", "action_masks"):
        fns = [partial(Minefield, form, parts=True)] * 3
        yield form, lambda fns=fns: vecenv.SyncVectorEnv(fns, **options)
        yield (
            f"{form} in workers",
            lambda fns=fns: vecenv.AsyncVectorEnv(fns, num_workers=2, **options),
        )
    yield "compiled", lambda: JitVectorEnv(kernels(parts=True), 3, **options)
    by_method = [partial(Minefield, "action_masks", parts=True)] * 3
    yield "Gymnasium's", lambda: gym.vector.SyncVectorEnv(by_method, **options)


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in masked_envs()])
def test_maskable_ppo_finds_the_masks(make):
    """By whatever way envs give them; in these, a masked action costs a point."""
    contrib = pytest.importorskip("sb3_contrib")
    from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_masked
    from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported

    envs = SB3VecEnv(make())
    assert is_masking_supported(envs)
    policy = "MultiInputPolicy" if isinstance(envs.observation_space, spaces.Dict) else "MlpPolicy"
    model = contrib.MaskablePPO(policy, envs, n_steps=32, batch_size=32, n_epochs=1, seed=1)
    model.learn(192)
    assert model.rollout_buffer.rewards.min() > -0.7  # what SB3 adds to the last reward is less
    obs = envs.reset()
    for _ in range(20):
        actions, _ = model.predict(obs, action_masks=get_action_masks(envs))
        obs, rewards, *_ = envs.step(actions)
        assert (rewards == 0).all()
    assert evaluate_masked(model, envs, n_eval_episodes=4, warn=False) == (0, 0)
    envs.close()


@pytest.mark.parametrize("algorithm", [PPO, DQN])
def test_saved_models_are_scored_on_cage_2(algorithm, tmp_path):
    envs = make_sb3_env("Cage2-v0", 2, observation="memory")
    model = algorithm("MlpPolicy", envs, seed=1, device="cpu")
    model.save(tmp_path / "model")
    envs.close()
    options = {"episodes": 4, "red_agents": ["meander"], "episode_lengths": [30]}
    result = evaluate(str(tmp_path / "model.zip"), **options)

    def act(obs):
        return model.predict(obs, deterministic=True)[0]

    act.observation = "memory"
    assert result.cells == evaluate(act, **options).cells
    assert result.observation == "memory"


def test_frames_are_tiled():
    envs = make_sb3_env("vecenv:Cage2-v0", 2, render_mode="rgb_array")
    envs.reset()
    frames = envs.get_images()
    assert len(frames) == 2 and frames[0].dtype == np.uint8
    height, width, _ = frames[0].shape
    assert envs.render().shape in {(2 * height, width, 3), (height, 2 * width, 3)}
    assert SB3VecEnv(sync()).get_images() == [None] * 3


def two_runs(envs):
    """The observations of 40 steps with actions of the action space."""
    found = [envs.reset()]
    for _ in range(40):
        found.append(envs.step(np.array([envs.action_space.sample() for _ in range(3)]))[0])
    envs.close()
    return np.stack(found)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_seed_means_what_it_means_in_make_vec_env(backend):
    """The same first observations, env by env, and the same run; other seeds give others."""
    theirs = two_runs(make_vec_env("CartPole-v1", 3, seed=5))
    ours = two_runs(make_sb3_env("CartPole-v1", 3, seed=5, backend=backend))
    np.testing.assert_array_equal(ours, theirs)
    assert (two_runs(make_sb3_env("CartPole-v1", 3, seed=6, backend=backend)) != theirs).any()


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_monitor_dir_holds_what_make_vec_env_writes(backend, tmp_path):
    """A file per env with the same returns and lengths, which `load_results` reads."""
    tables = []
    for make, options in ((make_vec_env, {}), (make_sb3_env, {"backend": backend})):
        folder = tmp_path / make.__name__ / "new"
        two_runs(make("CartPole-v1", 3, seed=5, monitor_dir=str(folder), **options))
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["0.monitor.csv", "1.monitor.csv", "2.monitor.csv"]
        bodies = [(folder / name).read_text().splitlines()[2:] for name in names]
        tables.append([[line.split(",")[:2] for line in body] for body in bodies])
        assert len(load_results(str(folder))) == sum(map(len, bodies)) > 2
    assert tables[0] == tables[1]


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_other_autoreset_modes_are_refused(mode):
    with pytest.raises(ValueError, match=r"autoreset_mode.*SAME_STEP.*autoreset_mode=.SameStep"):
        SB3VecEnv(vecenv.SyncVectorEnv(counters([3]), autoreset_mode=mode))


def test_observations_that_are_overwritten_are_refused():
    envs = vecenv.SyncVectorEnv(counters([3]), copy=False, autoreset_mode=SAME_STEP)
    with pytest.raises(ValueError, match="copy=True"):
        SB3VecEnv(envs)


def test_single_envs_are_refused():
    with pytest.raises(TypeError, match=r"CounterEnv.*VectorEnv.*ids and factories"):
        SB3VecEnv(CounterEnv())


BAD_SPACES = {
    "observation_space is Text": ("observation_space", spaces.Text(4)),
    r"observation_space\['a'\] is Dict": (
        "observation_space",
        spaces.Dict(a=spaces.Dict(b=spaces.Discrete(2))),
    ),
    "action_space is Dict": ("action_space", spaces.Dict(a=spaces.Discrete(2))),
    "counts actions from 0": ("action_space", spaces.Discrete(3, start=1)),
}


@pytest.mark.parametrize("message", BAD_SPACES)
def test_spaces_that_sb3_has_no_use_for_are_refused(message):
    name, space = BAD_SPACES[message]
    made = []

    class Odd(CounterEnv):
        def __init__(self):
            super().__init__()
            setattr(self, name, space)
            made.append(self)

    with pytest.raises(TypeError, match=message):
        make_sb3_env(Odd, 1, backend="sync")
    assert made[0].is_closed
