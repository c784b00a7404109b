"""Envs that share the standard library's locks, queues, pipes and managers with the caller."""

import concurrent.futures
import multiprocessing
import os
import time

import numpy as np
import pytest
from workers.started_envs import Calling, Starting

from vecenv import AsyncVectorEnv

NUM_ENVS, NUM_STEPS = 4, 3
METHODS = ["fork", *(pytest.param(m, marks=pytest.mark.slow) for m in ("forkserver", "spawn"))]


def run(call, method):
    options = {"num_workers": 2, "context": method, "timeout": 30}
    # A number, as an env that is tried out beforehand would call it too.
    envs = AsyncVectorEnv([lambda: Calling(call)] * NUM_ENVS, **options)
    envs.reset()
    for _ in range(NUM_STEPS):
        envs.step(np.zeros(NUM_ENVS, np.int64))
    envs.close()


def test_locks_events_values_and_pipes():
    context = multiprocessing.get_context("fork")
    lock, event, counter = context.Lock(), context.Event(), context.Value("i", 100)
    here, there = context.Pipe()

    def call():
        with lock:
            counter.value += 1
            there.send(multiprocessing.current_process().name)
            event.set()

    run(call, "fork")
    assert event.is_set()
    assert counter.value == 100 + NUM_ENVS * NUM_STEPS
    names = {here.recv() for _ in range(NUM_ENVS * NUM_STEPS) if here.poll(10)}
    assert names == {"vecenv-worker-0", "vecenv-worker-1"}
    here.close()
    there.close()


def test_processes_that_envs_have_started_end_with_them():
    def executor():
        pool = concurrent.futures.ProcessPoolExecutor(1)
        pids.put(pool.submit(os.getpid).result())
        return pool

    def daemon():
        process = multiprocessing.Process(target=time.sleep, args=(60,), daemon=True)
        process.start()
        pids.put(process.pid)
        return process

    pids = multiprocessing.get_context("fork").Queue()
    with multiprocessing.get_context("fork").Pool(1) as own:
        factories = [lambda: Starting(executor), lambda: Starting(daemon)]
        envs = AsyncVectorEnv(factories, num_workers=1, context="fork", timeout=60)
        envs.reset()
        started = [pids.get(timeout=30) for _ in factories]
        envs.close(timeout=30)
        for pid in started:
            with pytest.raises(ProcessLookupError):
                for _ in range(100):
                    os.kill(pid, 0)
                    time.sleep(0.05)
        assert own.apply(abs, (-1,)) == 1  # the caller's live on
    pids.close()
    pids.join_thread()
