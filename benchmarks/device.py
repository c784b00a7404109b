"""Time of all buffers on a CUDA device.

    python benchmarks/device.py

Without a CUDA device it says so and measures nothing. `--device cpu` runs the same code on the
CPU, which shows that it works and no more.

"small" rows are 52 float32 obs and next obs, an int64 action, a float32 reward and two flags, in
buffers of `--capacity` transitions that are full; "image" rows have 84 x 84 x 4 bytes twice, a
hundredth as many. "host" is the time until calls have returned, "device" until the device is done,
both per call, in runs of many calls with one wait at the end. "launches" are kernels and copies
of a call as the profiler counts them (on the CPU: operations of torch), "waits" those for the
device as `torch.cuda.set_sync_debug_mode` warns of them. "MB" are the bytes of a call's result, or
of what is added, and GB/s the same over the device's time: read and written once each they cost
twice that.

"out=" overwrites a batch, "graph" replays a captured `sample(out=)`, "ten in a graph" ten of them,
per draw: replaying a graph that draws random numbers costs the host 20 to 35 µs, which is more
than what the device has to do. "draw and update" is a captured draw by priority with the
`update_priorities` of what was drawn. Beside the draws stand a bare
`index_select` of as many packed rows, a buffer on the CPU whose batches are copied over, and
TorchRL's buffer on the device where it is installed. Adds are of arrays of the host; those of
"tensors" are on the device already. "busy" adds are those behind a queue of matrix products of a
learner, whose time counts for the device and not for the host. GAE and the PPO update (128 steps of
2048 envs, four times 16 minibatches) take what the environment wrote into host pages and leave
everything on the device.

At the end `vecenv train` trains by PPO and SAC on the device for a little while and tell
their time by phase, with and without CUDA graphs (`--no-training` leaves that out): what a graph
does is in the phase in which the host waits for it, that of the learner.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from measure import machine, markdown_table
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from buffers import (
    EpisodicReplayBuffer,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    RolloutBuffer,
    SharedReplayBuffer,
    gae,
)

OBS, ACTIONS = Box(-np.inf, np.inf, (52,), np.float32), Discrete(7)
IMAGES = Box(0, 255, (4, 84, 84), np.uint8)
NUM_ENVS, NUM_STEPS = 2048, 128
SIZES = 256, 4_096, 65_536  # of batches
TEN = 10  # draws in one graph


class Timer:
    """Times calls on a device; keeps a row for each."""

    def __init__(self, device: torch.device, repetitions: int, seconds: float):
        self.device, self._repetitions, self._seconds = device, repetitions, seconds
        self.rows: list[list[str]] = []

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure(
        self, name: str, call: Callable[[], object], num_bytes: int = 0, parts: int = 1
    ) -> None:
        """Time a call that does `parts` times what is of interest, and is counted so often."""
        for _ in range(3):
            call()
        count = max(1, min(10_000, int(self._seconds / max(self._run(call, 3)[1], 1e-7))))
        times = [self._run(call, count) for _ in range(self._repetitions)]
        columns = zip(*times, strict=True)
        host, device = (sorted(1e6 / parts * one for one in column) for column in columns)
        median = statistics.median(device)
        launches, waits = self._counts(call)
        rate = f"{num_bytes / median / 1e3:.4g}" if num_bytes else ""
        self.rows.append([
            name, f"{statistics.median(host):.4g}", f"{median:.4g}",
            f"{device[0]:.4g} to {device[-1]:.4g}", f"{launches / parts:.4g}",
            f"{waits / parts:.4g}",
            f"{num_bytes / 1e6:.4g}" if num_bytes else "", rate,
        ])  # fmt: skip
        print("  ".join(self.rows[-1]), flush=True)

    def _run(self, call: Callable[[], object], count: int) -> tuple[float, float]:
        """Seconds per call until calls have returned, and until the device is done."""
        self.wait()
        begin = perf_counter()
        for _ in range(count):
            call()
        host = perf_counter() - begin
        self.wait()
        return host / count, (perf_counter() - begin) / count

    def _counts(self, call: Callable[[], object]) -> tuple[int, int]:
        """Kernels and copies that a call enqueues, and how often it waits for the device."""
        if self.device.type != "cuda":
            with CountOperations() as operations:
                call()
            return operations.number, 0
        self.wait()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            self.wait()
        launches = sum(event.device_type.name == "CUDA" for event in seen.events() or ())
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return launches, sum("synchroniz" in str(one.message) for one in found)


class CountOperations(TorchDispatchMode):
    """Counts operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def make_columns(count: int, space: Any = OBS) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    obs, next_obs = (
        rng.standard_normal((count, *space.shape), np.float32)
        if space.dtype == np.float32
        else rng.integers(0, 255, (count, *space.shape), np.uint8)
        for _ in range(2)
    )
    return {
        "obs": obs,
        "next_obs": next_obs,
        "actions": rng.integers(0, 7, count),
        "rewards": rng.standard_normal(count, np.float32),
        "terminations": rng.random(count) < 0.01,
        "truncations": rng.random(count) < 0.01,
    }


