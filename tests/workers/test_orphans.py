"""What envs start ends with their worker, at no cost for envs that start nothing."""

import os
import signal

import pytest
from programs import Program
from workers.faulty_envs import wait_until_gone

CALLER = """
import os, signal, subprocess, sys, time
from workers.started_envs import Starting
from vecenv import AsyncVectorEnv

def start():
    {start}

signal.signal(signal.SIGUSR2, print)
envs = AsyncVectorEnv([lambda: Starting(start)] * 2, num_workers=1)
print(*envs.get_attr("started"), *(seat.process.pid for seat in envs._pool.seats), flush=True)
signal.pause()
try:
    envs.reset()
except Exception:
    time.sleep(60)
"""
SLEEP = "sleep 300 & echo $!"
WAYS = {
    "Popen": "return subprocess.Popen(['sleep', '300']).pid",
    "posix_spawn": "return os.posix_spawnp('sleep', ['sleep', '300'], os.environ)",
    "shell": f"return int(subprocess.run({SLEEP!r}, shell=True, stdout=-1, text=True).stdout)",
    "fork": "pid = os.fork()\n    return pid or signal.pause()",
}
WAYS["shell"] = f"return int(os.popen({SLEEP.replace('&', '>/dev/null &')!r}).read())"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("killed", ["caller", "worker"])
def test_however_a_child_is_started_it_ends_with_a_worker_that_is_killed(way, killed):
    caller = Program(CALLER.format(start=WAYS[way]))
    *started, worker = map(int, caller.readline().split())
    if killed == "caller":
        caller.kill()
    else:
        os.kill(worker, signal.SIGKILL)
        caller.send_signal(signal.SIGUSR2)  # ends its sleep
    assert wait_until_gone([*started, worker], 10) == []
    caller.kill()
    caller.communicate()
