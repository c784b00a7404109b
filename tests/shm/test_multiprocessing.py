"""Envs that share the standard library's locks, queues, pipes and managers with the caller."""

import multiprocessing

import gymnasium as gym
import multiprocess
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from vecenv import AsyncVectorEnv

NUM_ENVS, NUM_STEPS = 4, 3
METHODS = ["fork", *(pytest.param(m, marks=pytest.mark.slow) for m in ("forkserver", "spawn"))]

LIBRARIES = [
    (multiprocessing, "fork"),
    (multiprocessing, "spawn"),
    pytest.param(multiprocess, "spawn", marks=pytest.mark.slow),
    pytest.param(multiprocess, "forkserver", marks=pytest.mark.slow),
]


class Calling(gym.Env):
    """Calls something in every step."""

    observation_space, action_space = Box(0, 1, (1,), np.float32), Discrete(2)

    def __init__(self, call):
        self.call = call

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.call()
        return np.zeros(1, np.float32), 0.0, False, False, {}


def run(call, method):
    envs = AsyncVectorEnv(
        [lambda: Calling(call)] * NUM_ENVS, num_workers=2, context=method, timeout=30
    )
    envs.reset()
    for _ in range(NUM_STEPS):
        envs.step(np.zeros(NUM_ENVS, np.int64))
    envs.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_manager_the_caller_has_talked_to(method):
    with multiprocessing.get_context(method).Manager() as manager:
        counter, lock = manager.Value("i", 0), manager.Lock()
        with lock:  # the connection that a fork inherits
            counter.value = 100

        def call():
            with lock:
                counter.value += 1

        run(call, method)
        assert counter.value == 100 + NUM_ENVS * NUM_STEPS


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_what_envs_put_into_queues_is_there_after_close(method, is_used):
    queue = multiprocessing.get_context(method).Queue()
    if is_used:  # its thread that writes is not there after a fork
        queue.put("the caller's")
        assert queue.get(timeout=10) == "the caller's"
    run(lambda: queue.put("an env's"), method)
    assert [queue.get(timeout=10) for _ in range(NUM_ENVS * NUM_STEPS)] == ["an env's"] * 12
    queue.close()
    queue.join_thread()


@pytest.mark.parametrize("library, method", LIBRARIES)
def test_locks_events_values_and_pipes(library, method):
    context = library.get_context(method)
    lock, event, counter = context.Lock(), context.Event(), context.Value("i", 100)
    here, there = context.Pipe()

    def call():
        with lock:
            counter.value += 1
            there.send(multiprocessing.current_process().name)
            event.set()

    run(call, method)
    assert event.is_set()
    assert counter.value == 100 + NUM_ENVS * NUM_STEPS
    names = {here.recv() for _ in range(NUM_ENVS * NUM_STEPS) if here.poll(10)}
    assert names == {"vecenv-worker-0", "vecenv-worker-1"}
    here.close()
    there.close()
