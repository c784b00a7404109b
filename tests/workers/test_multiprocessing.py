"""Envs that share the standard library's locks, queues, pipes and managers with the caller."""

import multiprocessing

import numpy as np
from workers.started_envs import Calling

from vecenv import AsyncVectorEnv

NUM_ENVS, NUM_STEPS = 4, 3


def test_locks_events_values_and_pipes():
    context = multiprocessing.get_context("fork")
    lock, event, counter = context.Lock(), context.Event(), context.Value("i", 100)
    here, there = context.Pipe()

    def call():
        with lock:
            counter.value += 1
            there.send(multiprocessing.current_process().name)
            event.set()

    envs = AsyncVectorEnv([lambda: Calling(call)] * NUM_ENVS, num_workers=2, context="fork")
    envs.reset()
    for _ in range(NUM_STEPS):
        envs.step(np.zeros(NUM_ENVS, np.int64))
    envs.close()
    assert event.is_set()
    assert counter.value == 100 + NUM_ENVS * NUM_STEPS
    names = {here.recv() for _ in range(NUM_ENVS * NUM_STEPS) if here.poll(10)}
    assert names == {"vecenv-worker-0", "vecenv-worker-1"}
    here.close()
    there.close()