def filled(buffer: Any, capacity: int, space: Any = OBS, rows: int = NUM_ENVS) -> Any:
    columns = make_columns(rows, space)
    for _ in range(-(-capacity // rows)):
        buffer.add(**columns)
    return buffer


def bytes_of(columns: dict[str, Any]) -> int:
    return sum(column.nbytes for column in columns.values())


def time_replay(timer: Timer, capacity: int, options: dict[str, Any]) -> None:
    columns = make_columns(NUM_ENVS)
    long = {"num_envs": NUM_ENVS, "n_step": 3, "gamma": 0.99}
    buffers = {
        "shared": SharedReplayBuffer(capacity, OBS, ACTIONS, **options),
        "per env": PerEnvReplayBuffer(
            capacity // NUM_ENVS, OBS, ACTIONS, num_envs=NUM_ENVS, **options
        ),
        "3 steps": SharedReplayBuffer(capacity, OBS, ACTIONS, **long, **options),
        "stored once": SharedReplayBuffer(
            capacity, OBS, ACTIONS, store_next=False, **long, **options
        ),
        "prioritized": PrioritizedReplayBuffer(capacity, OBS, ACTIONS, **options),
    }
    size = bytes_of(columns)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=timer.device.type == "cuda")
    target = torch.zeros_like(host, device=timer.device)
    timer.measure("copy of 2048 rows", lambda: target.copy_(host, non_blocking=True), size)
    weights = torch.zeros(4096, 4096, device=timer.device)

    def add_behind_a_learner() -> None:
        for _ in range(4):
            weights.mm(weights)
        buffers["shared"].add(**columns)

    for name, buffer in buffers.items():
        filled(buffer, capacity)
        timer.measure(f"{name}: add 2048", partial(buffer.add, **columns), size)
        time_draws(timer, name, buffer, size // NUM_ENVS)
    if timer.device.type == "cuda":
        timer.measure("shared: add 2048, busy", add_behind_a_learner, size)
    per: Any = buffers["prioritized"]
    for batch_size in SIZES[:2]:
        indices = per.sample(batch_size).indices
        errors = torch.rand(batch_size, device=timer.device) + 0.1
        timer.measure(
            f"prioritized: update {batch_size}", partial(per.update_priorities, indices, errors)
        )
        if timer.device.type == "cuda":
            out = per.new_batch(batch_size)

            def draw_and_update(out: Any = out, errors: torch.Tensor = errors) -> None:
                per.sample(len(errors), out)
                per.update_priorities(out.indices, errors)

            replay = captured(per, draw_and_update)
            timer.measure(f"prioritized: draw and update {batch_size}, graph", replay)
    tensors = {name: torch.from_numpy(column).to(timer.device) for name, column in columns.items()}
    for name, buffer in buffers.items():
        time_tensor_adds(timer, name, buffer, tensors, size)
    time_others(timer, capacity, OBS, "small")


def time_tensor_adds(
    timer: Timer, name: str, buffer: Any, tensors: dict[str, torch.Tensor], size: int
) -> None:
    """Time adds of what is on the device; last, as the host no longer knows of captured ones."""
    buffer.reserve_final_obs(buffer.capacity + NUM_ENVS)  # nothing, if they are not kept apart
    add = partial(buffer.add, **tensors)
    timer.measure(f"{name}: add 2048 tensors", add, size)
    if timer.device.type == "cuda":
        timer.measure(f"{name}: add 2048 tensors, graph", captured(buffer, add), size)


def time_large_adds(timer: Timer, options: dict[str, Any]) -> None:
    """Time adds of 64 MB on the device, beside a copy of as many bytes."""
    count = 150_000
    buffer = SharedReplayBuffer(2 * count, OBS, ACTIONS, **options)
    columns = make_columns(count)
    tensors = {name: torch.from_numpy(column).to(timer.device) for name, column in columns.items()}
    size = bytes_of(columns)
    add = partial(buffer.add, **tensors)
    timer.measure(f"shared: add {count} tensors", add, size)
    if timer.device.type == "cuda":
        timer.measure(f"shared: add {count} tensors, graph", captured(buffer, add), size)
    source = torch.zeros(size, dtype=torch.uint8, device=timer.device)
    target = torch.zeros_like(source)
    timer.measure("copy of as many bytes on the device", lambda: target.copy_(source), size)


def time_images(timer: Timer, capacity: int, options: dict[str, Any]) -> None:
    number, rows = max(capacity // 100, 512), 256
    images = filled(SharedReplayBuffer(number, IMAGES, ACTIONS, **options), number, IMAGES, rows)
    columns = make_columns(rows, IMAGES)
    size = bytes_of(columns)
    timer.measure(f"images: add {rows}", partial(images.add, **columns), size)
    time_draws(timer, "images", images, size // rows, SIZES[:2])
    time_others(timer, number, IMAGES, "images", SIZES[:2])


def time_draws(
    timer: Timer, name: str, buffer: Any, row_bytes: int, sizes: tuple[int, ...] = SIZES
) -> None:
    for size in sizes:
        out = buffer.new_batch(size)
        timer.measure(f"{name}: sample {size}", partial(buffer.sample, size), size * row_bytes)
        in_place = partial(buffer.sample, size, out)
        timer.measure(f"{name}: sample {size}, out=", in_place, size * row_bytes)
        if timer.device.type == "cuda":
            replay = captured(buffer, in_place)
            timer.measure(f"{name}: sample {size}, graph", replay, size * row_bytes)
            replay = captured(buffer, in_place, TEN)
            timer.measure(f"{name}: sample {size}, ten in a graph", replay, size * row_bytes, TEN)


def time_others(
    timer: Timer, capacity: int, space: Any, name: str, sizes: tuple[int, ...] = SIZES
) -> None:
    """Time what else there is to draw rows with."""
    row_bytes = bytes_of(make_columns(1, space))
    width = -(-row_bytes // 64) * 8
    table = torch.zeros((capacity, width), dtype=torch.int64, device=timer.device)
    on_cpu = filled(SharedReplayBuffer(capacity, space, ACTIONS, seed=0), capacity, space, 256)
    columns = ("obs", "next_obs", "actions", "rewards", "terminations")

    def draw_and_copy(size: int) -> None:
        batch = on_cpu.sample(size)
        for column in columns:
            getattr(batch, column).to(timer.device)

    for size in sizes:
        out = torch.zeros((size, width), dtype=torch.int64, device=timer.device)
        rows = torch.randint(capacity, (size,), device=timer.device)
        call = partial(torch.index_select, table, 0, rows, out=out)
        timer.measure(f"{name}: index_select {size}", call, size * 8 * width)
        timer.measure(
            f"{name}: CPU and copy {size}", partial(draw_and_copy, size), size * row_bytes
        )
    del table
    try:
        data, tensordict = import_module("torchrl.data"), import_module("tensordict")
    except ImportError:
        return
    storage: Any = data.LazyTensorStorage(capacity, device=timer.device)
    theirs: Any = data.TensorDictReplayBuffer(storage=storage)
    found = {k: torch.from_numpy(np.array(v)) for k, v in make_columns(256, space).items()}
    rows = tensordict.TensorDict(found, batch_size=[256]).to(timer.device)
    for _ in range(-(-capacity // 256)):
        theirs.extend(rows)
    for size in sizes:
        call = partial(theirs.sample, size)
        timer.measure(f"{name}: TorchRL, sample {size}", call, size * row_bytes)


def captured(buffer: Any, call: Callable[[], object], times: int = 1) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(buffer.generator)
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph.replay


def time_episodes(timer: Timer, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    buffer = EpisodicReplayBuffer(200_000, OBS, ACTIONS, max_episodes=1000, **options)
    for _ in range(1000):
        boundaries = np.zeros(200, np.bool_)
        boundaries[rng.choice(200, 5, replace=False)] = True
        buffer.add_episode({
            "obs": rng.standard_normal((201, 52), np.float32),
            "actions": rng.integers(0, 7, 200),
            "rewards": rng.standard_normal(200, np.float32),
            "boundaries": boundaries,
        })  # fmt: skip
    for size in SIZES:
        timer.measure(f"episodic: pairs {size}", partial(buffer.sample, size, 0.95))


def time_advantages(timer: Timer, num_envs: int) -> None:
    rng = np.random.default_rng(0)
    shape = NUM_STEPS, num_envs
    rewards = torch.from_numpy(rng.standard_normal(shape, np.float32)).to(timer.device)
    values = torch.from_numpy(rng.standard_normal((NUM_STEPS + 1, num_envs), np.float32))
    flags = torch.from_numpy(rng.random((2, *shape)) < 0.01).to(timer.device)
    inputs = rewards, values.to(timer.device), flags[0], flags[1]
    finals = torch.zeros_like(rewards)
    options: Any = {"final_values": finals, "gamma": 0.99, "gae_lambda": 0.95}
    size = sum(tensor.nbytes for tensor in (*inputs, finals, rewards, rewards))

    compute = partial(gae, *inputs, **options)
    timer.measure(f"gae 128 x {num_envs}", compute, size)
    if timer.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compute()
        timer.measure(f"gae 128 x {num_envs}, graph", graph.replay, size)
    source = torch.zeros(size // 2, dtype=torch.uint8, device=timer.device)
    target = torch.zeros_like(source)
    timer.measure(
        f"copy of as many bytes as gae 128 x {num_envs}", lambda: target.copy_(source), size
    )


def time_rollout(timer: Timer, options: dict[str, Any]) -> None:
    rollout = RolloutBuffer(
        NUM_STEPS, NUM_ENVS, OBS, ACTIONS, autoreset_mode="NextStep", **options
    )  # fmt: skip
    columns = make_columns(NUM_ENVS)
    actions = torch.from_numpy(columns["actions"]).to(timer.device)
    floats = torch.zeros(NUM_ENVS, device=timer.device)
    rollout.start(columns["obs"])

    def collect() -> None:
        for t in range(NUM_STEPS):
            rollout.obs_at(t)
            rollout.put(t, actions=actions, log_probs=floats, values=floats)
            slot = rollout.slot(t)
            slot.obs[:] = columns["next_obs"]
            slot.rewards[:] = columns["rewards"]
            slot.terminations[:] = columns["terminations"]
            slot.truncations[:] = columns["truncations"]

    def update() -> None:
        collect()
        rollout.compute_advantages(floats)
        for _ in range(4):
            for _ in rollout.minibatches(16):
                pass
        rollout.advance()

    timer.measure("PPO update", update)


def time_training(device: torch.device) -> None:
    """Print where the time of trainings goes."""
    given = ["--device", str(device), "--profile", "--eval-episodes", "2"]
    ppo = ["Cage2-v0", "--algo", "ppo", "--num-envs", "16384", "--num-steps", "64"]
    ppo += ["--total-steps", "30000000"]
    sac = ["JitPendulum-v1", "--algo", "sac", "--num-envs", "64", "--update-ratio", "0.1"]
    sac += ["--total-steps", "60000"]
    for options, graphs in itertools.product((ppo, sac), ("--graphs", "--no-graphs")):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "vecenv",
                "train",
                *options,
                *given,
                graphs,
            ]
            print(f"\n{' '.join(command[1:])}", flush=True)
            subprocess.run([*command, "--save", f"{folder}/run"], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the buffers on a CUDA device.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--capacity", type=int, default=1_000_000, help="transitions held")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.05, help="time of one repetition")
    parser.add_argument("--no-training", action="store_true", help="leave the examples out")
    arguments, _ = parser.parse_known_args()  # those of gpu_envs.py
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing was measured")
        return
    if device.type == "cpu":
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU, code path only"
    print(name, machine("numpy", "torch"), sep="\n")
    timer = Timer(device, arguments.repetitions, arguments.seconds)
    options = {"device": device, "seed": 0, "staged": True}
    time_replay(timer, arguments.capacity, options)
    time_large_adds(timer, options)
    time_images(timer, arguments.capacity, options)
    time_episodes(timer, options)
    for num_envs in (256, NUM_ENVS, 16_384):
        time_advantages(timer, num_envs)
    time_rollout(timer, {"device": device, "seed": 0})
    print(f"\n{arguments.capacity} transitions; median of {arguments.repetitions} runs\n")
    header = ["call", "host µs", "device µs", "spread", "launches", "waits", "MB", "GB/s"]
    print(markdown_table(header, timer.rows))
    if device.type == "cuda" and not arguments.no_training:
        time_training(device)


if __name__ == "__main__":
    main()
