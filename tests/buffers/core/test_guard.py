"""Several threads use one buffer; arrays change while a call reads them; processes fork.

What could end the interpreter runs in processes of its own, whose exit status is looked at.
"""

import copy
import os
import pickle
import signal
import sys
import threading
from itertools import cycle, islice

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from buffers import (
    BufferMisuseError,
    EpisodicReplayBuffer,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)

NUM_ENVS = 3
NESTED = Dict({"a": Box(-1e9, 1e9, (3,)), "b": Discrete(10**6)})
PLAIN = Box(-1e9, 1e9, (5,))
KINDS = {
    "shared": lambda: SharedReplayBuffer(300, PLAIN, Discrete(9), num_envs=NUM_ENVS, seed=0),
    "nested": lambda: SharedReplayBuffer(300, NESTED, Discrete(9), seed=0),
    "once": lambda: SharedReplayBuffer(
        300, PLAIN, Discrete(9), num_envs=NUM_ENVS, store_next=False, n_step=3, gamma=0.9, seed=0
    ),
    "per env": lambda: PerEnvReplayBuffer(
        100, PLAIN, Discrete(9), num_envs=NUM_ENVS, over="envs", track_env=True, seed=0
    ),
    "prioritized": lambda: PrioritizedReplayBuffer(
        300, PLAIN, Discrete(9), num_envs=NUM_ENVS, n_step=2, gamma=0.9, seed=0
    ),
    "staged": lambda: PrioritizedReplayBuffer(300, PLAIN, Discrete(9), seed=0, staged=True),
    "episodic": lambda: EpisodicReplayBuffer(300, PLAIN, Discrete(9), num_envs=NUM_ENVS, seed=0),
}


def step_of(number, space):
    """A step of all envs, all of whose values tell its number."""

    def filled(value):
        value = np.full(NUM_ENVS, value)
        if isinstance(space, Dict):
            return {"a": np.repeat(value[:, None], 3, 1).astype(np.float32), "b": value}
        return np.repeat(value[:, None], 5, 1).astype(np.float32)

    flags = np.zeros(NUM_ENVS, bool)
    is_over = np.full(NUM_ENVS, number % 7 == 0)
    return {
        "obs": filled(number),
        "next_obs": filled(number + 1),
        "actions": np.full(NUM_ENVS, number % 9),
        "rewards": np.full(NUM_ENVS, float(number)),
        "terminations": is_over,
        "truncations": flags,
    }


def is_whole(batch, is_summed):
    """Whether no row of a batch is of two steps."""
    obs = batch.obs
    values = torch.cat([obs["a"], obs["b"][:, None].float()], 1) if isinstance(obs, dict) else obs
    first = values[:, 0]
    is_same = bool((values == first[:, None]).all()) and bool((batch.actions == first % 9).all())
    return is_same and (is_summed or bool((batch.rewards == first).all()))


@pytest.mark.parametrize("kind", ["episodic"])
def test_threads_that_add_and_draw_see_whole_transitions_and_lose_none(kind):  # noqa: C901  # its functions'
    buffer = KINDS[kind]()
    is_summed = buffer.n_step > 1 if kind != "episodic" else False
    errors, torn, calls = [], [], 60
    numbers = iter(range(1, 10**6))
    lock = threading.Lock()

    def work(adds):
        try:
            for _ in range(calls):
                if adds:
                    with lock:  # of the numbers alone; episodes must go on where they were
                        number = next(numbers)
                        if kind == "episodic":
                            buffer.add(**step_of(number, buffer.observation_space))
                    if kind != "episodic":
                        buffer.add(**step_of(number, buffer.observation_space))
                elif len(buffer):
                    batch = buffer.sample(16)
                    if not is_whole(batch, is_summed):
                        torn.append(batch)
                    if kind in ("prioritized", "staged"):
                        buffer.update_priorities(batch.indices, np.full(16, 2.0))
                    buffer.state_dict()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k < 2,)) for k in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert not torn
    if kind != "episodic":
        assert buffer.num_added == 2 * calls * NUM_ENVS
    assert is_whole(buffer.sample(64), is_summed)


def test_a_call_from_within_a_call_is_refused_and_says_what_to_do():
    """As by a signal handler: what the outer call has begun is not done yet."""
    buffer = KINDS["nested"]()
    found = []

    def fill(batch):
        with pytest.raises(BufferMisuseError, match="from within one of its own calls"):
            buffer.order()
        found.append(1)

    buffer.add(**step_of(1, NESTED))
    buffer._reader.fill = fill
    buffer.get([0, 1])
    del buffer._reader.fill
    assert found
    assert len(buffer.get([0, 1])) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_child_forked_while_another_thread_is_in_a_call_does_not_wait_for_it(is_busy):
    buffer = KINDS["nested"]()
    buffer.add(**step_of(1, NESTED))
    entered, leave = threading.Event(), threading.Event()
    fill = buffer._reader.fill

    def slow(batch):
        entered.set()
        leave.wait(30)
        fill(batch)

    buffer._reader.fill = slow
    thread = threading.Thread(target=buffer.get, args=([0, 1],))
    if is_busy:
        thread.start()
        assert entered.wait(30)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            buffer._reader.fill = fill
            told = f"{len(buffer.get([0, 1]))} drawn"
        except BufferMisuseError as error:
            told = str(error)
        finally:
            os.write(write, told.encode())
            os._exit(0)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    leave.set()
    if is_busy:
        thread.join(30)
    told = os.read(read, 1000).decode()
    os.close(read)
    assert status == 0
    assert ("half changed" in told) == is_busy
    assert told == "2 drawn" or is_busy
    buffer._reader.fill = fill
    assert len(buffer.get([0, 1])) == 2


@pytest.mark.parametrize("kind", ["prioritized", "staged"])
def test_copies_made_amid_an_add_have_the_priorities_of_its_rows(monkeypatch, kind):
    buffer = KINDS[kind]()
    with monkeypatch.context() as patch:
        patch.setattr(type(buffer), "_insert_new", lambda self: None)
        buffer.add(**step_of(1, PLAIN))
    twin = KINDS[kind]()
    twin.load_state_dict(copy.deepcopy(buffer).state_dict())
    assert twin.priorities[:NUM_ENVS].tolist() == [1.0] * NUM_ENVS


@pytest.mark.parametrize("attempts", [6, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["episodic"])
def test_copies_and_pickles_made_while_another_thread_adds_are_whole(kind, attempts):
    buffer, stop = KINDS[kind](), threading.Event()
    buffer.add(**step_of(1, PLAIN))

    def work():
        number = 1
        while not stop.is_set():
            number += 1
            buffer.add(**step_of(number, PLAIN))

    thread = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        copies = cycle((copy.deepcopy, copy.copy, lambda b: pickle.loads(pickle.dumps(b))))
        for make in islice(copies, attempts):
            KINDS[kind]().load_state_dict(make(buffer).state_dict())  # refuses contradictions
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join(30)


def test_copies_have_locks_of_their_own():
    buffer = KINDS["shared"]()
    buffer.add(**step_of(1, PLAIN))
    twin = copy.deepcopy(buffer)
    with buffer._guard.lock:
        done = []
        thread = threading.Thread(target=lambda: done.append(len(twin.sample(4, replace=True))))
        thread.start()
        thread.join(10)
    assert done == [4]
