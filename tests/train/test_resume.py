"""Trainers that are killed and resumed end as if they had run through, bit for bit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from choices import fast_are
from example_files import last_state

from vecenv.learn import Run
from vecenv.train import dqn, ppo, sac, trainer

ROOT = Path(__file__).parents[2]
MODULES = {"ppo": ppo, "sac": sac, "dqn": dqn}
NUM_UPDATES = 150
PPO = [
    *("ppo", "--total-steps", f"{NUM_UPDATES * 128}", "--num-envs", "4", "--num-steps", "32"),
    *("--save-every", "1000", "--eval-episodes", "2", "--normalize"),
]
SAC = [
    *("sac", "--total-steps", "30000", "--num-envs", "4", "--learning-starts", "400"),
    *(
        "--update-ratio",
        "0.1",
        "--batch-size",
        "32",
        "--hidden",
        "32",
        "32",
        "--save-every",
        "1500",
    ),
    *("--capacity", "5000", "--eval-episodes", "2", "--compile", "off"),
]
DQN = [
    *("dqn", "--total-steps", "150000", "--num-envs", "4", "--learning-starts", "400"),
    *("--update-ratio", "0.02", "--batch-size", "32", "--hidden", "32", "--save-every", "8000"),
    *("--capacity", "5000", "--eval-episodes", "2", "--compile", "off"),
]
DEFENDER = [
    *("cage2_defender", "--total-steps", f"{NUM_UPDATES * 404}", "--num-envs", "4"),
    *("--save-every", "3000", "--num-minibatches", "2", "--eval-episodes", "2"),
    *("--dtype", "bfloat16"),
]
CASES = {
    "ppo, jit": [*PPO, "--env-id", "JitCartPole-v1", "--compile", "off"],
    "ppo, sync": [*PPO, "--env-id", "CartPole-v1", "--backend", "sync", "--compile", "off"],
    "ppo, compiled": [*PPO, "--env-id", "JitCartPole-v1", "--compile", "on"],
    "sac, sync": [*SAC, "--env-id", "Pendulum-v1", "--backend", "sync"],
    "dqn, jit": [*DQN, "--env-id", "JitCartPole-v1", "--prioritized", "--n-step", "3"],
    "dqn, sync": [*DQN, "--env-id", "CartPole-v1", "--backend", "sync"],
    "cage2_defender": [*DEFENDER, "--compile", "off"],
    "cage2_defender, compiled": [*DEFENDER, "--compile", "on"],
}

# Trains by the trainer that is named first.
PROGRAM = """
import importlib, sys, tyro
trainer = importlib.import_module("vecenv.train." + sys.argv.pop(1))
trainer.main(tyro.cli(trainer.Options))
"""


def begin(case, folder, *more):
    name, *options = CASES[case]
    command = [sys.executable, "-c", PROGRAM, name, *options, "--save", str(folder)]
    changed = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder.parent / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [*command, *more], env=os.environ | changed, stdout=output, stderr=output
        )


def count_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES)
def test_a_trainer_killed_at_random_points_ends_as_one_that_ran_through(case, tmp_path):
    seed = int(np.random.default_rng().integers(1 << 30))
    print("points drawn with seed", seed)  # noqa: T201 - to repeat a failure
    points = np.sort(np.random.default_rng(seed).integers(1, NUM_UPDATES - 10, 3))
    assert begin(case, tmp_path / "through").wait(600) == 0
    folder = tmp_path / "killed"
    folder.mkdir()
    for number, point in zip((signal.SIGKILL, signal.SIGTERM, signal.SIGKILL), points, strict=True):
        # A line more than the last process has left is the next one's own, which handles signals.
        point = max(point, count_lines(folder / "metrics.jsonl") + 1)
        process = begin(case, folder, "--resume")
        while process.poll() is None and count_lines(folder / "metrics.jsonl") < point:
            time.sleep(0.001)
        process.send_signal(number)
        assert process.wait(300) == (-number if number == signal.SIGKILL else 0)
        assert count_lines(folder / "metrics.jsonl") < NUM_UPDATES, "it was over before"
    assert begin(case, folder, "--resume").wait(600) == 0
    states = [last_state(tmp_path / name) for name in ("through", "killed")]
    differing = [name for name, value in states[0].items() if states[1].get(name) != value]
    # Pickles of equal envs need not have equal bytes.
    assert [name for name in differing if not name.startswith("/envs")] == []


@pytest.mark.parametrize("name", fast_are(["dqn"], ["ppo", "sac", "dqn"]))
def test_a_profile_of_no_step_is_left_out(name, tmp_path, monkeypatch, capsys):
    """A signal came before the first one."""
    module, env_id = MODULES[name], "Pendulum-v1" if name == "sac" else "CartPole-v1"
    enter = Run.__enter__

    def stopped(run):
        enter(run).should_stop = True
        return run

    monkeypatch.setattr(Run, "__enter__", stopped)
    options = {"env_id": env_id, "num_envs": 2, "total_steps": 1000, "compile": "off"}
    module.main(module.Options(**options, eval_episodes=1, save=tmp_path, profile=True))
    told = capsys.readouterr().out
    assert "go on with" in told or "--resume" in told
    assert "where the time goes" not in told


@pytest.mark.parametrize("name", fast_are(["sac"], ["sac", "dqn"]))
def test_one_ctrl_c_leaves_the_evaluation_out(name, tmp_path, monkeypatch):
    """As in test_ppo.py."""
    module, env_id = MODULES[name], "Pendulum-v1" if name == "sac" else "CartPole-v1"

    def interrupted(*_, **__):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the signal was kept")

    monkeypatch.setattr(trainer, "evaluate", interrupted)
    with pytest.raises(SystemExit, match="130"):
        module.main(module.Options(env_id=env_id, total_steps=8, compile="off", save=tmp_path))
    assert (tmp_path / "checkpoint" / "last.pt").exists()


def test_a_profile_has_what_is_in_graphs_as_well(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trainer.learn, "describe_graphs", lambda graphs: f"graphs: {list(graphs)}")
    options = {"num_envs": 2, "num_steps": 8, "num_minibatches": 1, "total_steps": 16}
    ppo.main(ppo.Options(**options, compile="off", eval_episodes=1, save=tmp_path, profile=True))
    told = capsys.readouterr().out
    assert told.index("where the time goes") < told.index("first calls only:\ngraphs: []")
