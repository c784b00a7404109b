"""What `make fuzz` finds in replay buffers with options drawn together."""

import pytest
from fuzz import replays

from buffers import BufferMisuseError
from buffers.replay import layout, prioritized, storage
from buffers.replay.sequences import SequenceIndex


@pytest.mark.slow
def test_a_few_cases_of_replay_buffers():
    assert sum(replays.run_case(number, 40) for number in range(15)) == 600


def never_overwritten(rows, capacity, before, now):
    return rows >= 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (layout, "were_not_overwritten", never_overwritten),
        (prioritized.secrets, "randbits", lambda _: 1),
        (SequenceIndex, "follow", lambda self, value: None),
        (SequenceIndex, "pass_over", lambda self, envs, is_over: None),
        (storage, "mark_cut", lambda state, ids: None),
    ],
    ids=["overwritten rows", "loaded states", "followers", "steps", "cuts"],
)
def test_what_is_left_out_is_found(where, name, wrong, monkeypatch):
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises((AssertionError, IndexError, KeyError, BufferMisuseError)):
        for number in range(40):
            replays.run_case(number, 60)
