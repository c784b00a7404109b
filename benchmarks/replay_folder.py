"""Replay larger than memory against reading and writing the same bytes of a file directly.

    python benchmarks/replay_folder.py --folder /on/the/disk --memory 768

A buffer with storage="memmap" of four times the memory of a control group, in which this process
runs, is filled and then drawn from at random. Beside it, in turn: reads of as many rows of the same
file at random places, by 1, 4, 16 or 32 threads in compiled code (the quickest counts), and writes
of as many bytes as the adds have to another file, in blocks, synchronised as often. What the system
keeps of the files in the group's memory serves both. Making a control group needs rights; where
they are missing the program says so and ends, unless --memory 0 asks to go without.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from measure import machine, markdown_table
from numba import njit, types

from buffers import SharedReplayBuffer

BATCH, ADDED, DIRTY, DRAWS = 256, 2048, 1 << 26, 20
SPACES = {"448 bytes": Box(-1, 1, (52,)), "28 KiB": Box(0, 255, (84, 84, 2), np.uint8)}
_pread = types.ExternalFunction(
    "pread", types.intp(types.int32, types.voidptr, types.uintp, types.intp)
)


@njit(nogil=True)
def read_rows(number, rows, out):
    """Read rows int64 (K,) of a file into uint8 (K, stride)."""
    stride = out.shape[1]
    for i in range(rows.shape[0]):
        if _pread(number, out[i].ctypes, stride, rows[i] * stride) != stride:
            raise OSError("a row could not be read")


def limit_memory(mib: int) -> None:
    """Move this process into a control group of its own."""
    if not mib:
        return
    v1 = Path("/sys/fs/cgroup/memory")
    root, name = (v1, "memory.limit_in_bytes") if v1.exists() else (v1.parent, "memory.max")
    group = root / f"replay-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(mib << 20))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise SystemExit(
            f"no control group can be made ({error}); --memory 0 does without"
        ) from None


def seconds(function: Callable[[], Any]) -> float:
    begin = perf_counter()
    function()
    return perf_counter() - begin


def columns_for(space: Box) -> dict[str, np.ndarray]:
    rng, nothing = np.random.default_rng(0), np.zeros(ADDED, np.bool_)
    obs = rng.integers(0, 255, (2, ADDED, *space.shape)).astype(space.dtype)
    columns = {"obs": obs[0], "next_obs": obs[1], "actions": rng.integers(0, 7, ADDED)}
    return {
        **columns,
        "rewards": rng.random(ADDED),
        "terminations": nothing,
        "truncations": nothing,
    }


class Direct:
    """The same bytes without a buffer."""

    def __init__(self, folder: Path, num_rows: int, stride: int):
        self.size = num_rows * stride
        self.reading = os.open(folder / "buffer" / "rows", os.O_RDONLY)
        os.posix_fadvise(self.reading, 0, 0, os.POSIX_FADV_RANDOM)
        self.writing = os.open(folder / "direct", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self.writing, 0, self.size)
        self.out, self.position, self.dirty = np.zeros((BATCH, stride), np.uint8), 0, 0
        self.num_rows, self.rng = num_rows, np.random.default_rng(1)
        self.block = np.random.default_rng(0).integers(0, 255, ADDED * stride).astype(np.uint8)

    def read(self, pool: ThreadPoolExecutor, num_threads: int) -> None:
        rows = np.sort(self.rng.integers(0, self.num_rows, BATCH))
        jobs = [
            pool.submit(read_rows, self.reading, rows[k::num_threads], self.out[k::num_threads])
            for k in range(num_threads)
        ]
        for job in jobs:
            job.result()

    def write(self) -> None:
        if self.position + len(self.block) > self.size:
            self.position = 0
        for begin in range(0, len(self.block), 1 << 22):
            piece = self.block[begin : begin + (1 << 22)]
            os.pwrite(self.writing, memoryview(piece), self.position + begin)  # type: ignore[arg-type]  # typeshed before 3.12
        self.position += len(self.block)
        self.dirty += len(self.block)
        if self.dirty >= DIRTY:
            os.fdatasync(self.writing)
            self.dirty = 0


def measure(name: str, folder: Path, mib: int, rounds: int) -> list[str]:
    space = SPACES[name]
    probe = SharedReplayBuffer(1, space, Discrete(7))
    stride = probe.memory()["rows"]
    capacity = 4 * max(mib, 256) * 2**20 // stride // ADDED * ADDED
    buffer = SharedReplayBuffer(
        capacity, space, Discrete(7), storage="memmap", folder=folder / "buffer", seed=0
    )
    columns = columns_for(space)
    begin = perf_counter()
    while len(buffer) < capacity:
        buffer.add(**columns)
    buffer.flush()
    filled = capacity * stride / (perf_counter() - begin) / 1e6
    direct, pools = (
        Direct(folder, capacity, stride),
        {n: ThreadPoolExecutor(n) for n in (1, 4, 16, 32)},
    )
    batch = buffer.new_batch(BATCH)
    draws: dict[str, list[float]] = {"ours": [], **{f"{n} threads": [] for n in pools}}
    adds: dict[str, list[float]] = {"ours": [], "direct": []}
    count = max(1, (384 << 20) // (ADDED * stride))
    buffer.sample(BATCH, batch)
    direct.read(pools[1], 1)
    for _ in range(rounds):
        for _ in range(DRAWS):  # one behind the other: rows are read ahead
            draws["ours"].append(seconds(lambda: buffer.sample(BATCH, batch)))
        for n, pool in pools.items():
            for _ in range(DRAWS):
                draws[f"{n} threads"].append(seconds(lambda p=pool, n=n: direct.read(p, n)))

        def ours() -> None:
            for _ in range(count):
                buffer.add(**columns)
            buffer.flush()

        def theirs() -> None:
            for _ in range(count):
                direct.write()
            os.fdatasync(direct.writing)

        for key, function in (("ours", ours), ("direct", theirs)):
            adds[key].append(seconds(function))
    medians = {key: 1e3 * statistics.median(times) for key, times in draws.items()}
    best = min(value for key, value in medians.items() if key != "ours")
    rates = {k: count * ADDED * stride / statistics.median(t) / 1e6 for k, t in adds.items()}
    print(name, {key: f"{value:.2f} ms" for key, value in medians.items()}, f"{filled:.0f} MB/s")
    buffer.close()
    shutil.rmtree(folder / "buffer")
    os.unlink(folder / "direct")
    return [
        name, f"{capacity * stride / 2**30:.1f} GiB", f"{medians['ours']:.1f}", f"{best:.1f}",
        f"{best / medians['ours']:.2f}", f"{rates['ours']:.0f}", f"{rates['direct']:.0f}",
        f"{rates['ours'] / rates['direct']:.2f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", default=None, help="where the files are made, on the disk")
    parser.add_argument("--memory", type=int, default=768, help="MiB of the control group; 0: none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", choices=SPACES, nargs="*", default=list(SPACES))
    options = parser.parse_args()
    limit_memory(options.memory)
    print(machine("numpy", "numba", "torch"))
    rows = []
    for name in options.rows:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows.append(measure(name, Path(folder), options.memory, options.rounds))
    titles = (
        "row",
        "file",
        "draw 256, ms",
        "direct, ms",
        "rate",
        "add, MB/s",
        "direct, MB/s",
        "rate",
    )
    print(markdown_table(list(titles), rows))


if __name__ == "__main__":
    main()
