"""Time of replay buffers against those of other libraries, and against copying the same bytes.

    python benchmarks/replay.py
    python benchmarks/replay.py --only prioritized files
    python benchmarks/replay.py --only layouts columns

A transition is 52 float32 obs and next obs, an int64 action, a float32 reward and two flags. Other
libraries are measured if they are installed (stable-baselines3, cpprb, torchrl, tianshou); all are
full before. "copy" moves as many bytes as the call beside it, in one piece, into the same table or
out of it; "gather" is one `index_select` of the packed rows, the indices being given. "fresh"
batches are new tensors, "out" fills a batch made before. Arrays handed to `add` are NumPy arrays of
the right dtypes; a sample ends with torch tensors. One thread.

In "3 steps", cpprb has a single environment and folds the steps when they are added; the others
have 2048 environments and fold at sampling. "update, same" gives the same priorities to the same
rows over and over, "update, new" other priorities to other rows each time, as training does.

"layouts" adds to buffers whose observations are a Dict of three arrays, or stored once; an add
follows on the one before. "columns" draws observations and actions only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from measure import alternate, machine, markdown_table, median_ratio
from replay_peers import ACTIONS, ALPHA, BETA, GAMMA, OBS, PEERS, Columns, Peer, make_peers
from work import make_columns

from buffers import PerEnvReplayBuffer, PrioritizedReplayBuffer, SharedReplayBuffer

NUM_ENVS = 2048
CHUNK = 20_000  # rows per add while a buffer is filled
FIXED = ("stable-baselines3", "tianshou")  # take one row per env, no more
ROUND_S = 0.03
Update = Callable[[Any, np.ndarray], object]
Case = tuple[Callable[[], object], int]


def repeat(call: Callable[[], object]) -> Case:
    """Run as often in one go as fits into ROUND_S, at least once; and how often that is."""
    call()  # compiles
    begin, count = perf_counter(), 0
    while count < 2 or perf_counter() - begin < ROUND_S / 4:
        call()
        count += 1
    count = max(1, int(ROUND_S * count / (perf_counter() - begin)))

    def run() -> None:
        for _ in range(count):
            call()

    return run, count


def report(title: str, cases: dict[str, Case], ours: str, repetitions: int) -> None:
    """Print microseconds per call, and the time of each case over that of ours."""
    rates = alternate(
        {name: run for name, (run, _) in cases.items()},
        {name: count for name, (_, count) in cases.items()},
        repetitions,
    )
    rows = []
    for name, per_second in rates.items():
        times = sorted(1e6 / rate for rate in per_second)
        spread = f"{times[0]:.4g} to {times[-1]:.4g}"
        ratio = f"{median_ratio(rates, ours, name):.2f}"
        rows.append([name, f"{statistics.median(times):.4g}", spread, ratio])
    print(f"\n{markdown_table([title, 'µs', 'spread', f'time / {ours}'], rows)}", flush=True)


def filled(capacity: int, kind: Any = SharedReplayBuffer, **options: Any) -> Any:
    buffer = kind(capacity, OBS, ACTIONS, seed=0, **options)
    fill(_adder(buffer), capacity)
    return buffer


def _adder(buffer: Any) -> Callable[[Columns], None]:
    return lambda columns: buffer.add(**columns)


def fill(add: Callable[[Columns], object], rows: int, count: int = CHUNK) -> None:
    columns = make_columns(count)
    back = {**columns, "obs": columns["next_obs"], "next_obs": columns["obs"]}
    for _, given in zip(range(-(-rows // count)), itertools.cycle([columns, back]), strict=False):
        add(given)  # each obs is the next_obs before


def full_peers(capacity: int, num_envs: int, **options: Any) -> dict[str, Peer]:
    """Those installed, full."""
    peers = make_peers(capacity, num_envs, **options)
    for name, peer in peers.items():
        fill(peer.add, capacity, num_envs if name in FIXED else CHUNK)
    return peers


def time_add(capacity: int, repetitions: int) -> None:
    buffer = filled(capacity)
    for count in (NUM_ENVS, 8, 1):
        columns = make_columns(count)
        cases = {
            "ours": repeat(partial(buffer.add, **columns)),
            "copy": repeat(copy_in(buffer, count)),
        }
        for name, peer in full_peers(capacity, count).items():
            cases[name] = repeat(partial(peer.add, columns))
        report(f"add {count}", cases, "ours", repetitions)


def copy_in(buffer: Any, count: int) -> Callable[[], None]:
    """Copy as many packed rows into the buffer's own table, one place after the other."""
    table = buffer._table.rows.numpy()
    rows = np.ones((count, table.shape[1]), np.uint8)  # zeros would all be one page of the system
    starts = itertools.cycle(range(0, len(table) - count, count))

    def copy() -> None:
        start = next(starts)
        table[start : start + count] = rows

    return copy


