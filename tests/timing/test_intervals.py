import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecenv.timing.intervals import Coverage

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

    found = Coverage(begins, ends).between(from_, until)

    expected = [is_covered[a:b].sum() for a, b in zip(from_, until, strict=True)]
    assert found.tolist() == expected


def test_blocks_are_apart_and_in_order():
    covered = Coverage(np.array([5, 0, 20, 3]), np.array([7, 4, 21, 5]))
    assert covered.begins.tolist() == [0, 20] and covered.ends.tolist() == [7, 21]


@pytest.mark.parametrize("time", [0, 10**18])
def test_nothing_covers_nothing(time):
    empty = np.zeros(0, np.int64)
    assert Coverage(empty, empty).between(np.array([0]), np.array([time])).tolist() == [0]
