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
from programs import printed

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


@pytest.mark.parametrize("kind", KINDS)
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


_CHANGING = """
import ctypes, sys, threading, time
import numpy as np
from gymnasium.spaces import Box, Discrete
from buffers import *
from buffers import BufferMisuseError

sys.setswitchinterval(1e-6)
space, envs, K = Box(-1, 1, (2,)), 64, 20_000
ids = np.arange(K) % envs
flags = np.zeros(K, bool)
stop = threading.Event()

def change():
    while not stop.is_set():
        ids[::7] = [2**62, -(2**62), 2**40][ids[1] % 3]
        ids[:] = np.arange(K) % envs

obs = np.zeros((K, 2), np.float32)
step = dict(obs=obs, next_obs=obs, actions=np.zeros(K, int), rewards=np.zeros(K),
            terminations=flags, truncations=flags)
few = {k: v[:envs] for k, v in step.items()}
options = dict(num_envs=envs, seed=0)
buffers = [
    PerEnvReplayBuffer(50, space, Discrete(2), **options),
    SharedReplayBuffer(5000, space, Discrete(2), track_env=True, **options),
    SharedReplayBuffer(5000, space, Discrete(2), store_next=False, **options),
]
for buffer in buffers:
    buffer.add(env_ids=ids.copy(), **step)
ranked = PrioritizedReplayBuffer(K, space, Discrete(2), seed=0)
ranked.add(**step)
rollout = RolloutBuffer(1, envs, space, Discrete(2), autoreset_mode="SameStep")
rollout.start(obs[:envs])
episodic = EpisodicReplayBuffer(5000, space, Discrete(2), **options)
thread = threading.Thread(target=change, daemon=True)
thread.start()
end, calls = time.monotonic() + float(sys.argv[1]), 0
ones = np.ones(K)
tries = [
    *(lambda b=b: b.add(env_ids=ids, **step) for b in buffers),
    *(lambda b=b: b.cut_episodes(ids[:envs]) for b in buffers),
    lambda: ranked.update_priorities(ids, ones),
    lambda: ranked.get(ids),
    lambda: rollout.set_final_values(0, ids[:envs], ones[:envs].astype(np.float32)),
    lambda: episodic.add(env_ids=ids[:envs], **few),
    lambda: episodic.cut_episodes(ids[:envs]),
]
done = refused = 0
while time.monotonic() < end or not (done and refused):
    for one in tries:
        try:
            one()
            done += 1
        except BufferMisuseError:
            refused += 1
stop.set()
thread.join()
for buffer in (*buffers, ranked):
    buffer.sample(100)
print("whole")
"""


@pytest.mark.slow
def test_indices_that_another_thread_changes_during_the_call_stay_in_bounds():
    assert printed(_CHANGING, "0.3", kind="buffers") == ["whole"]


_MANY_WRITERS = """
import sys, threading
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from buffers import *

sys.setswitchinterval(1e-6)
spaces = Dict({"a": Box(-1, 1, (3,)), "b": Box(-1, 1, (2,))}), Discrete(2)
buffers = [
    EpisodicReplayBuffer(200, *spaces, num_envs=4, seed=0),
    SharedReplayBuffer(200, *spaces, num_envs=4, store_next=False, seed=0),
]
def work(buffer, first):
    obs = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((2, 2), np.float32)}
    no, yes = np.zeros(2, bool), np.ones(2, bool)
    for k in range(150):
        flags = {"terminations": yes if k % 5 == 0 else no, "truncations": no}
        buffer.add(obs=obs, next_obs=obs, actions=no.astype(int), rewards=np.zeros(2), **flags,
                   env_ids=np.array([first, first + 1]))
threads = [threading.Thread(target=work, args=(b, f)) for b in buffers for f in (0, 2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(buffers[1].num_added, buffers[0].num_episodes + buffers[0].first_episode)
"""


@pytest.mark.slow
def test_two_threads_add_to_one_buffer_each_for_envs_of_its_own():
    assert printed(_MANY_WRITERS, kind="buffers") == ["600", "120"]


def test_a_call_from_within_a_call_is_refused_and_says_what_to_do():
    """As by a signal handler: what the outer call has begun is not done yet."""
    buffer = KINDS["nested"]()
    found = []

    def fill(batch, draw):
        with pytest.raises(BufferMisuseError, match="from within one of its own calls"):
            buffer.order()
        found.append(1)

    buffer.add(**step_of(1, NESTED))
    buffer._reader.fill = fill
    buffer.sample(2, replace=False)
    del buffer._reader.fill
    assert found
    assert len(buffer.sample(2, replace=False)) == 2


def test_an_interrupt_in_an_exclusive_call_leaves_the_buffer_free():
    buffer = KINDS["nested"]()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    write, buffer._storage.write = buffer._storage.write, interrupted
    with pytest.raises(KeyboardInterrupt):
        buffer.add(**step_of(1, NESTED), valid=np.ones(NUM_ENVS, np.bool_))  # not by one call
    buffer._storage.write = write
    buffer.add(**step_of(1, NESTED))
    assert len(buffer) == NUM_ENVS


def test_priorities_of_rows_whose_add_was_interrupted_come_with_the_next(monkeypatch):
    buffer = KINDS["prioritized"]()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(buffer._tree, "insert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            buffer.add(**step_of(1, PLAIN))
    buffer.add(**step_of(2, PLAIN))
    assert buffer.priorities[: 2 * NUM_ENVS].tolist() == [1.0] * 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_child_forked_while_another_thread_is_in_a_call_does_not_wait_for_it(is_busy):
    buffer = KINDS["nested"]()
    buffer.add(**step_of(1, NESTED))
    entered, leave = threading.Event(), threading.Event()
    fill = buffer._reader.fill

    def slow(batch, draw):
        entered.set()
        leave.wait(30)
        fill(batch, draw)

    buffer._reader.fill = slow
    thread = threading.Thread(target=buffer.sample, args=(2,), kwargs={"replace": False})
    if is_busy:
        thread.start()
        assert entered.wait(30)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            buffer._reader.fill = fill
            told = f"{len(buffer.sample(2, replace=False))} drawn"
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
    assert len(buffer.sample(2, replace=False)) == 2


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
@pytest.mark.parametrize("kind", ["once", "episodic"])
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
