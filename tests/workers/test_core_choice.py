"""When a worker moves away from its caller's core."""

import numpy as np
import pytest

from vecenv.workers import core_choice
from vecenv.workers.core_choice import CoreChoice


@pytest.mark.parametrize(("after_ns", "moves"), [(10, 5), (100, 2)])
def test_a_worker_leaves_the_callers_core_for_as_long_as_that_helps(monkeypatch, after_ns, moves):
    """It is put back on that core after every move; commands take 100 ns there."""
    times, clock, left = np.zeros(1, np.int64), [0], []
    monkeypatch.setattr(core_choice, "perf_counter_ns", lambda: clock[0])
    monkeypatch.setattr(core_choice, "_leave_core", left.append)
    choice, is_away = CoreChoice(times), False
    for number in range(640):
        clock[0] += after_ns if is_away else 100
        times[0] = 0 if is_away else times[0] + 1
        if times[0] >= choice.patience or choice.is_watching:
            num_left = len(left)
            choice.note_command(number, 3)
            is_away = len(left) > num_left or (is_away and choice.is_watching)
    assert left == [2] * len(left)
    assert abs(len(left) - moves) <= 1


def test_a_pause_on_another_core_is_no_reason_to_move(monkeypatch):
    left = []
    monkeypatch.setattr(core_choice, "_leave_core", left.append)
    times = np.zeros(1, np.int64)
    choice = CoreChoice(times)
    for number in range(500):
        times[0] = number % 20  # now and then the scheduler puts it there
        if times[0] >= choice.patience or choice.is_watching:
            choice.note_command(number, 1)
    assert left == []
