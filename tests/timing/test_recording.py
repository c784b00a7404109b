"""Recordings made by hand, whose shares are known."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecenv.timing import calls as calls_module
from vecenv.timing.calls import CALL, RECV, SEND, STEP, STEP_ASYNC, STEP_WAIT, CallLog
from vecenv.timing.recording import Recording, coverage
from vecenv.timing.report import make_report
from vecenv.timing.stamps import STAMP, WorkerProcess

PROCESSES = [WorkerProcess(2**30 + k, 0.1) for k in range(4)]  # of which there are none
TWO_WORKERS = ("envs", [0, 2, 4], PROCESSES[:2])
FOUR_WORKERS = ("envs", [0, 1, 2, 3, 4], PROCESSES)
LOCAL = ("envs", [0, 4], [None])


def calls(*rows):
    """Rows of kind, begin, end, wait_begin, wait_end and, for a step begun before, its begin."""
    rows = [(*row[:5], 0, 4, row[5] if len(row) > 5 else row[1]) for row in rows]
    return np.array(rows, CALL)


def steps(*rows, resets=()):
    """Rows of env, begin, end and, where they are marked, done; `resets` are rows too."""
    rows = sorted([*((*row, 0) for row in rows), *((*row, 1) for row in resets)])
    return np.array([(*row[:-1], *([0] * (5 - len(row))), row[-1]) for row in rows], STAMP)


def recorded(crew):
    found = Recording("Envs")
    found.stamped, found.chunks, found.processes, *kernel_ns = crew
    found.kernel_ns = sum(kernel_ns)
    found.clear()
    return found


def shares(crew, log, stamps):
    """Return the recording of these calls, and their shares of 1000 ns."""
    found = recorded(crew)
    found._folded_ns = 0
    found.add(log, None if stamps is None else stamps.copy(), 1000)
    return found, found.shares_ns


def report(crew, log, stamps, phases_ns=None, cpu_share=0.0, load=None):
    """Return a report about 1000 ns."""
    found, _ = shares(crew, log, stamps)
    ended = None if stamps is None else stamps[stamps["end_ns"] > 0]

    class Known(Recording):
        def __init__(self):
            vars(self).update(vars(found))
            self.rings = stamps if stamps is None else "some"
            self.log = SimpleNamespace(wall_ns=1000, phases_ns=phases_ns or {}, others_ns={})

        def window(self):
            return 0, log, ended

        def others_load(self):
            return load

    Known.cpu_share = None if stamps is None else cpu_share
    return make_report(Known())


def test_a_barrier_step_is_cut_into_work_stragglers_hand_over_and_copying():
    envs = steps((0, 130, 230), (1, 230, 330, 330), (2, 140, 240), (3, 250, 650, 660))
    _, found = shares(TWO_WORKERS, calls((STEP, 100, 900, 120, 800)), envs)
    # Worker 0 was at work for 200; worker 1 for 520: 500 at steps, 20 writing.
    assert found["env compute"] == 350
    assert found["straggler wait"] == 520 - 360
    assert found["copying"] == 10 + 100
    assert found["hand-over"] == 20 + 680 - 520
    assert found["env reset"] == 0
    assert sum(found.values()) == 800


def test_first_ready_has_no_stragglers():
    envs = steps((0, 0, 100, 100), (2, 150, 250, 900), resets=[(1, 110, 140, 140)])
    log = calls((SEND, 0, 10, 0, 0), (RECV, 10, 210, 10, 200))
    _, found = shares(TWO_WORKERS, log, envs)
    assert found["env compute"] == 90 + 50
    assert found["env reset"] == 30
    assert found["straggler wait"] == 0
    assert found["hand-over"] == 10 + 20
    assert found["copying"] == 10


def test_the_envs_own_time_is_counted_from_the_command_on():
    envs = steps((0, 20, 520, 520), (2, 20, 320, 320))
    log = calls((STEP_ASYNC, 0, 10, 0, 0), (STEP_WAIT, 500, 600, 510, 530, 0))
    totals, found = shares(TWO_WORKERS, log, envs)
    assert totals.critical_ns == 500
    assert found["env compute"] == 20 and found["hand-over"] == 10 + 10


def test_a_step_that_runs_while_totals_are_taken_counts_once():
    totals = recorded(TWO_WORKERS)
    totals._folded_ns = 0
    totals.add(calls((RECV, 0, 100, 0, 100)), steps((0, 50, 0)), 120)
    totals.add(calls((RECV, 120, 300, 120, 300)), steps((0, 50, 250)), 300)
    assert totals.shares_ns["env compute"] == 50 + 130
    assert totals.worker_ns.tolist() == [70 + 130, 0]
    assert totals.counts[0].tolist() == [1, 0, 0, 0] and totals.spent_ns[0, 0] == 200


def test_what_is_not_stamped_is_not_split():
    crew = ("nothing", [0, 2, 4], PROCESSES[:2])
    found = report(crew, calls((STEP, 100, 900, 120, 800)), None)
    assert found.shares == {"env calls": 0.8, "other": pytest.approx(0.2)}
    assert "unknown" in found.verdict and found.resets is None


@pytest.mark.parametrize(
    ("last_env", "advice"),
    [
        ((3, 1, 1000, 1000), "the envs wait"),
        ((3, 990, 1000, 1000), "first-ready (send/recv) with batches of 1"),
        (None, "waking them up, for steps of 10 ns; backend='sync' needs none"),
    ],
)
def test_the_verdict_names_the_largest_share(last_env, advice):
    short = [(env, 990, 1000, 1000) for env in range(3)]
    envs = short if last_env is None else [*short[1:], (0, 1, 1000, 1000), last_env]
    log = calls((STEP, 1, 1000, 1, 1000))
    crew = TWO_WORKERS if last_env is None else FOUR_WORKERS
    envs = envs if last_env != (3, 1, 1000, 1000) else [(k, 1, 1000, 1000) for k in range(4)]
    assert advice in report(crew, log, steps(*envs)).verdict


@pytest.mark.parametrize(("caller_steps", "advice"), [
    (False, "steps of 300 ns; more envs per worker, or caller_steps=True, shorten it"),
    (True, "steps of 300 ns; more envs per worker shorten it"),
])  # fmt: skip
def test_sync_is_advised_only_where_the_envs_one_after_the_other_are_quicker(caller_steps, advice):
    crew = ("envs", [0, 1, 2, 3, 4], [None if caller_steps else PROCESSES[0], *PROCESSES[1:]])
    log = calls((STEP, 1, 1000, 1, 1000))
    found = report(crew, log, steps(*((k, 690, 990, 990) for k in range(4))))
    assert found.shares["hand-over"] > 0.5 and advice in found.verdict
    assert found.advice.backend is None
    found = report(crew, log, steps(*((k, 890, 990, 990) for k in range(4))))
    assert "backend='sync' needs none" in found.verdict and found.advice.backend == "sync"


@pytest.mark.parametrize("num_envs", [1, 2])
def test_one_env_waits_beside_no_other(num_envs):
    crew = ("envs", list(range(num_envs + 1)), PROCESSES[:num_envs])
    envs = steps(*((k, 0, 1000, 1000) for k in range(num_envs)))
    log = calls((STEP, 0, 1000, 0, 1000))
    verdict = report(crew, log, envs).verdict
    assert ("side by side already" in verdict) == (num_envs == 2)
    assert "more envs at once cost little more" in verdict


@pytest.mark.parametrize(("crew", "cpu_share", "load", "advice"), [
    (TWO_WORKERS, 0.0, 1.0, "other programs keep 1.0 of 2"),
    (TWO_WORKERS, 0.0, 0.1, "num_workers=4"),
    (LOCAL, 1.0, 15.0, "keep 15.0 of 2 busy; measure again"),
    (LOCAL, 1.0, 0.1, "backend='async'"),
])  # fmt: skip
def test_workers_are_advised_only_where_they_find_a_processor(
    crew, cpu_share, load, advice, monkeypatch
):
    monkeypatch.setattr("vecenv.timing.advice.usable_cores", lambda: 2)
    envs, log = steps(*((k, 0, 1000, 1000) for k in range(4))), calls((STEP, 0, 1000, 0, 1000))
    found = report(crew, log, envs, cpu_share=cpu_share, load=load)
    assert advice in found.verdict
    assert crew is TWO_WORKERS or (found.advice.backend == "async") == (load < 1)


def test_gains_are_bounded_by_the_envs_own_time():
    envs = steps((0, 0, 950, 950))
    log = calls((STEP_ASYNC, 0, 0, 0, 0), (STEP_WAIT, 900, 950, 900, 950, 0))
    found = report(TWO_WORKERS, log, envs, {"learner": 900})
    assert found.steps_per_second == pytest.approx(1e6)
    assert found.shares["learner"] == 0.9
    assert found.gains["learner"] == pytest.approx(1e6 / 0.95)
    assert found.gains["env compute"] == pytest.approx(1e6 / 0.95)


def test_phases_may_have_names_of_ours():
    log = CallLog()
    for kind in (*map(log.kind, ("step", "other", "env compute")), STEP):
        log.begin(kind)
        log.end()
    assert log.names[7:] == ["step", "other", "env compute"]
    assert log.take()["kind"].tolist() == [7, 8, 9, STEP]
    found = report(LOCAL, calls((STEP, 0, 100, 0, 0)), steps((0, 0, 100)), log.phases_ns)
    assert {"step", "other (phase)", "env compute (phase)", "other"} < set(found.shares)
    assert sum(found.shares.values()) == pytest.approx(1)


def test_the_log_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr(calls_module, "CAPACITY", 4)
    log = CallLog()
    for number in range(7):
        log.begin(STEP)
        log.note_rows(number)
        log.end()
        assert len(log.rows) == number % 5 + 1
        if number == 4:
            log.take()
    log.take()
    found, since_ns = log.latest()
    assert found["num_rows"].tolist() == [3, 4, 5, 6]
    assert since_ns == found["end_ns"][0]


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


@given(intervals, intervals)
def test_coverage_counts_the_moments_inside_any_interval(busy, asked):
    begins = np.array([begin for begin, _ in busy], dtype=np.int64)
    ends = begins + np.array([length for _, length in busy], dtype=np.int64)
    is_covered = np.zeros(100, bool)
    for begin, end in zip(begins, ends, strict=True):
        is_covered[begin:end] = True
    from_ = np.array([begin for begin, _ in asked], dtype=np.int64)
    until = from_ + np.array([length for _, length in asked], dtype=np.int64)

    found = coverage(begins, ends)(from_, until)

    expected = [is_covered[a:b].sum() for a, b in zip(from_, until, strict=True)]
    assert found.tolist() == expected
