"""What envs start ends with their worker, at no cost for envs that start nothing."""

import pytest
from programs import Program, printed
from workers.faulty_envs import wait_until_gone

WORKER = """
import os, signal, subprocess, sys
from vecenv.core.orphans import Family
family = Family()
{start}
os.kill(os.getpid(), signal.SIGKILL)
"""
SLEEP = "sleep 300 & echo $!"
WAYS = {
    "Popen": "print(subprocess.Popen(['sleep', '300']).pid, flush=True)",
    "preexec_fn": "print(subprocess.Popen(['sleep', '300'], preexec_fn=list).pid, flush=True)",
    "posix_spawn": "print(os.posix_spawnp('sleep', ['sleep', '300'], os.environ), flush=True)",
    "spawn": "print(os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '300'), flush=True)",
    "shell": f"os.system({SLEEP!r})",
    "fork": "pid = os.fork()\nsignal.pause() if pid == 0 else print(pid, flush=True)",
}


@pytest.mark.parametrize("way", WAYS)
def test_however_a_child_is_started_it_ends_with_a_worker_that_is_killed(way):
    worker = Program(WORKER.format(start=WAYS[way]))
    pid = int(worker.readline())
    assert wait_until_gone([pid], 10) == []
    worker.communicate()


def test_no_audit_hook_slows_envs_down():
    code = """
import sys
sys.addaudithook(lambda event, _: print(event) if event == "sys.addaudithook" else None)
from vecenv.core.orphans import Family
Family()
"""
    assert printed(code) == []
