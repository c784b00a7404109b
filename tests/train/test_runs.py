"""Runs of all trainers: stopped, killed and resumed, refused, left out by Ctrl-C."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from example_files import assert_another_network_is_refused, last_state, load_example

from vecenv.core.compiling import is_jit_off
from vecenv.learn import load_checkpoint
from vecenv.train import cage4_defender, dqn, ppo, ppo_agents, r2d2, sac, trainer

load_example("memory")  # registers envs
load_example("breakout")
pytestmark = pytest.mark.usefixtures("one_torch_thread")

ROOT = Path(__file__).parents[2]
SMALL = {"eval_episodes": 3, "compile": "off", "num_envs": 4}
ROLLOUT = {**SMALL, "num_steps": 16, "num_minibatches": 2, "total_steps": 300, "normalize": True}
REPLAY = {**SMALL, "learning_starts": 40, "batch_size": 16, "capacity": 500, "hidden": (8,)}
REPLAY |= {"total_steps": 240, "n_step": 3}
BOARD = {**REPLAY, "env_id": "breakout:Breakout-v0", "env_kwargs": {"max_episode_steps": 20}}
AGENTS = {"env": "Spread-v0", "num_games": 2, "total_steps": 600, "env_kwargs": {"max_cycles": 9}}
RUNS = {
    "ppo": (ppo, {**ROLLOUT, "env_id": "Pendulum-v1", "backend": "sync"}),
    "ppo, gru": (ppo, {**ROLLOUT, "env_id": "JitCartPole-v1", "recurrent": "gru"}),
    "sac": (sac, {**REPLAY, "env_id": "Pendulum-v1", "backend": "sync", "hold": 4}),
    "dqn": (dqn, {**BOARD, "exploration_steps": 100}),
    "r2d2": (r2d2, {"env_id": "memory:TMaze-v0", "env_kwargs": {"length": 5}, "num_envs": 4,
                    "learning_starts": 40, "update_ratio": 0.125, "batch_size": 4, "hidden": 8,
                    "total_steps": 240, "eval_episodes": 3}),
    "agents": (ppo_agents, {**ROLLOUT, **AGENTS, "recurrent": "gru"}),
    "cage4": (cage4_defender, {"total_steps": 499 * 6, "num_games": 2, "minibatch": 200,
                               "eval_episodes": 2, "compile": "off", "width": 8}),
}  # fmt: skip
RUNS["agents"][1].pop("num_envs")
QUICK = ("sac",)  # the others are slow


def main(name, folder, **more):
    module, options = RUNS[name]
    return module.main(module.Options(**{**options, "save": Path(folder), **more}))


def trainer_of(name):
    return RUNS[name][0].main.__self__


def stop_before_update(number, name, monkeypatch):
    """Let a signal come before an update of a trainer."""
    kind, count = trainer_of(name), itertools.count(1)
    update = kind.update

    def interrupted(self):
        if next(count) == number:
            signal.raise_signal(signal.SIGTERM)
        return update(self)

    monkeypatch.setattr(kind, "update", interrupted)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RUNS]
)
def test_a_stopped_run_goes_on_bit_for_bit(name, tmp_path, monkeypatch, capsys):
    if is_jit_off() and name not in QUICK:
        pytest.skip("takes too long without compiled code")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))  # of the key that signs checkpoints
    through = main(name, tmp_path / "through")
    with monkeypatch.context() as patch:
        stop_before_update(2 if name == "cage4" else 3, name, patch)
        main(name, tmp_path / "stopped")
    assert "stopped after" in (out := capsys.readouterr().out) and "--resume" in out
    assert main(name, tmp_path / "stopped", resume=True) == through
    states = [last_state(tmp_path / folder) for folder in ("through", "stopped")]
    assert states[0]["/num_updates"] > 2
    # Pickles of equal envs need not have equal bytes.
    differing = [k for k, v in states[0].items() if states[1][k] != v and "envs" not in k]
    assert differing == []
    assert "stopped after" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["sac", "ppo"])
def test_a_loss_that_is_nan_stops_a_run_that_can_go_on(name, tmp_path, monkeypatch, capsys):
    kind, calls, loss = trainer_of(name), itertools.count(), trainer_of(name).loss

    def spoiled(agent, batch, options):
        found, scalars = loss(agent, batch, options)
        return found * (np.nan if next(calls) == 12 else 1.0), scalars

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(kind, "loss", staticmethod(spoiled))
        main(name, tmp_path / "run")
    assert "the loss is nan, or its gradient is not finite; no weight has" in str(ended.value)
    out = capsys.readouterr().out
    assert "stopped after" in out and "--resume" in out
    before = load_checkpoint(tmp_path / "run" / "checkpoint" / "last.pt")["state"]
    assert 0 < before["steps"] < RUNS[name][1]["total_steps"]
    rates = []
    with monkeypatch.context() as patch:  # a smaller rate may be given, and is taken
        update = kind.update

        def noted(self):
            rates.append(self.optimizer.param_groups[0]["lr"])
            return update(self)

        patch.setattr(kind, "update", noted)
        main(name, tmp_path / "run", resume=True, learning_rate=1e-5)
    assert 0 < max(rates) <= 1e-5
    after = load_checkpoint(tmp_path / "run" / "checkpoint" / "last.pt")["state"]
    assert before["steps"] < after["steps"]


NUM_LINES = 150  # of the metrics, at the end
KILLED = {
    "ppo": {"total_steps": NUM_LINES * 64, "save_every": 500},
    "ppo, gru": {"total_steps": NUM_LINES * 64, "save_every": 500, "compile": "on"},
    "sac": {"total_steps": NUM_LINES * 200, "save_every": 1500, "update_ratio": 0.05},
    "dqn": {"total_steps": NUM_LINES * 1000, "save_every": 8000, "update_ratio": 0.02},
}
PROGRAM = """
import sys
from train.test_runs import KILLED, main
main(*sys.argv[1:], resume=True, **KILLED[sys.argv[1]])
"""


def begin(name, folder):
    changed = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    with (folder.parent / "output.txt").open("ab") as output:
        command = [sys.executable, "-c", PROGRAM, name, str(folder)]
        return subprocess.Popen(command, env=os.environ | changed, stdout=output, stderr=output)


def count_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", KILLED)
def test_a_trainer_killed_at_random_points_ends_as_one_that_ran_through(name, tmp_path):
    seed = int(np.random.default_rng().integers(1 << 30))
    print("points drawn with seed", seed)  # noqa: T201 - to repeat a failure
    points = np.sort(np.random.default_rng(seed).integers(1, NUM_LINES - 10, 3))
    assert begin(name, tmp_path / "through").wait(600) == 0
    folder = tmp_path / "killed"
    folder.mkdir()
    for number, point in zip((signal.SIGKILL, signal.SIGTERM, signal.SIGKILL), points, strict=True):
        # A line more than the last process has left is the next one's own, which handles signals.
        point = max(point, count_lines(folder / "metrics.jsonl") + 1)
        process = begin(name, folder)
        while process.poll() is None and count_lines(folder / "metrics.jsonl") < point:
            time.sleep(0.001)
        process.send_signal(number)
        assert process.wait(300) == (-number if number == signal.SIGKILL else 0)
        assert count_lines(folder / "metrics.jsonl") < NUM_LINES, "it was over before"
    assert begin(name, folder).wait(600) == 0
    states = [last_state(tmp_path / run) for run in ("through", "killed")]
    differing = [key for key, value in states[0].items() if states[1].get(key) != value]
    assert [key for key in differing if not key.startswith("/envs")] == []


@pytest.mark.parametrize("name", ["ppo", pytest.param("dqn", marks=pytest.mark.slow)])
def test_another_network_and_an_earlier_run_are_refused(name, tmp_path, monkeypatch):
    assert_another_network_is_refused(
        trainer_of(name), lambda **more: main(name, tmp_path, **more), monkeypatch
    )
    monkeypatch.undo()
    main(name, tmp_path, overwrite=True)


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("ppo", {"env_id": "Blackjack-v1"}, r"Blackjack-v1: the observation 'obs' is Tuple.*expec"),
        ("ppo", {"wrappers": ("nothing:There",)}, "--wrappers is 'nothing:There', but there is no"),
        ("ppo", {"num_envs": 1, "num_steps": 1, "num_minibatches": 1}, "only resets: more --num-"),
        ("sac", {"env_id": "CartPole-v1"}, "CartPole-v1: actions are Discrete.*a bounded Box of f"),
        ("sac", {"alpha": 0.0}, r"--alpha 0\.0: expected a number above 0"),
        ("dqn", {"env_id": "Pendulum-v1", "env_kwargs": {}}, "actions are Box.*expected Discrete"),
        ("r2d2", {"env_id": "Pendulum-v1", "env_kwargs": {}}, "the spaces are .*, expected Box"),
        ("r2d2", {"exploration": (0.4, 0.0)}, r"n \(0\.4, 0\.0\), .*expected shares above 0"),
        ("r2d2", {"burn_in": 30}, "--burn-in 30: expected .*less than --sequence-leng"),
        ("cage4", {"total_steps": 10}, "less than one rollout, 998"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_a_sentence(name, more, words, tmp_path):
    with pytest.raises(SystemExit, match=words):
        main(name, tmp_path, **more)


@pytest.mark.parametrize("name", ["sac", pytest.param("agents", marks=pytest.mark.slow)])
def test_one_ctrl_c_leaves_the_evaluation_out(name, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the signal was kept")

    monkeypatch.setattr(trainer, "evaluate", interrupted)
    with pytest.raises(SystemExit, match="130"):
        main(name, tmp_path, total_steps=8)
    assert (tmp_path / "checkpoint" / "last.pt").exists()


# Options, bar, seeds; the pages of docs have the tables of all seeds.
SCORES = [
    (ppo, {"env_id": "vecenv:Cage2-v0", "total_steps": 5_000_000, "num_envs": 256, "masks": False},
     -25),
    *((ppo, {"env_id": "CartPole-v1", "seed": seed}, 475) for seed in range(1, 6)),
    (ppo, {"env_id": "Acrobot-v1", "total_steps": 500_000, "num_envs": 16, "num_minibatches": 4,
           "normalize": True, "learning_rate": 1e-3}, -100),
    (ppo, {"env_id": "Pendulum-v1", "total_steps": 300_000, "num_steps": 256, "num_epochs": 10,
           "num_minibatches": 16, "normalize": True, "gamma": 0.9, "learning_rate": 1e-3}, -250),
    (sac, {"total_steps": 10_000, "backend": "sync"}, -200),
    (dqn, {"seed": 0}, 475),
    (r2d2, {"env_id": "memory:TMaze-v0", "env_kwargs": {"length": 6}, "total_steps": 30_000}, 0.9),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.learn
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("module", "options", "least"), SCORES)
def test_known_scores_are_reached(module, options, least, tmp_path):
    result = module.main(module.Options(**options, save=tmp_path))
    assert len(result.returns) == 100 and result.mean >= least
