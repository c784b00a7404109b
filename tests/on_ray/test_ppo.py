"""PPO with --backend ray: the policy acts in actors and learns what it learns here."""

import subprocess
import sys

import numpy as np
import pytest

from vecenv.files import load_arrays

pytestmark = pytest.mark.ray

SMALL = ["--num-envs", "4", "--num-steps", "32", "--total-steps", "600", "--eval-episodes", "3"]


def train(folder, env_id, *args):
    """Run the script, as a user does; return the tensors of the policy and the last line."""
    command = [
        sys.executable,
        *("-m", "vecenv", "train", env_id, "--algo", "ppo"),
        *SMALL,
        "--save",
        str(folder),
        *args,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    tensors = load_arrays(folder / "policy.npz")["tensors"]
    return tensors, done.stdout.splitlines()[-1]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_same_policy_is_learned_in_actors(tmp_path, env_id):
    expected, last_line = train(tmp_path / "here", env_id, "--backend", "sync")
    ray_args = ["--backend", "ray", "--num-workers", "2", "--ray-lost", "share"]
    tensors, ray_line = train(tmp_path / "actors", env_id, *ray_args)
    for name, wanted in expected.items():
        np.testing.assert_allclose(tensors[name], wanted, rtol=1e-3, atol=1e-4, err_msg=name)
    assert ray_line.partition(";")[0] == last_line.partition(";")[0]


def test_masked_policies_act_in_actors_and_memories_are_refused(tmp_path):
    args = ["--backend", "ray", "--num-workers", "2", "--ray-lost", "share"]
    train(tmp_path / "masks", "vecenv:Cage2-v0", *args)
    with pytest.raises(AssertionError, match="--recurrent gru with --backend ray: the policy acts"):
        train(tmp_path / "memory", "CartPole-v1", *args, "--recurrent", "gru")
