"""How free memory is found, and what is said when there is too little."""

import subprocess
import sys

import pytest
import torch

from buffers.core import memory as free_memory

CPU = torch.device("cpu")
MEMINFO = "MemTotal: 900 kB\nMemFree: 100 kB\nMemAvailable: 500 kB\n"


@pytest.mark.parametrize(("limit", "free"), [("900", 350), ("max", 500 * 1024)])
def test_the_limit_of_the_group_of_a_container_counts(limit, free, tmp_path, monkeypatch):
    monkeypatch.setattr(free_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "_GROUP", tmp_path)
    for name, text in {
        "meminfo": MEMINFO, "memory.max": f"{limit}\n", "memory.current": "600\n",
        "memory.stat": "anon 1\ninactive_file 50\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    assert free_memory.free_bytes(CPU) == free


LIMITED = """
import resource, sys
import numpy as np, torch
from gymnasium.spaces import Box, Discrete
import buffers

spaces = Box(-1, 1, (1000,)), Discrete(2)  # 400 kB for a hundred steps
rows = 100_000
makers = {
    "shared": lambda n: buffers.SharedReplayBuffer(n, *spaces),
    "stored once": lambda n: buffers.PerEnvReplayBuffer(n, *spaces, num_envs=1, store_next=False),
    "prioritized": lambda n: buffers.PrioritizedReplayBuffer(n, *spaces),
    "staged": lambda n: buffers.SharedReplayBuffer(n, *spaces, staged=True),
    "episodic": lambda n: buffers.EpisodicReplayBuffer(n, *spaces),
    "trajectory": lambda n: buffers.TrajectoryBuffer(n, *spaces),
    "rollout": lambda n: buffers.RolloutBuffer(n, 1, *spaces, autoreset_mode="NextStep"),
}
small = makers["shared"](1000)
pages = list(map(int, open("/proc/self/statm").read().split()))
found = []
for which, count in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (count * resource.getpagesize() + (200 << 20), hard))
    for name, make in makers.items():
        try:
            make(rows)
            found.append((which, name, "made"))
        except buffers.BufferMemoryError as error:
            if "which the system refused" not in str(error):
                found.append((which, name, str(error)))
    make(10)
    try:
        small.new_batch(100_000)
        found.append((which, "a batch", "made"))
    except buffers.BufferMemoryError:
        pass
    resource.setrlimit(which, (hard, hard))
print(found)
"""


@pytest.mark.slow
def test_limits_of_the_process_give_the_error_of_buffers():
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout == "[]\n", ended.stdout + ended.stderr
