import pytest

from vecenv.jit import runner
from vecenv.jit.runner import SplitChoice


def run_jobs(choice, num_jobs, split_ns, serial_ns):
    """Do jobs as the choice says; return how many were split."""
    num_split = 0
    for _ in range(num_jobs):
        num_split += choice.is_split
        was_split = choice.is_split
        has_changed = choice.note(split_ns if choice.is_split else serial_ns)
        assert has_changed == (choice.is_split != was_split)
    return num_split


@pytest.mark.parametrize(("split_ns", "most_are_split"), [(60, True), (130, False)])
def test_keeps_to_what_is_faster(split_ns, most_are_split):
    share = run_jobs(SplitChoice(), 5000, split_ns, 100) / 5000
    assert share > 0.95 if most_are_split else share < 0.05


def test_a_few_slow_jobs_do_not_mislead():
    choice = SplitChoice()
    for k in range(2 * runner.NUM_TRIED):
        choice.note(1_000_000 if k % 5 == 0 else 60 if choice.is_split else 100)
    assert choice.is_split


def test_notices_when_circumstances_change():
    choice = SplitChoice()
    run_jobs(choice, 2000, 60, 100)
    assert choice.is_split
    run_jobs(choice, runner.NUM_KEPT + 2 * runner.NUM_TRIED, 150, 100)
    assert run_jobs(choice, runner.NUM_KEPT // 2, 150, 100) < runner.NUM_TRIED + 1
