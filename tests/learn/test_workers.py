"""Threads that compute shares of a gradient."""

import os
import threading
import weakref

import pytest
from programs import run

from vecenv.learn import workers
from vecenv.learn.workers import Worker


def test_a_worker_returns_and_raises_what_its_function_does():
    worker = Worker()
    for number in range(300):
        worker.begin(pow, number, 2)
        assert worker.end() == number**2
    worker.begin(divmod, 1, 0)
    with pytest.raises(ZeroDivisionError):
        worker.end()
    worker.begin(threading.get_ident)
    assert worker.end() != threading.get_ident()


def test_a_result_that_nobody_took_is_not_taken_for_a_later_one():
    worker = Worker()
    worker.begin(pow, 2, 2)
    worker.begin(pow, 3, 2)
    assert worker.end() == 9


def test_a_worker_ends_with_its_object():
    worker = Worker()
    worker.begin(threading.current_thread)
    thread = worker.end()
    assert thread.is_alive()
    del worker
    thread.join(10)
    assert not thread.is_alive()


def test_a_thread_that_is_gone_is_missed(monkeypatch):
    monkeypatch.setattr(workers, "_CHECK_S", 0.01)
    worker = Worker()
    worker._tasks.put(None)  # it ends without a result
    worker._thread.join(10)
    with pytest.raises(RuntimeError, match="is gone"):
        worker.end()


def test_a_thread_of_another_process_is_replaced():
    worker = Worker()
    worker.begin(threading.get_ident)
    thread = worker.end()
    worker._process = -1  # as in a fork
    worker.begin(threading.get_ident)
    assert worker.end() != thread


def test_threads_are_ended_and_waited_for(monkeypatch):
    monkeypatch.setattr(workers, "_started", weakref.WeakKeyDictionary())
    worker = Worker()
    workers._end_all()
    assert not worker._thread.is_alive()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_worker_works_in_a_forked_process():
    code = """if True:
        import os, sys
        from vecenv.learn.workers import Worker
        worker = Worker()
        worker.begin(pow, 2, 3)
        assert worker.end() == 8
        if (child := os.fork()) == 0:
            worker.begin(pow, 3, 3)
            os._exit(0 if worker.end() == 27 else 1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run(code, kind="learn").returncode == 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux tells cores apart")
def test_a_thread_leaves_a_core_and_may_use_all_again():
    before = os.sched_getaffinity(0)
    workers._leave_core(min(before))
    assert os.sched_getaffinity(0) == before


def test_looks_in_vain_make_the_next_ones_rare():
    patience = workers._Patience(1e-6)
    patience._most = 5  # also without a compiler

    def count() -> int:
        skipped = 0
        while not patience.rounds():
            skipped += 1
        return skipped

    found = []
    for _ in range(9):
        patience.note(was_in_time=False)
        found.append(count())
    assert found == [1, 3, 7, 15, 31, 63, 64, 64, 64]
    patience.note(was_in_time=True)
    assert count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("after", ["worker.end()", "time.sleep(0.001)"])
def test_a_process_ends_while_a_thread_looks_or_computes(after):
    code = f"""if True:
        import time
        import torch
        from vecenv.learn.workers import Worker
        worker = Worker()
        a = torch.ones(600, 600)
        worker.begin(torch.mm, a, a)
        {after}
    """
    for _ in range(3):
        assert run(code, kind="learn").returncode == 0


@pytest.mark.slow
def test_threads_have_ended_when_the_interpreter_goes():
    code = """if True:
        import atexit
        import time
        from vecenv.learn.workers import Worker
        worker = Worker()
        worker.begin(time.sleep, 0.1)
        atexit._run_exitfuncs()
        assert not worker._thread.is_alive()
    """
    assert run(code, kind="learn").returncode == 0
