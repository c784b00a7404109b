"""What wrappers keep, what they refuse, and what goes around them."""

import contextlib
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
from agents.games import runners
from choices import fast_are
from envs import CounterEnv
from equality import assert_same
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from masked_envs import Minefield
from wrappers.slides import MODES, OBS, make_bare, run, slot_of

import vecenv
from vecenv import wrappers


def wrap_all(envs):
    envs = wrappers.RecordEpisodeStatistics(envs)
    envs = wrappers.NormalizeReward(wrappers.NormalizeObservation(envs))
    return wrappers.FrameStack(envs, 3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["sync", "jit"])
def test_a_state_goes_on_bit_for_bit(backend, mode):
    first, second = (wrap_all(make_bare(backend, 3, mode)) for _ in range(2))
    run(first, mode, 1, 10, with_out=True, with_sends=True)
    if mode == "Disabled":
        first.reset(seed=2)
    second.reset(seed=9)
    second.load_state_dict(first.state_dict())
    for _ in range(12):
        actions = first.action_space.sample()
        results = [envs.step(actions) for envs in (first, second)]
        for infos in (results[0][4], results[1][4]):
            for found in (infos, infos.get("final_info", {})):
                found.get("episode", {}).pop("t", None)
        assert_same(*results)
        over = results[0][2] | results[0][3]
        if mode == "Disabled" and over.any():
            assert_same(*(e.reset(options={"reset_mask": over}) for e in (first, second)))


def test_states_of_other_wrappers_are_refused():
    saved = wrappers.FrameStack(make_bare("jit", 2, "NextStep"), 3)
    saved.reset(seed=1)
    state = saved.state_dict()
    other = wrappers.NormalizeObservation(make_bare("jit", 2, "NextStep"))
    with pytest.raises(vecenv.EnvStateError, match="is of FrameStack, expected one of Normal"):
        other.load_state_dict(state)
    with pytest.raises(vecenv.EnvStateError, match="of an env without it"):
        other.load_state_dict(saved.env.state_dict())
    with pytest.raises(vecenv.EnvStateError, match=r"has the entries .*, expected"):
        wrappers.FrameStack(make_bare("jit", 2, "NextStep"), 2).load_state_dict(state)
    with pytest.raises(vecenv.EnvStateError, match="shape"):
        wrappers.FrameStack(make_bare("jit", 3, "NextStep"), 3).load_state_dict(state)


def test_results_without_out_are_the_callers():
    envs = wrap_all(make_bare("async", 3, "NextStep", copy=False))
    assert envs.copy
    kept = []
    obs, _ = envs.reset(seed=1)
    kept.append((obs, obs.copy()))
    for _ in range(8):
        result = envs.step(envs.action_space.sample())
        kept += [(part, part.copy()) for part in result[:4]]
    assert all((now == then).all() for now, then in kept)
    envs.close()


def test_masks_pass_through_and_stop_at_other_actions():
    bare = vecenv.SyncVectorEnv([Minefield] * 3)
    envs = wrappers.FrameStack(wrappers.ClipReward(bare, -1, 1), 2)
    envs.reset(seed=1)
    assert envs.has_action_masks
    assert_same(envs.action_masks(), bare.action_masks())
    assert_same(envs.action_masks([2, 0]), bare.action_masks([2, 0]))
    other = wrappers.TransformAction(envs, lambda actions: actions + 2, spaces.Discrete(5))
    assert not other.has_action_masks
    with pytest.raises(vecenv.NoActionMaskError, match=r"ask `envs.env.action_masks\(\)`"):
        other.action_masks()
    with pytest.raises(vecenv.ActionError, match="has shape") as caught:
        wrappers.TransformAction(envs, lambda actions: actions[:1]).step(np.full(3, 2))
    assert "that TransformAction has made of those given" in caught.value.__notes__[0]


def test_masks_in_observations_are_those_of_the_env():
    envs = wrappers.TransformObservation(
        vecenv.SyncVectorEnv([lambda: Minefield("obs")] * 2),
        lambda obs: obs["observation"],
        spaces.Box(0, 100, (2,), np.float32),
    )
    obs, _ = envs.reset(seed=1)
    assert obs.shape == (2, 2)
    before = envs.action_masks()
    envs.step(np.full(2, 2))
    assert envs.action_masks().shape == before.shape == (2, 5)


