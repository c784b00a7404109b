"""A caller that is killed leaves nothing behind: neither actors nor Ray."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from workers.faulty_envs import wait_until_gone

pytestmark = pytest.mark.ray

SCRIPT = """
import os, time
from workers.faulty_envs import faulty
from vecenv import RayVectorEnv

options = {"num_workers": 2, "cpus_per_worker": 0.25}
envs = RayVectorEnv(faulty(2), **options)
envs.reset()
print(*set(envs.call("pid")), flush=True)
time.sleep(300)
"""


def test_a_killed_caller_leaves_nothing_behind():
    ours = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ours) as caller:
        pids = [int(pid) for pid in caller.stdout.readline().split()]
        assert len(pids) == 2
        os.kill(caller.pid, signal.SIGKILL)
    assert wait_until_gone(pids, 30) == []
