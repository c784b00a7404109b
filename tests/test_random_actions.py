"""Random actions heed masks, wherever they are drawn: the envs here raise at a forbidden one."""

import functools

import gymnasium as gym
import numpy as np
import pytest
from forked_runners import forked  # noqa: F401 - a fixture
from gymnasium.vector import AutoresetMode
from masked_envs import Forbidding, ForbiddingGame

from vecenv import AsyncVectorEnv, SyncVectorEnv, check_vector_env
from vecenv.agents import GameEnv
from vecenv.command.cli import main
from vecenv.compare import Options, run_comparison
from vecenv.core.masks import RandomActions

FORMS = [
    *(("info", False), ("obs", False), ("action_masks", False)),
    *(("action_masks", True), ("tuple", True)),
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
        ("async", "action_masks", True, "SameStep"),
        ("gymnasium-sync", "info", False, "Disabled"),
        ("gymnasium-sync", "action_masks", False, "SameStep"),
        ("gymnasium-async", "obs", False, "NextStep"),
        ("gymnasium-async", "action_masks", True, "NextStep"),
    ],
)
def test_a_check_steps_with_allowed_actions(backend, form, parts, mode):
    """Every rule is tried and kept: replays, sends and partial resets included."""
    fns = [functools.partial(Forbidding, form, parts)] * 3
    report = check_vector_env(BACKENDS[backend](fns, autoreset_mode=AutoresetMode(mode)))
    assert "the same seed gives the same run" in report.passed


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


@pytest.mark.parametrize(
    ("backend", "form", "pad", "parts"),
    [
        ("sync", "info", True, None),
        ("async", "obs", False, [2, 3]),
        ("gymnasium-sync", "info", False, [2, 2]),
        ("gymnasium-async", None, True, None),
    ],
)
def test_games_are_stepped_with_allowed_actions_of_their_agents(backend, form, pad, parts):
    envs = BACKENDS[backend]([functools.partial(make_game, form, pad, parts)] * 3)
    try:
        draw = RandomActions(envs, seed=1)
        draw.see(*envs.reset(seed=1))
        for _ in range(60):
            obs, *_, infos = envs.step(draw())
            draw.see(obs, infos)
    finally:
        envs.close()


GAME = "agents:masked_envs:ForbiddingGame"


@pytest.mark.parametrize("form", ["info", "obs"])
@pytest.mark.parametrize("kind", ["gif", "html"])
def test_watch_steps_games_with_allowed_actions(form, kind, tmp_path, capsys):
    path = tmp_path / f"a.{kind}"
    args = ["watch", GAME, "--env-kwargs", f"form={form}", f"--{kind}", str(path), "--steps", "30"]
    assert main(args) == 0, capsys.readouterr()
    assert path.stat().st_size > 100
