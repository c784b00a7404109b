"""docs/changes.md: the trainers train, and the diffs apply to the library and do what they say."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from envs import RandomEnv
from gymnasium.spaces import Box, Discrete

from vecenv import SyncVectorEnv
from vecenv.learn import evaluate
from vecenv.train import ppo

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "changes.md").read_text(encoding="utf-8")
TRAINERS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
PICTURE, POSITION = Box(0, 255, (20, 16, 3), np.uint8), Box(-1, 1, (4,), np.float32)
SPACES = {
    "head": (POSITION, Discrete(2)),
    "network": (PICTURE, Discrete(3)),
    "distribution": (POSITION, Box(np.float32([-1, 0]), np.float32([3, 5]))),
}
SCALED = """
import vecenv

if __name__ == "__main__":
    for backend in ("sync", "async"):
        given = {"reward_scale": 0.1}
        envs = vecenv.make_vec("CartPole-v1", 4, backend=backend, vector_kwargs=given)
        envs.reset(seed=1)
        print(envs.step(envs.action_space.sample())[1].tolist())
        envs.close()
"""
RECENT = """
import numpy as np
from gymnasium.spaces import Box, Discrete
from buffers.replay import buffer as module

buffer = module.RecentReplayBuffer(1000, Box(-1, 1, (1,)), Discrete(2), seed=1)
obs, flags = np.zeros((500, 1), np.float32), np.zeros(500, bool)
step = {"obs": obs, "next_obs": obs, "actions": flags * 1, "rewards": np.arange(500)}
buffer.add(**step, terminations=flags, truncations=flags)
found = buffer.sample(4096).rewards
print(found.min().item(), found.max().item(), len(found.unique()))
"""


@pytest.mark.snippets
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", SPACES)
def test_a_trainer_with_parts_of_ones_own_trains(name):
    names = {}
    exec(TRAINERS[list(SPACES).index(name)], names)
    envs = SyncVectorEnv([lambda: RandomEnv(*SPACES[name])] * 4)
    options = ppo.Options(num_envs=4, num_steps=16, total_steps=1000, compile="off")
    trainer = names["Trainer"](options, envs)
    before = [parameter.detach().clone() for parameter in trainer.agent.parameters()]
    scalars = [trainer.update() for _ in range(3)][-1]
    pairs = zip(before, trainer.agent.parameters(), strict=True)
    assert not any(old.equal(new) for old, new in pairs), "each parameter is learned"
    assert ("losses/reward_error" in scalars) == (name == "head")
    act = trainer.player(envs, trainer.agent, options)
    assert len(evaluate(act, envs, 20).returns) == 20
    envs.close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the diffs")
@pytest.mark.parametrize(
    ("number", "program", "expected"),
    [(0, SCALED, ["[0.1, 0.1, 0.1, 0.1]"] * 2), (1, RECENT, ["450.0 499.0 50"])],
    ids=["scale", "draw"],
)
def test_a_diff_applies_to_the_library_and_does_what_it_says(number, program, expected, tmp_path):
    for package in ("vecenv", "buffers"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    (tmp_path / "a.diff").write_text(DIFFS[number])
    (tmp_path / "program.py").write_text(program)
    command = ["git", "apply", "--unidiff-zero", "a.diff"]
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    run = subprocess.run(
        [sys.executable, "-W", "error", "program.py"], cwd=tmp_path, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout.splitlines() == expected, run.stderr
