"""Ctrl-C at any instant, and forks of the caller: no wait for ever, no rows of another step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

INTERRUPTED = """
import random, signal, sys, time

import numpy as np
import ray
from gymnasium.error import ResetNeeded
from workers.faulty_envs import FINE, faulty
from vecenv import RayVectorEnv

ray.init(
    address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20,
    logging_level=40,
)
envs = RayVectorEnv(faulty(4), num_workers=2, timeout=20.0)
rng, counts = random.Random(7), np.zeros(4)
outcomes = {"done": 0, "reset": 0}

def reset():
    obs = envs.reset(seed=0)[0]
    counts[:] = 0
    assert obs[:, 1].tolist() == [0] * 4, obs

def take(obs, env_ids):
    counts[env_ids] += 1
    assert (obs[:, 1] == counts[env_ids]).all(), (obs, counts, env_ids)

def call(way):
    if way == "step":
        take(envs.step([FINE] * 4)[0], np.arange(4))
    elif way == "reset":
        reset()
    else:
        envs.send([FINE] * 3, [0, 1, 3])
        batch = envs.recv()
        take(batch.obs, batch.env_ids)

def raised(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, raised)
reset()
end = time.monotonic() + 60
for number in range(int(sys.argv[1])):
    if time.monotonic() > end:
        break
    way = rng.choice(["step", "step", "send", "reset"])
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 4e-3))
        call(way)
        while True:  # until it comes
            pass
    except KeyboardInterrupt:
        pass
    # What was interrupted was done, is in flight as a whole, or asks for a reset.
    try:
        if envs._calls.num_in_flight:
            batch = envs.recv()
            take(batch.obs, batch.env_ids)
        obs = envs.step([FINE] * 4)[0][:, 1]
        # A step that had come back when Ctrl-C came, or a reset, is lost on the way to `take`.
        assert ((obs == counts + 1) | (obs == counts + 2) | (obs == 1)).all(), (obs, counts)
        counts[:] = obs
        outcomes["done"] += 1
    except ResetNeeded:
        outcomes["reset"] += 1
        reset()
print(outcomes, flush=True)
assert min(outcomes.values()) > 0, outcomes
envs.close()
"""

FORKED = """
import faulthandler, os, sys, time

import ray
from workers.faulty_envs import FINE, faulty
from vecenv import RayVectorEnv

ray.init(
    address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20,
    logging_level=40,
)
envs = RayVectorEnv(faulty(4), num_workers=2, timeout=20.0)
envs.reset(seed=0)
pid = os.fork()
if pid == 0:
    faulthandler.dump_traceback_later(30, exit=True)
    refused = 0
    for call in (lambda: envs.step([FINE] * 4), envs.reset, lambda: envs.call("pid")):
        try:
            call()
        except RuntimeError as error:
            refused += "fork of process" in str(error)
    envs.close()
    del envs
    os._exit(refused)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 3, status
for count in range(1, 4):
    assert envs.step([FINE] * 4)[0][:, 1].tolist() == [count] * 4
envs.close()
print("done")
"""


def run(script, *args):
    ours = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    if paths := os.environ.get("PYTHONPATH"):
        ours["PYTHONPATH"] += os.pathsep + paths
    command = [sys.executable, "-W", "ignore", "-c", script, *args]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=110, env=ours
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def test_ctrl_c_at_any_instant_loses_no_count_of_what_is_in_flight():
    run(INTERRUPTED, "600")


def test_a_fork_of_the_caller_is_refused_its_actors_and_ends_none():
    assert run(FORKED) == "done\n"
