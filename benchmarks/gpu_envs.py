"""Time of compiled envs on a CUDA device, beside the CPU.

    python benchmarks/gpu_envs.py

Without a CUDA device it says so and measures nothing. Steps are taken with random actions that are
on the device before, eagerly (new results each step), with `out=`, and replayed from a CUDA graph
of one step with `out=`. "host" is the time until the call has returned, "device" the time until
the device is done, both per step; GB/s are those of the state records read and written once, and of
the observations. The CPU's row is the same kernels on all threads. At the end stand the times of
`make_vec` in a process of its own, with nothing compiled before and once more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from measure import machine, markdown_table

import vecenv

ENVS = ("JitCartPole-v1", "Cage2-v0")
SIZES = (256, 4_096, 16_384, 65_536, 262_144, 1_048_576)


def time_calls(call: Callable[[], object], wait: Callable[[], object]) -> tuple[float, float]:
    """Return medians of 9 runs, in seconds per call: until calls return, until all is done."""
    for _ in range(3):
        call()
    wait()
    begin = perf_counter()
    call()
    wait()
    count = max(1, min(1000, int(0.05 / max(perf_counter() - begin, 1e-7))))
    hosts, devices = [], []
    for _ in range(9):
        begin = perf_counter()
        for _ in range(count):
            call()
        hosts.append((perf_counter() - begin) / count)
        wait()
        devices.append((perf_counter() - begin) / count)
    return statistics.median(hosts), statistics.median(devices)


def new_slot(envs: Any) -> vecenv.StepSlot:
    shape = envs.observation_space.shape
    return vecenv.StepSlot(
        envs.allocate(shape, envs.single_observation_space.dtype),
        envs.allocate((envs.num_envs,), np.float32),
        envs.allocate((envs.num_envs,), np.bool_),
        envs.allocate((envs.num_envs,), np.bool_),
    )


def captured(step: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def time_env(env_id: str, num_envs: int, device: str) -> list[list[str]]:
    begin = perf_counter()
    envs: Any = vecenv.make_vec(env_id, num_envs, device=device)
    obs, _ = envs.reset(seed=0)
    made_s = perf_counter() - begin
    is_cuda = isinstance(obs, torch.Tensor)
    rng = np.random.default_rng(0)
    actions: Any = rng.integers(0, int(envs.single_action_space.n), num_envs)
    wait: Callable[[], object] = int
    if is_cuda:
        actions, wait = torch.from_numpy(actions).to(obs.device), torch.cuda.synchronize
    slot = new_slot(envs)
    ways: dict[str, Callable[[], object]] = {
        "eager": partial(envs.step, actions),
        "out=": partial(envs.step, actions, out=slot),
    }
    if is_cuda and obs.device.type == "cuda":
        ways["graph"] = captured(ways["out="])
    row_bytes = 2 * envs.kernels.state_dtype.itemsize + obs[0].nbytes
    rows = []
    for name, call in ways.items():
        host_s, device_s = time_calls(call, wait)
        rows.append([
            env_id, f"{num_envs:,}", str(obs.device) if is_cuda else "CPU", name,
            f"{1e6 * host_s:.4g}", f"{1e6 * device_s:.4g}", f"{num_envs / device_s / 1e6:.4g}",
            f"{num_envs * row_bytes / device_s / 1e9:.4g}", f"{made_s:.3g}",
        ])  # fmt: skip
    envs.close()
    return rows


_MAKE = """
import sys, time
import vecenv

begin = time.perf_counter()
vecenv.make_vec(sys.argv[1], 256, device=sys.argv[2]).reset(seed=0)
print(time.perf_counter() - begin)
"""


def time_compiling(env_id: str, device: str) -> list[str]:
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", _MAKE, env_id, device],
                env={**os.environ, "NUMBA_CACHE_DIR": folder},
                check=True,
                capture_output=True,
                text=True,
            )
            seconds.append(f"{float(done.stdout.split()[-1]):.3g}")
    return [env_id, *seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time compiled envs on a CUDA device.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of envs")
    arguments, _ = parser.parse_known_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing was measured")
        return
    print(machine("numpy", "torch", "numba"))
    rows = []
    for env_id in ENVS:
        for num_envs in arguments.sizes:
            for device in dict.fromkeys((arguments.device, "cpu")):
                rows += time_env(env_id, num_envs, device)
    header = ["env", "envs", "where", "call", "host µs", "device µs", "M steps/s", "GB/s", "made s"]
    print(markdown_table(header, rows))
    if arguments.device != "cpu":
        made = [time_compiling(env_id, arguments.device) for env_id in ENVS]
        print(markdown_table(["env", "first time, s", "again, s"], made))


if __name__ == "__main__":
    main()