def gather_out(buffer: Any, size: int) -> Callable[[], None]:
    """Gather packed rows, other ones each time, into memory of the caller."""
    table = buffer._table.rows
    indices = itertools.cycle(torch.randint(len(table), (2_000_000 // size, size)))
    target = torch.empty((size, table.shape[1]), dtype=torch.uint8)

    def gather() -> None:
        torch.index_select(table, 0, next(indices), out=target)

    return gather


def time_sample(capacity: int, repetitions: int) -> None:
    buffer = filled(capacity)
    per_env = PerEnvReplayBuffer(capacity // NUM_ENVS, OBS, ACTIONS, num_envs=NUM_ENVS, seed=0)
    fill(_adder(per_env), capacity, NUM_ENVS)
    peers = full_peers(capacity, NUM_ENVS)
    for size in (256, 4096):
        target = np.zeros((size, buffer._table.rows.shape[1]), np.uint8)
        cases = {
            "out": repeat(partial(buffer.sample, size, buffer.new_batch(size))),
            "fresh": repeat(partial(buffer.sample, size)),
            "per env, out": repeat(partial(per_env.sample, size, per_env.new_batch(size))),
            "gather": repeat(gather_out(buffer, size)),
            "copy": repeat(partial(np.copyto, target, buffer._table.rows.numpy()[:size])),
        }
        for name, peer in peers.items():
            if not (name == "torchrl" and size != 256):  # its batch size is part of the buffer
                cases[name] = repeat(partial(peer.sample, size))
        report(f"sample {size} of {capacity}", cases, "fresh", repetitions)


def time_layouts(capacity: int, repetitions: int) -> None:
    sizes = {"position": 24, "velocity": 24, "goal": 4}
    nested = Dict({key: Box(-np.inf, np.inf, (size,)) for key, size in sizes.items()})
    begins = dict(zip(sizes, (0, 24, 48), strict=True))

    def split(obs: np.ndarray) -> dict[str, np.ndarray]:
        return {k: np.ascontiguousarray(obs[:, begins[k] :][:, : sizes[k]]) for k in sizes}

    for count in (NUM_ENVS, 8, 1):
        columns = make_columns(count)
        flat = [columns, {**columns, "obs": columns["next_obs"], "next_obs": columns["obs"]}]
        dicts: list[Any] = [
            {**c, "obs": split(c["obs"]), "next_obs": split(c["next_obs"])} for c in flat
        ]
        cases = {}
        layouts: list[tuple[str, Any, list[Any], dict[str, Any]]] = [
            ("both stored", OBS, flat, {}),
            ("both stored, 3 steps", OBS, flat, {"n_step": 3, "gamma": GAMMA}),
            ("stored once", OBS, flat, {"store_next": False}),
            ("Dict", nested, dicts, {}),
            ("Dict, stored once", nested, dicts, {"store_next": False}),
        ]
        for name, space, given, options in layouts:
            buffer = SharedReplayBuffer(
                capacity // count * count, space, ACTIONS, num_envs=count, seed=0, **options
            )
            steps = itertools.cycle(given)
            cases[name] = repeat(lambda buffer=buffer, steps=steps: buffer.add(**next(steps)))
        report(f"add {count}", cases, "both stored", repetitions)


def time_columns(capacity: int, repetitions: int) -> None:
    chosen = "obs", "actions"
    uniform = filled(capacity)
    prioritized = filled(capacity, PrioritizedReplayBuffer)
    for size in (256, 4096):
        cases = {}
        for name, buffer in (("uniform", uniform), ("prioritized", prioritized)):
            cases[name] = repeat(partial(buffer.sample, size))
            cases[f"{name}, obs and actions"] = repeat(partial(buffer.sample, size, columns=chosen))
        report(f"sample {size} of {capacity}", cases, "uniform", repetitions)


def time_windows(capacity: int, repetitions: int) -> None:
    options = {"num_envs": NUM_ENVS, "n_step": 3, "gamma": GAMMA}
    buffer = SharedReplayBuffer(capacity, OBS, ACTIONS, seed=0, **options)
    once = SharedReplayBuffer(capacity, OBS, ACTIONS, seed=0, store_next=False, **options)
    for mine in (buffer, once):
        fill(_adder(mine), capacity, NUM_ENVS)
    peers = full_peers(capacity, NUM_ENVS, n_step=3)
    single = full_peers(capacity, 1, n_step=3).get("cpprb")
    if single is not None:
        peers["cpprb, 1 env"] = single
    for size in (256, 4096):
        cases = {
            "out": repeat(partial(buffer.sample, size, buffer.new_batch(size))),
            "fresh": repeat(partial(buffer.sample, size)),
            "stored once, out": repeat(partial(once.sample, size, once.new_batch(size))),
            "stored once, fresh": repeat(partial(once.sample, size)),
        }
        for name, peer in peers.items():
            cases[name] = repeat(partial(peer.sample, size))
        report(f"3 steps, sample {size}", cases, "fresh", repetitions)


def time_priorities(capacity: int, repetitions: int) -> None:
    buffer = filled(capacity, PrioritizedReplayBuffer, alpha=ALPHA, beta=BETA)
    peers = full_peers(capacity, NUM_ENVS, prioritized=True)
    rng = np.random.default_rng(0)
    priorities = itertools.cycle(list(rng.random((997, 256)) + 0.1))
    batches: dict[str, Callable[[], Any]] = {"ours": partial(buffer.sample, 256)}
    updates: dict[str, Update] = {"ours": lambda b, p: buffer.update_priorities(b.indices, p)}
    for name, peer in peers.items():
        batches[name], updates[name] = partial(peer.sample, 256), peer.update
    for name, draw in batches.items():  # priorities as they are in the middle of training
        for _ in range(500):
            updates[name](draw(), next(priorities))
    columns = make_columns(NUM_ENVS)
    cases = {"ours": repeat(partial(buffer.add, **columns))}
    for name, peer in peers.items():
        cases[name] = repeat(partial(peer.add, columns))
    report("prioritized, add 2048", cases, "ours", repetitions)
    cases = {name: repeat(draw) for name, draw in batches.items()}
    cases["ours, out"] = repeat(partial(buffer.sample, 256, buffer.new_batch(256)))
    report("prioritized, sample 256", cases, "ours", repetitions)
    fresh, same, fixed = {}, {}, next(priorities)
    for name, update in updates.items():
        drawn = [batches[name]() for _ in range(50)]
        fresh[name] = repeat(update_new(update, drawn, priorities))
        same[name] = repeat(partial(update, drawn[0], fixed))
    report("prioritized, update 256, new", fresh, "ours", repetitions)
    report("prioritized, update 256, same", same, "ours", repetitions)


def update_new(update: Update, drawn: list[Any], priorities: Iterator[np.ndarray]) -> Any:
    batches = itertools.cycle(drawn)
    return lambda: update(next(batches), next(priorities))


def time_files(rows: int, repetitions: int) -> None:
    """Save and load against copying the file to a new one that replaces the last.

    "synced" waits for the disk, as save does. Each copy is a new file, like each save: to write
    over a file takes other pages and blocks of the system than to write another.
    """
    buffer = filled(rows)
    with tempfile.TemporaryDirectory() as folder:
        path, other, aside = (Path(folder, name) for name in ("buffer", "copy", "aside"))
        buffer.save(path)

        def copy(is_synced: bool) -> None:
            shutil.copyfile(path, aside)
            if is_synced:
                with open(aside, "rb") as target:
                    os.fsync(target.fileno())
            os.replace(aside, other)

        cases = {
            "copy": (partial(copy, False), 1),
            "copy, synced": (partial(copy, True), 1),
            "save": (partial(buffer.save, path), 1),
            "load": (partial(buffer.load, path), 1),
        }
        report(f"file of {rows} rows", cases, "copy, synced", min(repetitions, 5))


def installed_peers() -> str:
    """Names and versions of what is compared with."""
    found = []
    for name in PEERS:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found) or "no other libraries are installed"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time replay buffers.")
    sections = {
        "add": time_add,
        "sample": time_sample,
        "sample-twice": lambda capacity, repetitions: time_sample(2 * capacity, repetitions),
        "layouts": time_layouts,
        "columns": time_columns,
        "windows": time_windows,
        "prioritized": time_priorities,
        "files": lambda _, repetitions: time_files(options.file_rows, repetitions),
    }
    parser.add_argument("--capacity", type=int, default=500_000, help="transitions held")
    parser.add_argument("--file-rows", type=int, default=5_000_000, help="transitions saved")
    parser.add_argument("--repetitions", type=int, default=11, help="rounds, after one to warm up")
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("numpy", "numba", "torch"), installed_peers(), sep="\n")
    print(f"{options.capacity} transitions; medians over {options.repetitions} alternating rounds")
    for name in options.only:
        sections[name](options.capacity, options.repetitions)


if __name__ == "__main__":
    main()
