"""Timing of running vector envs: against independent counters, and around faults."""

import json
import math
import threading
import time
from functools import partial
from itertools import pairwise

import numba
import numpy as np
import pytest
from choices import fast_are
from envs import begun
from gymnasium.error import AlreadyPendingCallError
from timing.test_truth import KnownEnv, measured_anew
from workers.faulty_envs import DIE, FINE, faulty

from vecenv import AsyncVectorEnv, SyncVectorEnv, make_vec
from vecenv.timing.trace import trace_events

BACKENDS = {
    "sync": SyncVectorEnv,
    "async": lambda fns: AsyncVectorEnv(fns, num_workers=2),
    "caller": lambda fns: AsyncVectorEnv(fns, num_workers=1, caller_steps=True),
}


def timed(step_s=0.0):
    """An env that measures its own steps with another clock than the stamps do."""
    return KnownEnv((step_s,), length=5)


def run(envs, num_steps):
    rng = np.random.default_rng(0)
    envs.reset(seed=1)
    for _ in range(num_steps):
        with envs.timing.phase("policy"):
            actions = rng.integers(0, 2, envs.num_envs)
        envs.step(actions)


@pytest.mark.parametrize("backend", fast_are(["sync", "async"], BACKENDS))
@measured_anew
def test_shares_add_up_and_agree_with_the_envs_own_counters(backend):
    fns = [lambda k=k: timed(0.001 * (k + 1)) for k in range(4)]
    envs = BACKENDS[backend](fns)
    envs.timing.enable()
    run(envs, 24)
    report = envs.timing.report()
    num_steps = envs.get_attr("count")
    spent_s = [sum(step_s for step_s, _ in each) for each in envs.get_attr("spent_s")]
    envs.close()

    assert math.isclose(sum(report.shares.values()), 1.0, abs_tol=1e-9)
    assert all(share >= -1e-9 for share in report.shares.values())
    assert report.num_steps == sum(num_steps) == 4 * 20  # every sixth step is a reset
    assert report.envs.mean_ns * 1e-9 * report.num_steps == pytest.approx(sum(spent_s), rel=0.05)
    means = dict(zip((f"env {k}" for k in range(4)), np.divide(spent_s, num_steps), strict=True))
    ranked = [means[times.name] for times in report.slowest]
    assert len(ranked) == 4 and all(b <= 1.05 * a for a, b in pairwise(ranked))
    assert all(times.max_ns >= times.mean_ns >= 1e6 for times in report.slowest)
    names = {
        "sync": ["caller"],
        "async": ["worker 0", "worker 1"],
        "caller": ["caller", "worker 0"],
    }
    assert list(report.busy) == names[backend]
    assert all(0 < busy <= 1 for busy in report.busy.values())
    if backend != "sync":
        assert report.shares["straggler wait"] > 0  # envs 2 and 3 take 7 ms, 0 and 1 take 3


@measured_anew
def test_first_ready_waits_for_nobody():
    fns = [lambda k=k: timed(0.01 if k == 0 else 0.001) for k in range(4)]
    envs = begun(AsyncVectorEnv(fns, num_workers=4), seed=1)
    envs.send(np.zeros(4, int))
    envs.recv(4)  # compiles, the first time
    envs.timing.enable()
    envs.send(np.zeros(4, int))
    for _ in range(40):
        batch = envs.recv(1)
        envs.send(np.zeros(len(batch.env_ids), int), batch.env_ids)
    envs.recv()
    report = envs.timing.report()
    envs.close()
    assert report.first_ready
    assert math.isclose(sum(report.shares.values()), 1.0, abs_tol=1e-9)
    assert report.shares["env compute"] > report.shares["straggler wait"]


def in_thread(name, function, *args):
    thread = threading.Thread(target=function, args=args, name=name)
    thread.start()
    thread.join()


