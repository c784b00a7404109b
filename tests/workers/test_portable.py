"""Workers by what every system has: fresh interpreters, sockets and an unnamed file.

`make test-portable` runs the conformance matrix and the tests of workers so.
"""

import os
import subprocess
import sys

import pytest
from programs import ROOT

ENVIRON = os.environ | {"VECENV_PORTABLE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}

_DRILL = """
import os, signal
import gymnasium as gym
import numpy as np
from vecenv import AsyncVectorEnv, SyncVectorEnv, WorkerDiedError
from equality import assert_same

factories = [lambda: gym.make("CartPole-v1")] * 4
pool, sync = AsyncVectorEnv(factories, num_workers=2, timeout=60), SyncVectorEnv(factories)
print(type(pool._pool.seats[0].process._inner).__name__)
assert_same(pool.reset(seed=3), sync.reset(seed=3))
for step in range(40):
    actions = np.arange(4) * step % 2
    assert_same(pool.step(actions), sync.step(actions))
pool.send([1, 0], env_ids=[3, 0])
print(sorted(pool.recv(2).env_ids.tolist()))
os.kill(pool._pool.seats[1].process.pid, signal.SIGKILL)
try:
    pool.step(actions)
except WorkerDiedError as error:
    print("worker 1 (envs 2-3" in str(error), "SIGKILL" in str(error))
pool.close()
"""


# What Windows lacks, as far as that can be had here.
_IMPORTS = """
import sys
import multiprocess.connection, tempfile, subprocess, torch
sys.modules["fcntl"] = sys.modules["resource"] = None
import buffers
import vecenv.workers.env, vecenv.workers.worker, vecenv.choose, vecenv.compare
import vecenv.timing.stamps, vecenv.jit.env, vecenv.command.cli, vecenv.learn
print("imported", vecenv.choose._switches() > 0)
"""


def run(program):
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=ENVIRON, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.slow
def test_workers_do_as_envs_here_and_a_killed_one_is_named():
    done = run(_DRILL)
    assert done.stdout.split("\n")[:3] == ["Popen", "[0, 3]", "True True"], done


@pytest.mark.slow
def test_all_is_imported_where_there_is_no_fcntl_and_no_resource():
    done = run(_IMPORTS)
    assert done.stdout == "imported True\n", done.stderr
