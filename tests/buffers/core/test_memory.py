"""How free memory is found, and what is said when there is too little."""

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
