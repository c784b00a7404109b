"""Without torch environments work, and what needs it names the extra to install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_USE = """
import numpy as np
import vecenv
from vecenv.command.cli import main

if __name__ == "__main__":
    made = [("CartPole-v1", "sync"), ("CartPole-v1", "async"), ("JitCartPole-v1", "jit")]
    for name, backend in [*made, ("Cage2-v0", "jit")]:
        envs = vecenv.make_vec(name, 2, backend=backend)
        obs, _ = envs.reset(seed=1)
        obs = envs.step(envs.action_space.sample())[0].copy()
        print(type(envs).__name__, len(obs))
        envs.close()
    assert main(["evaluate", "--policy", "defender", "--episodes", "2"]) == 0
"""


@pytest.fixture(scope="module")
def run_without_torch(tmp_path_factory):
    """Runs a script in an interpreter for which, and for whose children, there is no torch."""
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "torch.py").write_text("raise ModuleNotFoundError('there is none', name='torch')")
    path = os.pathsep.join([str(folder), str(ROOT)])

    def run(code):
        (folder / "script.py").write_text(code)
        return subprocess.run(
            [sys.executable, "-W", "error", folder / "script.py"], timeout=100,
            env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


@pytest.mark.slow
def test_envs_of_every_backend_step_and_a_bundled_policy_is_evaluated(run_without_torch):
    done = run_without_torch(_USE)
    assert done.returncode == 0, done.stderr
    classes = ["SyncVectorEnv", "AsyncVectorEnv", "CartPoleVectorEnv", "Cage2VectorEnv"]
    assert [line.split() for line in done.stdout.splitlines()[:4]] == [[c, "2"] for c in classes]
    assert "defender: faithful rules, 2 episodes per cell" in done.stdout


@pytest.mark.parametrize("name", ["buffers", "buffers.rollout.gae", "vecenv.learn"])
def test_what_needs_torch_says_how_to_install_it(run_without_torch, name):
    done = run_without_torch(f"import {name}")
    package = name.removesuffix(".rollout.gae")
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: {package} needs torch, which is not installed: "
        'pip install "vecenv[torch]"'
    )
    assert "During handling" not in done.stderr
