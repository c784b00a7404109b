"""What `make fuzz` finds in frames that are stored once."""

import pytest
from fuzz import frames

from buffers import BufferMisuseError
from buffers.core.rows import FrameLayout
from buffers.replay.once import Once
from buffers.replay.table import Table


@pytest.mark.slow
def test_a_few_cases_of_frames():
    assert sum(frames.run_case(number, 100) for number in range(10)) == 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name"),
    [(Table, "cut"), (FrameLayout, "first_break"), (Once, "commit")],
    ids=["heads kept", "nothing refused", "not counted"],
)
def test_what_is_left_out_is_found(where, name, monkeypatch):
    monkeypatch.setattr(where, name, lambda self, *_: None)
    with pytest.raises((AssertionError, IndexError, TypeError, BufferMisuseError)):
        for number in range(20):
            frames.run_case(number, 200)
