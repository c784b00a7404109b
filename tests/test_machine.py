"""How many cores count as usable."""

from vecenv import machine
from vecenv.machine import cgroup_quota, machine_cpu_ns, usable_cores


def test_usable_cores_are_at_least_one():
    assert usable_cores() >= 1


def test_cgroup_quotas(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/jobs/mine\n")
    root = tmp_path / "fs"
    (root / "jobs" / "mine").mkdir(parents=True)
    assert cgroup_quota(root, membership) is None
    (root / "cpu.max").write_text("max 100000\n")
    assert cgroup_quota(root, membership) is None
    (root / "jobs" / "cpu.max").write_text("250000 100000\n")
    assert cgroup_quota(root, membership) == 2.5
    (root / "jobs" / "mine" / "cpu.max").write_text("50000 100000\n")
    assert cgroup_quota(root, membership) == 0.5
    old = tmp_path / "old"
    (old / "cpu").mkdir(parents=True)
    (old / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (old / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_quota(old, tmp_path / "none") == 1.5


def test_a_quota_bounds_the_cores_and_others_load_is_unknown(monkeypatch):
    monkeypatch.setattr(machine, "cgroup_quota", lambda root: 0.5)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: range(64), raising=False)
    assert usable_cores() == 1
    assert machine_cpu_ns() is None