@measured_anew
def test_an_env_that_another_thread_goes_on_with_is_timed_there(tmp_path):
    envs = SyncVectorEnv([partial(timed, 0.003)])

    def begin():
        envs.timing.enable()
        envs.reset()
        with envs.timing.phase("first"):
            envs.step([0])

    def go_on():
        for _ in range(20):
            with envs.timing.phase("second"):
                time.sleep(0.001)
            envs.step([0])

    in_thread("old", begin)
    in_thread("new", go_on)  # it may have the ident of the first
    report = envs.timing.report()
    envs.timing.write_trace(tmp_path / "trace.json")
    assert report.num_steps == 18 and report.resets.num_steps == 4
    assert math.isclose(sum(report.shares.values()), 1.0, abs_tol=1e-9)
    # The first phase of a thread that has not called the envs yet is another thread's.
    spent_s = (report.shares["second"] + report.other_threads["second"]) * report.wall_s
    assert spent_s >= 0.02 and {"first", "second"} <= set(report.shares | report.other_threads)
    assert report.other_threads["second"] < 0.2 * report.shares["second"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert [names.count(name) for name in ("step", "first", "second")] == [21, 1, 19]


def test_disabled_timing_records_nothing_more():
    envs = SyncVectorEnv([timed] * 2)
    with pytest.raises(RuntimeError, match=r"call envs.timing.enable\(\) before"):
        envs.timing.report()
    envs.timing.enable()
    run(envs, 4)
    envs.timing.disable()
    count = envs.timing.report().num_steps
    run(envs, 4)
    assert envs.timing.report().num_steps == count == 8
    envs.timing.clear()
    with pytest.raises(RuntimeError, match="nothing has been recorded"):
        envs.timing.report()


def test_timing_is_not_switched_while_envs_are_in_flight():
    envs = begun(AsyncVectorEnv([timed] * 2, num_workers=1), seed=1)
    envs.send([0, 1])
    with pytest.raises(AlreadyPendingCallError):
        envs.timing.enable()
    envs.recv()
    envs.timing.enable()
    envs.step_async([0, 1])
    with pytest.raises(AlreadyPendingCallError):
        envs.timing.disable()
    envs.step_wait()
    assert envs.timing.report().num_steps == 2
    envs.close()
    assert envs.timing.report().num_steps == 2  # what was recorded stays
    envs.timing.disable()


def test_a_worker_in_the_place_of_one_that_has_died_is_timed():
    envs = AsyncVectorEnv(faulty(2), num_workers=1, on_error="restart")
    envs.timing.enable()
    envs.reset(seed=1)
    envs.step([DIE, FINE])
    before = envs.timing.report().num_steps
    for _ in range(3):
        envs.step([FINE, FINE])
    assert envs.timing.report().num_steps - before == 4  # the first ones were resets
    envs.close()


CATEGORIES = {"call", "wait", "copy", "phase", "env", "reset"}


def test_the_trace_follows_the_format(tmp_path):
    fns = [lambda k=k: timed(0.002 * (k + 1)) for k in range(4)]
    envs = AsyncVectorEnv(fns, num_workers=4)
    envs.timing.enable()
    run(envs, 8)
    envs.timing.write_trace(tmp_path / "trace.json")
    envs.close()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert all({"name", "cat", "ts", "dur", "pid", "tid"} <= event.keys() for event in slices)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)
    assert {event["cat"] for event in slices} == CATEGORIES
    assert {e["pid"] for e in slices} == {0, 1, 2, 3, 4}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[0] == "caller" and names[2].startswith("worker 1 (pid ")
    assert sum(event["cat"] == "env" for event in slices) == envs.timing.report().num_steps
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks[0, 0] == "calls and phases"
    assert sorted(tracks.values())[1:] == ["env 0", "env 1", "env 2", "env 3"]
    assert {(e["pid"], e["tid"]) for e in slices} == set(tracks)
    for event in slices:
        if event["cat"] in {"env", "reset"}:
            assert tracks[event["pid"], event["tid"]] == f"env {event['args']['env_id']}"
    check_nesting(slices)


def check_nesting(slices):
    """Slices of one track are one after the other or one inside the other."""
    for track in {(e["pid"], e["tid"]) for e in slices}:
        ends = [math.inf]
        mine = [e for e in slices if (e["pid"], e["tid"]) == track]
        for event in sorted(mine, key=lambda e: (e["ts"], -e["dur"])):
            while event["ts"] >= ends[-1] - 1e-3:  # they are floats, to the nanosecond
                ends.pop()
            end = event["ts"] + event["dur"]
            assert end <= ends[-1] + 1e-3
            ends.append(end)


def test_a_long_trace_is_cut_to_the_latest_steps(monkeypatch):
    envs = SyncVectorEnv([timed] * 2)
    envs.timing.enable()
    run(envs, 30)
    monkeypatch.setattr("vecenv.timing.trace.MOST_STEPS", 10)
    events = list(trace_events(envs.timing.recording()))
    assert sum(event.get("cat") in {"env", "reset"} for event in events) == 10


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="the kernel is Python")
@measured_anew
def test_compiled_envs_are_stamped_around_their_kernel(tmp_path):
    envs = make_vec("JitCartPole-v1", num_envs=1)
    envs.timing.enable()
    run(envs, 200)
    report = envs.timing.report()
    assert report.num_steps == 200 and report.busy == {}
    assert math.isclose(sum(report.shares.values()), 1.0, abs_tol=1e-9)
    assert report.shares["env compute"] < 0.1  # 0.02 of 5.7 us
    assert report.resets is None and "resets inside steps take is unknown" in str(report)
    assert "backend=" not in report.verdict
    envs.timing.write_trace(tmp_path / "trace.json")
    assert '"cat":"kernel"' in (tmp_path / "trace.json").read_text()
    envs.timing.disable()
    run(envs, 3)


def test_a_report_is_written_as_json_and_table(tmp_path):
    envs = SyncVectorEnv([timed] * 2)
    envs.timing.enable()
    run(envs, 5)
    report = envs.timing.report()
    numbers = json.loads(report.to_json(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text()) == numbers
    assert numbers["num_steps"] == report.num_steps == 10
    assert numbers["verdict"] == report.verdict
    assert numbers["envs"]["mean_ns"] == report.envs.mean_ns and "mean" not in numbers["envs"]
    assert numbers["units"]["shares"] == "share of wall_s"
    assert "durations_ns" not in numbers
    text = str(report)
    assert "where the time goes" in text and report.verdict[:30] in text
    with pytest.raises(OSError, match="no-such-folder"):
        report.to_json(tmp_path / "no-such-folder" / "report.json")


def test_a_report_fits_80_columns_whatever_users_name_their_phases():
    envs = SyncVectorEnv([timed] * 2)
    envs.timing.enable()
    run(envs, 5)
    for name in ("[red]:x:[/red]", "a phase with a name that takes most of the line " * 2):
        with envs.timing.phase(name):
            envs.step([0, 0])
    text = str(envs.timing.report())
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "│ [red]:x:[/red] " in text
    table = lines[: next(k for k, line in enumerate(lines) if line.startswith("└"))]
    # A border, the header, a border, then one line for each share.
    shares = [line.split("│")[1].strip() for line in table if line.startswith("│")]
    assert len(shares) == 9 and all(shares)
