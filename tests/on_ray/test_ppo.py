"""PPO with --backend ray: the policy acts in actors and learns what it learns here."""

import subprocess
import sys

import pytest
import torch

from vecenv.learn import load_checkpoint

pytestmark = pytest.mark.ray

SMALL = ["--num-envs", "4", "--num-steps", "32", "--total-steps", "600", "--eval-episodes", "3"]
ACTORS = ["--backend", "ray", "--num-workers", "2", "--vector-kwargs"]
ACTORS += ["on_error", "restart"]


def train(folder, env_id, *args):
    """Train in a process, as a user does; return its output and the weights of the policy."""
    command = [
        sys.executable,
        *("-m", "vecenv", "train", env_id, "--algo", "ppo"),
        *SMALL,
        "--save",
        str(folder),
        *args,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    if done.returncode:
        return done.stderr, {}
    weights = load_checkpoint(folder / "checkpoint" / "last.pt")["state"]["agent"]
    return done.stdout.splitlines()[-1], weights


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_same_policy_is_learned_in_actors(tmp_path, env_id):
    last_line, expected = train(tmp_path / "here", env_id, "--backend", "sync")
    ray_line, weights = train(tmp_path / "actors", env_id, *ACTORS)
    assert expected.keys() == weights.keys() != set()
    for name, wanted in expected.items():
        torch.testing.assert_close(weights[name], wanted, rtol=1e-3, atol=1e-4, msg=name)
    assert ray_line.partition("(")[0] == last_line.partition("(")[0]


def test_masked_policies_act_in_actors_and_memories_are_refused(tmp_path):
    _, weights = train(tmp_path / "masks", "vecenv:Cage2-v0", *ACTORS)
    assert weights
    told, _ = train(tmp_path / "memory", "CartPole-v1", *ACTORS, "--recurrent", "gru")
    assert "--recurrent: Ray's actors keep no memory" in told
