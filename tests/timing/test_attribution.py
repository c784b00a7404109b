"""Recordings made by hand, whose shares are known."""

import numpy as np
import pytest

from vecenv.timing.attribution import shares_ns
from vecenv.timing.calls import RECV, SEND, STEP, CallLog, Calls
from vecenv.timing.control import Recording, WorkerProcess
from vecenv.timing.report import make_report
from vecenv.timing.stamps import Stamps

PROCESSES = [WorkerProcess(2**30, 0.1), WorkerProcess(2**30 + 1, 0.2)]  # of which there are none
POLICY = 4


def calls(*rows):
    """Rows of kind, begin, end, wait_begin, wait_end, nested."""
    columns = np.array([(*row, 0, 0) for row in rows], dtype=np.int64).reshape(-1, 8).T
    return Calls(*columns)


def steps(*rows):
    """Rows of env, begin, end, thread."""
    rows = sorted(rows, key=lambda row: row[1])
    env_ids, begin_ns, end_ns, threads = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Stamps(env_ids, begin_ns, end_ns, threads, np.zeros(len(rows), bool))


def recording(calls, stamps, *, processes=PROCESSES, end_ns=1000):
    names = ["step", "send", "recv", "reset", "policy"]
    bounds = [0, 2, 4] if len(processes) == 2 else [0, 4]
    return Recording("Envs", 0, end_ns, names, calls, stamps, bounds, processes, 4)


def test_a_barrier_step_is_cut_into_work_stragglers_hand_over_and_copying():
    envs = steps((0, 130, 230, 7), (1, 230, 330, 7), (2, 140, 240, 8), (3, 250, 650, 8))
    shares = shares_ns(recording(calls((STEP, 100, 900, 120, 800, 0)), envs))
    # Thread 7 worked for 200, thread 8 for 500, while the caller waited from 120 to 800.
    assert shares["env compute"] == 350
    assert shares["straggler wait"] == 150
    assert shares["hand-over"] == 20 + 680 - 500
    assert shares["copying"] == 100
    assert shares["other"] == 200
    assert sum(shares.values()) == 1000


def test_a_thread_without_work_is_not_waited_for():
    envs = steps((0, 100, 200, 7), (1, 2000, 2100, 9))
    shares = shares_ns(recording(calls((STEP, 100, 200, 100, 200, 0)), envs))
    assert (shares["env compute"], shares["straggler wait"]) == (100, 0)


def test_first_ready_has_no_stragglers():
    envs = steps((0, 0, 100, 7), (2, 0, 900, 8))
    log = calls((SEND, 0, 10, 0, 0, 0), (RECV, 10, 210, 10, 200, 0))
    shares = shares_ns(recording(log, envs))
    assert shares["env compute"] == 190
    assert shares["straggler wait"] == 0
    assert shares["hand-over"] == 10
    assert shares["copying"] == 10


def test_phases_count_without_what_is_inside_them():
    log = calls((STEP, 200, 500, 200, 500, 0), (POLICY, 100, 600, 0, 0, 300))
    shares = shares_ns(recording(log, steps((0, 200, 500, 7))))
    assert shares["policy"] == 200
    assert shares["env compute"] == 300
    assert shares["other"] == 500


def test_in_one_process_all_but_the_envs_is_copying():
    envs = steps((0, 110, 200, 7), (1, 210, 300, 7))
    shares = shares_ns(recording(calls((STEP, 100, 400, 0, 0, 0)), envs, processes=[None]))
    assert (shares["env compute"], shares["copying"], shares["other"]) == (180, 120, 700)


def test_compiled_envs_are_all_compute():
    log = calls((STEP, 100, 400, 0, 0, 0))
    report = make_report(recording(log, None, processes=[None]))
    assert report.shares["env compute"] == 0.3
    assert report.envs is None and report.workers == []
    assert "compiled kernel" in str(report) or "other" in report.verdict


def test_steps_that_have_not_ended_and_resets_are_not_counted():
    envs = steps((0, 100, 200, 7), (1, 200, 0, 7), (1, 300, 400, 7))
    envs = envs._replace(is_reset=np.array([False, False, True]))
    report = make_report(recording(calls((STEP, 100, 400, 100, 400, 0)), envs))
    assert report.num_steps == 1 and report.envs.num_steps == 1
    assert report.workers[0].busy == 0.2 and report.workers[0].memory_bytes is None


@pytest.mark.parametrize(
    ("last_env", "advice"),
    [
        ((3, 1, 1000, 9), "the envs themselves"),
        ((3, 990, 1000, 9), "use first-ready (send/recv) with batches of 1"),
        (None, "use backend='sync'"),
    ],
)
def test_the_verdict_names_the_largest_share(last_env, advice):
    short = [(env, 990, 1000, env) for env in range(3)]
    envs = short if last_env is None else [*short[1:], (0, 1, 1000, 7), last_env]
    log = calls((STEP, 1, 1000, 1, 1000, 0))
    assert advice in make_report(recording(log, steps(*envs))).verdict


def test_gains_say_what_the_rate_would_be():
    log = calls((STEP, 500, 1000, 500, 1000, 0))
    report = make_report(recording(log, steps((0, 500, 1000, 7))))
    assert report.steps_per_second == pytest.approx(1e6)
    assert report.gains["env compute"] == pytest.approx(2e6)


def test_the_log_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr("vecenv.timing.calls.CAPACITY", 4)
    log = CallLog()
    for number in range(7):
        with log.interval(STEP):
            log.note_rows(number)
    found = log.read()
    assert found.num_rows.tolist() == [3, 4, 5, 6]
    assert log.complete_since() == found.end_ns[0]


def test_waiting_and_nesting_are_logged():
    log = CallLog()
    with log.interval(log.kind("outer")):
        with log.interval(STEP):
            with log.waiting():
                pass
            with log.waiting():
                pass
        with log.interval(log.kind("inner")):
            pass
    found = log.read()
    assert [log.names[kind] for kind in found.kinds] == ["step", "inner", "outer"]
    assert found.begin_ns[0] <= found.wait_begin_ns[0] < found.wait_end_ns[0] <= found.end_ns[0]
    lengths = found.end_ns - found.begin_ns
    assert found.nested_ns.tolist() == [0, 0, lengths[0] + lengths[1]]
    assert set(log.total_ns) == {"outer", "inner"}


def test_clearing_inside_a_phase_ends_it():
    log = CallLog()
    with log.interval(log.kind("policy")):
        log.clear()
    assert log.count == 0 and log.total_ns == {}
