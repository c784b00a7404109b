"""Random actions heed masks, wherever they are drawn: the envs here raise at a forbidden one."""

import functools

import gymnasium as gym
import numpy as np
import pytest
from forked_runners import forked  # noqa: F401 - a fixture
from gymnasium.vector import AutoresetMode
from masked_envs import Forbidding, ForbiddingGame
from PIL import Image

from vecenv import AsyncVectorEnv, SyncVectorEnv, check_vector_env
from vecenv.agents import GameEnv
from vecenv.choose import probe_env
from vecenv.command.cli import main
from vecenv.compare import Options, run_comparison
from vecenv.core.random_actions import RandomActions

FORMS = [
    *(("info", False), ("obs", False), ("action_masks", False)),
    *(("action_mask", True), ("tuple", True)),
]
BACKENDS = {
    "sync": SyncVectorEnv,
    "async": AsyncVectorEnv,
    "gymnasium-sync": gym.vector.SyncVectorEnv,
    "gymnasium-async": gym.vector.AsyncVectorEnv,
}
WHERE = "masked_envs:Forbidding"


@pytest.mark.parametrize(("form", "parts"), FORMS)
def test_a_single_env_is_stepped_with_allowed_actions(form, parts):
    """All that are allowed come, and no other."""
    env, seen = Forbidding(form, parts), set()
    draw = RandomActions(env, seed=1)
    draw.see(*env.reset(seed=1))
    assert draw.are_masked
    for _ in range(150):
        action = draw()
        assert action in env.action_space
        seen.add(np.asarray(action).tobytes())
        obs, _, _, truncated, info = env.step(action)
        draw.see(*(env.reset() if truncated else (obs, info)))
    assert len(seen) == (6 if parts else 5)


@pytest.mark.parametrize(
    ("backend", "form", "parts", "mode"),
    [
        ("sync", "info", False, "SameStep"),
        ("sync", "action_masks", False, "Disabled"),
        ("sync", "tuple", True, "NextStep"),
        ("async", "obs", False, "NextStep"),
        ("async", "action_mask", True, "SameStep"),
        ("gymnasium-sync", "info", False, "Disabled"),
        ("gymnasium-sync", "action_masks", False, "SameStep"),
        ("gymnasium-async", "obs", False, "NextStep"),
        ("gymnasium-async", "action_mask", True, "NextStep"),
    ],
)
def test_a_check_steps_with_allowed_actions(backend, form, parts, mode):
    """Every rule is tried and kept: replays, sends and partial resets included."""
    fns = [functools.partial(Forbidding, form, parts)] * 3
    report = check_vector_env(BACKENDS[backend](fns, autoreset_mode=AutoresetMode(mode)))
    assert "the same seed gives the same run" in report.passed


def test_watch_steps_with_allowed_actions(tmp_path, capsys):
    path = tmp_path / "a.gif"
    assert main(["watch", WHERE, "--gif", str(path), "--steps", "30"]) == 0, capsys.readouterr()
    with Image.open(path) as picture:
        assert picture.n_frames > 5


@pytest.mark.parametrize("form", ["info", "obs", "action_masks"])
def test_a_trial_steps_with_allowed_actions(form):
    """Here in this process."""
    assert probe_env([functools.partial(Forbidding, form)] * 8).step_s > 0


@pytest.mark.parametrize("form", [pytest.param("obs", marks=pytest.mark.slow), "action_masks"])
def test_a_comparison_steps_with_allowed_actions(form, forked):  # noqa: F811
    backends = ("loop", "sync", "async-first-ready", "gymnasium-sync")
    quick = {"rounds": 1, "round_s": 0.01, "warm_up_s": 0.02, "timed_s": 0.02, "timeout": 30.0}
    options = Options(WHERE, env_kwargs={"form": form}, num_envs=(3,), backends=backends, **quick)
    for case in run_comparison(options).cases:
        assert case.is_measured, case.reason


def make_game(form="info", pad=False, parts=None):
    return GameEnv(ForbiddingGame(form, parts), pad=pad)


@pytest.mark.parametrize(
    ("form", "pad", "parts", "values"),
    [
        ("info", False, None, 4),
        ("obs", False, None, 4),
        (None, True, None, 4),
        ("info", False, [2, 3], 3),
        ("obs", False, [2, 2], 2),
    ],
)
def test_a_single_game_is_stepped_with_allowed_actions_of_its_agents(form, pad, parts, values):
    """Those of padding are not drawn either; agents that are dead, or come back, do no harm."""
    env = make_game(form, pad, parts)
    draw = RandomActions(env, seed=1)
    draw.see(*env.reset(seed=1))
    seen = set()
    for _ in range(150):
        actions = draw()
        assert actions in env.action_space
        seen.update(np.concatenate([part.ravel() for part in actions.values()]).tolist())
        obs, _, terminated, truncated, info = env.step(actions)
        draw.see(*(env.reset() if terminated or truncated else (obs, info)))
    assert seen == set(range(values))


GAME = "agents:masked_envs:ForbiddingGame"


@pytest.mark.parametrize("form", ["info", "obs"])
@pytest.mark.parametrize("kind", ["gif", "html"])
def test_watch_steps_games_with_allowed_actions(form, kind, tmp_path, capsys):
    path = tmp_path / f"a.{kind}"
    args = ["watch", GAME, "--env-kwargs", f"form={form}", f"--{kind}", str(path), "--steps", "30"]
    assert main(args) == 0, capsys.readouterr()
    assert path.stat().st_size > 100
