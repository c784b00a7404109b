"""The channel between caller and workers, as bare code: what a step costs, and how faults are seen.

Four candidates drive the same forked workers over the same shared memory: *pipes* (two a worker,
`select.poll`), *sockets* (one pair a worker, `select.poll`), *selectors* (the same pair, waited for
by the class that every system has) and *semaphores* (one a worker and one for all completions).

A row is one shape of work: nothing to do, envs that compute, envs that sleep with a worker each and
are taken in batches of 16. Candidates alternate; figures are microseconds a step, or steps a second
by envs / mean sleep. Then, for each: milliseconds from a killed worker to knowing it, and whether a
wait for a worker that hangs ends at its deadline.

`AsyncVectorEnv` uses *selectors*, one code for all systems: a pair of sockets a worker. From 20 µs
an env on all are equal, and a death is the end of a file, which is seen at once. With pipes instead
a step of 64 envs of 0 µs takes 47 µs, not 52, of two envs 30, not 41, of 64 envs of 20 µs the same
(least of six alternating runs); a PPO on 64 CartPoles takes 1 400 µs for each of its steps.

`python benchmarks/channels.py` on two cores that other programs used, too; Linux, Python 3.11,
medians of 15:

| work | pipes | sockets | selectors | semaphores |
|:--|--:|--:|--:|--:|
| 64 envs of 0 µs, 2 workers | 40.5 | 105 | 184 | 56.1 |
| 64 envs of 20 µs, 2 workers | 1.41e3 | 1.35e3 | 1.38e3 | 1.39e3 |
| 64 envs of 200 µs, 2 workers | 1.31e4 | 1.31e4 | 1.29e4 | 1.28e4 |
| 2 envs of 0 µs, 2 workers | 46.4 | 23.1 | 38.7 | 19.2 |
| 64 envs that sleep, 64 workers, first ready | 0.715 | 0.681 | 0.699 | 0.722 |
| a killed worker is known, ms | 24.2 | 81.3 | 54.1 | 105 |
| a deadline of 50 ms ends, ms | 56.4 | 50.1 | 50.1 | 50.2 |
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import select
import selectors
import signal
import socket
import statistics
import time
from typing import Any

import numpy as np

BATCH, MEAN_S, SIGMA = 16, 0.002, 1.2
ROWS = {
    "64 envs of 0 µs, 2 workers": (64, 2, 0.0, False),
    "64 envs of 20 µs, 2 workers": (64, 2, 20e-6, False),
    "64 envs of 200 µs, 2 workers": (64, 2, 200e-6, False),
    "2 envs of 0 µs, 2 workers": (2, 2, 0.0, False),
    "64 envs that sleep, 64 workers, first ready": (64, 64, None, True),
}


class Workers:
    """Forked workers over shared rows; subclasses say how they are woken and waited for."""

    # What subclasses have.
    open: Any
    await_go: Any
    tell_done: Any
    go: Any
    wait: Any

    def __init__(self, num_envs, num_workers, work_s):
        self.num_envs, self.num_workers, self.work_s = num_envs, num_workers, work_s
        self.obs = np.frombuffer(mmap.mmap(-1, num_envs * 208), np.float32).reshape(num_envs, 52)
        self.bounds = np.linspace(0, num_envs, num_workers + 1).astype(int).tolist()
        self.open()
        self.processes = []
        for worker in range(num_workers):
            context = multiprocessing.get_context("fork")
            process = context.Process(target=self.run, args=(worker,), daemon=True)
            process.start()
            self.processes.append(process)
        self.after_start()

    def run(self, worker):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        first, last = self.bounds[worker : worker + 2]
        row, rng = np.zeros(52, np.float32), np.random.default_rng(worker)
        self.in_worker(worker)
        while self.await_go(worker):
            for env in range(first, last):
                if self.work_s is None:
                    time.sleep(float(rng.lognormal(np.log(MEAN_S) - SIGMA**2 / 2, SIGMA)))
                elif self.work_s:
                    end = time.perf_counter() + self.work_s
                    while time.perf_counter() < end:
                        pass
                self.obs[env] = row
            self.tell_done(worker)

    def in_worker(self, worker):
        pass

    def after_start(self):
        pass

    def step(self):
        for worker in range(self.num_workers):
            self.go(worker)
        left = self.num_workers
        while left:
            left -= len(self.wait(10.0))

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()


class Sockets(Workers):
    def open(self):
        self.pairs = [socket.socketpair() for _ in range(self.num_workers)]

    def in_worker(self, worker):
        for other, (here, there) in enumerate(self.pairs):
            here.close()
            if other != worker:
                there.close()

    def after_start(self):
        self.poll = select.poll()
        self.owner, self.here = {}, [here.fileno() for here, _ in self.pairs]
        for worker, (here, there) in enumerate(self.pairs):
            there.close()
            self.poll.register(here, select.POLLIN)
            self.owner[here.fileno()] = worker

    def await_go(self, worker):
        return os.read(self.pairs[worker][1].fileno(), 24)

    def tell_done(self, worker):
        os.write(self.pairs[worker][1].fileno(), b"d")

    def go(self, worker):
        os.write(self.here[worker], b"g")

    def read(self, file, worker):
        try:
            if os.read(file, 64):
                return worker
        except ConnectionResetError:  # it has left a byte unread
            pass
        raise EOFError(worker)

    def wait(self, timeout_s):
        found = []
        for file, _ in self.poll.poll(timeout_s * 1000):
            found.append(self.read(file, self.owner[file]))
        if not found:
            raise TimeoutError
        return found


class Selectors(Sockets):
    def after_start(self):
        super().after_start()
        self.selector = selectors.DefaultSelector()
        for worker, file in enumerate(self.here):
            self.selector.register(file, selectors.EVENT_READ, worker)

    def wait(self, timeout_s):
        found = []
        for key, _ in self.selector.select(timeout_s):
            found.append(self.read(key.fd, key.data))
        if not found:
            raise TimeoutError
        return found


class Pipes(Sockets):
    def open(self):
        self.pipes = [(*os.pipe(), *os.pipe()) for _ in range(self.num_workers)]

    def in_worker(self, worker):
        for other, (go, tell_go, done, tell_done) in enumerate(self.pipes):
            for file in (tell_go, done) if other == worker else (go, tell_go, done, tell_done):
                os.close(file)

    def after_start(self):
        self.poll, self.owner, self.here = select.poll(), {}, []
        for worker, (go, tell_go, done, tell_done) in enumerate(self.pipes):
            os.close(go)
            os.close(tell_done)
            self.poll.register(done, select.POLLIN)
            self.owner[done] = worker
            self.here.append(tell_go)

    def await_go(self, worker):
        return os.read(self.pipes[worker][0], 24)

    def tell_done(self, worker):
        os.write(self.pipes[worker][3], b"d")


class Semaphores(Workers):
    """Completions are counted by one semaphore; which worker it was is a flag in shared memory."""

    def open(self):
        context = multiprocessing.get_context("fork")
        self.goes = [context.Semaphore(0) for _ in range(self.num_workers)]
        self.done = context.Semaphore(0)
        self.flags = np.frombuffer(mmap.mmap(-1, self.num_workers), np.bool_)

    def await_go(self, worker):
        return self.goes[worker].acquire()

    def tell_done(self, worker):
        self.flags[worker] = True
        self.done.release()

    def go(self, worker):
        self.goes[worker].release()

    def wait(self, timeout_s):
        end = time.monotonic() + timeout_s
        while not self.done.acquire(timeout=min(timeout_s, 0.1)):  # looks after deaths meanwhile
            for worker, process in enumerate(self.processes):
                if not process.is_alive():
                    raise EOFError(worker)
            if time.monotonic() > end:
                raise TimeoutError
        worker = int(np.argmax(self.flags))
        self.flags[worker] = False
        return [worker]


KINDS = (Pipes, Sockets, Selectors, Semaphores)


def first_ready(workers, seconds):
    """Return steps a second by envs / mean sleep."""
    ready, steps = [], 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        while len(ready) < BATCH:
            ready += workers.wait(10.0)
        batch, ready = ready[:BATCH], ready[BATCH:]
        workers.obs[batch].sum()
        for worker in batch:
            workers.go(worker)
        steps += BATCH
    return steps / (time.perf_counter() - begin) * MEAN_S / workers.num_envs, ready


def measure(name, repeats=15):
    num_envs, num_workers, work_s, is_first_ready = ROWS[name]
    pools = [kind(num_envs, num_workers, work_s) for kind in KINDS]
    found = [[] for _ in KINDS]
    for pool in pools:
        if is_first_ready:
            for worker in range(num_workers):
                pool.go(worker)
        else:
            pool.step()
    for _ in range(repeats):
        for pool, figures in zip(pools, found, strict=True):
            if is_first_ready:
                share, ready = first_ready(pool, 0.4)
                figures.append(share)
                for worker in ready:
                    pool.go(worker)
                continue
            count, begin = 0, time.perf_counter()
            while time.perf_counter() - begin < 0.06:
                pool.step()
                count += 1
            figures.append((time.perf_counter() - begin) / count * 1e6)
    for pool in pools:
        pool.end()
    return [f"{statistics.median(figures):.3g}" for figures in found]


def faults(kind, repeats=20):
    """Return the slowest notice of a killed worker in ms, and that of a deadline of 50 ms."""
    slowest_ms = 0.0
    for _ in range(repeats):
        pool = kind(8, 2, 0.05)
        pool.go(0)
        pool.go(1)
        time.sleep(0.01)
        begin = time.perf_counter()
        pool.processes[1].kill()
        try:
            while True:
                pool.wait(10.0)
        except EOFError as error:
            assert error.args == (1,)
        slowest_ms = max(slowest_ms, (time.perf_counter() - begin) * 1e3)
        pool.end()
    pool, late_ms = kind(2, 2, 1.0), float("nan")
    pool.go(0)
    begin = time.perf_counter()
    try:
        pool.wait(0.05)
    except TimeoutError:
        late_ms = (time.perf_counter() - begin) * 1e3
    pool.end()
    return f"{slowest_ms:.3g}", f"{late_ms:.3g}"


def main():
    for name in ROWS:
        print(f"| {name} |", " | ".join(measure(name)), "|", flush=True)
    found = list(map(faults, KINDS))
    for name, row in zip(
        ("a killed worker is known, ms", "a deadline of 50 ms ends, ms"),
        zip(*found, strict=True),
        strict=True,
    ):
        print(f"| {name} |", " | ".join(row), "|")


if __name__ == "__main__":
    main()
