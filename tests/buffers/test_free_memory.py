"""How free memory is found, and what is said when there is too little."""

import pytest
import torch

from buffers import BufferMemoryError, free_memory

CPU = torch.device("cpu")
MEMINFO = "MemTotal: 900 kB\nMemFree: 100 kB\nMemAvailable: 500 kB\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 500 KiB free, and a function that puts it into a control group."""
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    meminfo.write_text(MEMINFO)
    group.mkdir()
    monkeypatch.setattr(free_memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(free_memory, "_GROUPS", ((group, "max", "current", "inactive_file"),))

    def enter_group(limit, current, statistics="anon 1\ninactive_file 50\n"):
        (group / "max").write_text(f"{limit}\n")
        (group / "current").write_text(f"{current}\n")
        (group / "memory.stat").write_text(statistics)

    return enter_group


def test_available_memory_counts(machine):
    assert free_memory.free_bytes(CPU) == 500 * 1024


@pytest.mark.parametrize(
    ("limit", "current", "expected"),
    [
        (1000, 400, 650),  # page cache of 50 can be dropped
        (1000, 2000, 0),
        ("max", 400, 500 * 1024),
        (10**9, 400, 500 * 1024),
    ],
)
def test_limit_of_the_control_group_counts(machine, limit, current, expected):
    machine(limit, current)
    assert free_memory.free_bytes(CPU) == expected


def test_group_without_cache_statistics(machine):
    machine(1000, 400, "anon 1\n")
    assert free_memory.free_bytes(CPU) == 600


def test_a_system_that_does_not_tell_refuses_nothing(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(free_memory, "_MEMINFO", tmp_path / "missing")
    assert free_memory.free_bytes(CPU) is None
    free_memory.check_fits("this", 2**60, CPU, "wait")
    (tmp_path / "missing").write_text("MemTotal: 1 kB\n")
    assert free_memory.free_bytes(CPU) is None
    assert free_memory.free_bytes(torch.device("meta")) is None


def test_refusal_names_both_numbers(machine):
    free_memory.check_fits("this", 500 * 1024, CPU, "wait")
    with pytest.raises(
        BufferMemoryError, match=r"^this needs 600.0 KiB on cpu, but only 500.0 KiB"
    ):
        free_memory.check_fits("this", 600 * 1024, CPU, "wait")


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (3 * 2**20, "3.0 MiB"), (5 * 2**40, "5.0 TiB")],
)
def test_format_bytes(number, expected):
    assert free_memory.format_bytes(number) == expected