def test_time_in_wrappers_is_a_phase():
    envs = wrappers.NormalizeObservation(make_bare("jit", 4, "NextStep"))
    envs.reset(seed=1)
    envs.timing.enable()
    for _ in range(5):
        envs.step(envs.action_space.sample())
    report = envs.timing.report()
    assert report.shares["NormalizeObservation"] > 0 and report.num_steps == 20


def test_rows_of_agents_keep_what_they_have():
    bare = vecenv.make_vec_agents(runners, 2, backend="sync")
    envs = wrappers.FrameStack(wrappers.NormalizeObservation(bare), 2)
    envs.reset(seed=1)
    assert envs.num_games == 2 and envs.group is bare.group
    envs.step(envs.action_space.sample())
    assert envs.valid is bare.valid and envs.alive is bare.alive


def test_videos_have_the_frames_that_the_env_renders(tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    films = {}
    monkeypatch.setattr(
        "vecenv.cage.canvas.save_gif", lambda frames, path, fps: films.update({path: frames})
    )
    from wrappers.slides import Slide

    for mode in MODES:
        envs = vecenv.SyncVectorEnv(
            [lambda: Slide(render_mode="rgb_array")] * 2, autoreset_mode=mode
        )
        envs = wrappers.RecordVideo(
            envs, tmp_path / mode, episode_trigger=lambda k: k % 2 == 1, env_id=1
        )
        expected, film = [], None
        envs.reset(seed=4)
        episode, over = 0, False
        for _ in range(40):
            *_, terminations, truncations, _ = envs.step(envs.action_space.sample())
            ends = bool(terminations[1] | truncations[1])
            begins = ends if mode == "SameStep" else over and mode == "NextStep"
            if begins:
                episode, film = episode + 1, None
            if episode % 2:
                if film is None:
                    film = []
                    expected.append(film)
                film.append(envs.env.envs[1].render())
            over = ends
            if mode == "Disabled" and (terminations | truncations).any():
                mask = terminations | truncations
                envs.reset(options={"reset_mask": mask})
                if mask[1]:
                    episode, film = episode + 1, None
                    if episode % 2:
                        film = [envs.env.envs[1].render()]
                        expected.append(film)
        envs.close()
        found = [films[path] for path in envs.paths]
        assert len(found) == len(expected) > 1
        assert_same(found, expected)
        assert envs.paths[0].name == "rl-video-episode-1.gif"


def test_a_video_is_a_file(tmp_path):
    pytest.importorskip("PIL")
    from wrappers.slides import Slide

    envs = vecenv.SyncVectorEnv([lambda: Slide(render_mode="rgb_array")] * 2)
    envs = wrappers.RecordVideo(envs, tmp_path, episode_trigger=lambda k: k == 0, video_length=3)
    envs.reset(seed=1)
    for _ in range(6):
        envs.step(envs.action_space.sample())
    envs.send(envs.action_space.sample())
    envs.recv()
    envs.close()
    envs.close()
    assert [path.name for path in envs.paths] == ["rl-video-episode-0.gif"]
    assert envs.paths[0].read_bytes()[:4] == b"GIF8"


BAD = {
    "no vector env": (
        lambda e: wrappers.ClipReward(gym.make("CartPole-v1"), 0),
        TypeError,
        "VecEnv",
    ),
    "of others": (
        lambda e: wrappers.FrameStack(gym.make_vec("CartPole-v1", 2), 2),
        TypeError,
        "gymnasium.wrappers.vector has wrappers for vector envs of others",
    ),
    "no bound": (wrappers.ClipReward, ValueError, "at least one number"),
    "bounds": (lambda e: wrappers.ClipReward(e, 2, 1), ValueError, "min_reward <= max_reward"),
    "NaN bound": (lambda e: wrappers.ClipReward(e, np.nan, 1), ValueError, "min_reward is nan"),
    "stack of 0": (lambda e: wrappers.FrameStack(e, 0), ValueError, "stack_size is 0"),
    "stack of 2.5": (lambda e: wrappers.FrameStack(e, 2.5), ValueError, "expected an integer"),
    "padding": (
        lambda e: wrappers.FrameStack(e, 2, "none"),
        ValueError,
        "expected one of reset, zero",
    ),
    "gamma": (lambda e: wrappers.NormalizeReward(e, 1.5), ValueError, "gamma is 1.5"),
    "epsilon": (lambda e: wrappers.NormalizeObservation(e, 0), ValueError, "epsilon is 0"),
    "clip": (lambda e: wrappers.NormalizeObservation(e, clip=-1), ValueError, "clip is -1"),
    "no function": (lambda e: wrappers.TransformReward(e, 3), TypeError, "func is 3"),
    "no space": (
        lambda e: wrappers.TransformObservation(e, np.tanh, (3,)),
        TypeError,
        "single_observation_space is a tuple, expected a gymnasium.Space",
    ),
    "text": (
        lambda e: wrappers.TransformObservation(e, np.tanh, spaces.Text(5)),
        TypeError,
        "has no fixed shape",
    ),
    "rescale": (lambda e: wrappers.RescaleAction(e, 1, 1), ValueError, "expected min < max"),
    "rescale shape": (
        lambda e: wrappers.RescaleAction(e, np.zeros(3), np.ones(3)),
        ValueError,
        r"arrays of shape \(2,\)",
    ),
    "rescale infinite": (
        lambda e: wrappers.RescaleAction(wrappers.ClipAction(e)),
        ValueError,
        "which are infinite",
    ),
    "not drawn": (lambda e: wrappers.RecordVideo(e, "x"), ValueError, "render_mode='rgb_array'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    make, error, message = BAD[case]
    envs = make_bare("jit", 2, "NextStep")
    with pytest.raises(error, match=message):
        make(envs)
    envs.reset(seed=1)  # as usable as before


def test_boxes_are_needed():
    envs = vecenv.make_vec("FrozenLake-v1", 2, backend="sync")
    with pytest.raises(TypeError, match="needs observations that are a Box, got Discrete"):
        wrappers.NormalizeObservation(envs)
    with pytest.raises(TypeError, match="needs actions that are a Box, got Discrete"):
        wrappers.RescaleAction(envs)
    envs.close()
    with pytest.raises(ClosedEnvironmentError, match="FrameStack was given a vector env that is c"):
        wrappers.FrameStack(envs, 2)


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (lambda obs: obs[:, :2], r"returned \[\(\(2, 2\), 'float32'\)\], expected .*2, 3"),
        (lambda obs: obs * np.ones(3), "'float64'.* expected .*'float32'"),
        (lambda obs: obs.mean(), r"returned \[\(\(\), 'float32'\)\], expected"),
        (lambda obs: None, "returned NoneType"),
    ],
)
def test_functions_that_change_what_they_do_not_say(func, message):
    envs = wrappers.TransformObservation(make_bare("jit", 2, "NextStep"), func)
    with pytest.raises(vecenv.ObservationError, match=message) as caught:
        envs.reset(seed=1)
    assert "single_observation_space=" in str(caught.value)


def test_rewards_that_are_none():
    envs = wrappers.TransformReward(make_bare("jit", 2, "NextStep"), lambda r: r.sum())
    envs.reset(seed=1)
    with pytest.raises(ValueError, match=r"returned shape \(\) for rewards of shape \(2,\)"):
        envs.step(envs.action_space.sample())
    envs = wrappers.TransformReward(make_bare("jit", 2, "NextStep"), lambda r: r.astype(str))
    envs.reset(seed=1)
    with pytest.raises(TypeError, match="expected real numbers"):
        envs.step(envs.action_space.sample())


class NaNs(gym.Env):
    observation_space, action_space = OBS, spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        obs = np.full(3, np.nan if action == 1 else 1.0, np.float32)
        return obs, np.inf if action == 2 else 1.0, False, False, {}


def test_nan_names_the_env_and_changes_no_moments():
    envs = wrappers.NormalizeObservation(vecenv.SyncVectorEnv([NaNs] * 3))
    envs = wrappers.NormalizeReward(envs)
    envs.reset()
    envs.step([0, 0, 0])
    before = envs.state_dict()["own"], envs.env.moments.state_dict()
    with pytest.raises(vecenv.ObservationError, match="env 1 returned NaN, infinity"):
        envs.step([0, 1, 0])
    assert_same(envs.env.moments.state_dict(), before[1])
    with pytest.raises(ResetNeeded, match=r"ended in NormalizeObservation.*env 1 returned NaN"):
        envs.step([0, 0, 0])  # the wrapper around has missed a step
    with pytest.raises(ResetNeeded):
        envs.send([0, 0, 0])
    envs.reset()
    before = envs.state_dict()["own"], None
    with pytest.raises(vecenv.ObservationError, match="env 2 returned the reward inf"):
        envs.step([0, 0, 2])
    assert_same(envs.moments.state_dict(), before[0]["moments"])
    envs.reset()
    envs.step([0, 0, 0])  # goes on
    state = envs.moments.state_dict()
    state["variance"] = np.array(np.nan)
    with pytest.raises(vecenv.EnvStateError, match="variance nan"):
        envs.moments.load_state_dict(state)
    with pytest.raises(vecenv.EnvStateError, match="no entry for 'count'"):
        envs.moments.load_state_dict({"mean": np.zeros(()), "variance": np.ones(())})


def test_out_is_checked_before_anything_is_stepped():
    envs = wrap_all(make_bare("jit", 3, "NextStep"))
    envs.reset(seed=1)
    before = envs.state_dict()
    good = slot_of(envs)
    for bad, message in (
        (good._replace(obs=good.obs[:, :1]), "out.obs has shape"),
        (good._replace(obs=good.obs.astype(np.float64)), "out.obs has shape .* float64"),
        (good._replace(rewards=np.zeros(2)), "out.rewards has shape"),
        (good._replace(truncations=good.terminations), "share memory"),
        (3, "expected an object with the arrays"),
    ):
        with pytest.raises(vecenv.SlotError, match=message):
            envs.step(envs.action_space.sample(), out=bad)
    assert_same(envs.state_dict()["own"], before["own"])
    assert envs.unwrapped.states.number.tolist() == [0, 0, 0]


def test_statistics_do_not_hide_those_that_are_there():
    envs = vecenv.make_vec("JitCartPole-v1", 2, vector_kwargs={"episode_infos": True})
    envs = wrappers.RecordEpisodeStatistics(envs)
    envs.reset(seed=1)
    with pytest.raises(ValueError, match="have the key 'episode' already"):
        for _ in range(30):
            envs.step(np.ones(2, int))


def test_what_passes_by_a_wrapper_is_not_there():
    envs = wrappers.FrameStack(make_bare("jit", 2, "NextStep"), 2)
    for name in ("observe", "final_obs", "step_async"):
        with pytest.raises(AttributeError, match=r"`envs.unwrapped`"):
            getattr(envs, name)
    assert envs.num_episodes.tolist() == [0, 0]
    assert repr(envs).startswith("FrameStack(JitVectorEnv")


@pytest.mark.slow
def test_importing_them_loads_no_compiler():
    script = "import sys, vecenv.wrappers; print({'torch', 'numba', 'PIL'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


class Naps(CounterEnv):
    """Takes longer for action 1 than anybody waits."""

    def step(self, action):
        time.sleep(0.8 * int(action))
        return super().step(action)


@contextlib.contextmanager
def impatient(envs):
    """Wait for less than half of a nap; resets and other steps may take as long as they like."""
    envs.unwrapped._timeout = 0.3
    try:
        yield
    finally:
        envs.unwrapped._timeout = 30.0


@pytest.mark.parametrize("with_out", fast_are([True], [False, True]))
def test_a_step_that_timed_out_is_waited_for_through_the_wrappers(with_out):
    envs = vecenv.AsyncVectorEnv([lambda: Naps(length=9)] * 2, num_workers=2, timeout=30)
    envs = wrappers.FrameStack(envs, 2)
    envs = wrappers.RecordEpisodeStatistics(wrappers.ClipReward(envs, 0.0, 0.5))
    slot = slot_of(envs) if with_out else None
    envs.reset()
    envs.step([0, 0])
    with impatient(envs), pytest.raises(vecenv.StepTimeoutError):
        envs.step([0, 1], out=slot)
    obs, rewards, *_ = envs.step_wait(10.0)
    if with_out:
        assert obs is slot.obs
        assert rewards is slot.rewards
    np.testing.assert_array_equal(obs[:, :, 2], [[1, 2]] * 2)
    np.testing.assert_array_equal(rewards, [0.5, 0.5])
    envs.step([0, 0])
    np.testing.assert_array_equal(envs.episode_returns, [1.5, 1.5])  # the late step counts
    envs.close()


def test_a_wrapper_that_raises_after_the_env_has_stepped_needs_a_reset():
    answers = iter([0.0, None, 0.0])
    envs = wrappers.TransformReward(make_bare("sync", 2, "NextStep"), lambda x: x + next(answers))
    envs = wrappers.RecordEpisodeStatistics(envs)
    actions = envs.action_space.sample()
    envs.reset(seed=1)
    envs.step(actions)
    with pytest.raises(TypeError):
        envs.step(actions)
    for call in (lambda: envs.step(actions), lambda: envs.send(actions)):
        with pytest.raises(ResetNeeded, match=r"ended in TransformReward.*TypeError"):
            call()
    envs.reset(seed=1)
    envs.step(actions)
    assert envs.get_attr("number") == (1, 1)
    envs.close()
