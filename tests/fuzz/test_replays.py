"""What `make fuzz` finds in replay buffers with options drawn together."""

import pytest
from fuzz import replays

from buffers import BufferMisuseError
from buffers.replay.sequences import SequenceIndex
from buffers.replay.table import Table


@pytest.mark.slow
def test_a_few_cases_of_replay_buffers():
    assert sum(replays.run_case(number, 40) for number in range(15)) == 600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (SequenceIndex, "are_alive", lambda self, rows, memory: rows >= 0),
        (SequenceIndex, "follow", lambda self: None),
        (Table, "cut", lambda self, ids: None),
    ],
    ids=["overwritten sequences", "followers", "cuts"],
)
def test_what_is_left_out_is_found(where, name, wrong, monkeypatch):
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises((AssertionError, IndexError, KeyError, BufferMisuseError)):
        for number in range(80):
            replays.run_case(number, 60)
