"""What sequences drawn from rings refuse; `fuzz.replays` compares those that are drawn."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from buffers import BufferMisuseError, PrioritizedReplayBuffer, SharedReplayBuffer

OBS = Box(-np.inf, np.inf, (1,))
HIDDEN = Box(-np.inf, np.inf, (2,), np.float32)


def filled():
    """A buffer of two envs whose episodes have 7 and 9 steps."""
    buffer = PrioritizedReplayBuffer(
        40, OBS, Discrete(5), num_envs=2, track_episodes=True, extra_columns={"hidden": HIDDEN}
    )
    for t in range(40):
        obs, no = np.full((2, 1), t, np.float32), np.zeros(2, bool)
        ends = [t % (7 + 2 * env) == 6 + 2 * env for env in range(2)]
        buffer.add(
            obs=obs, next_obs=obs + 1, actions=np.zeros(2, int), rewards=no, terminations=ends,
            truncations=no, hidden=np.zeros((2, 2)),
        )  # fmt: skip
    return buffer


WRONG = {
    "longer than anything": (lambda b: b.sample_sequences(4, 10), "none of the 40 .* 10 steps"),
    "no length": (lambda b: b.sample_sequences(4, 0), "sequence_length must be"),
    "no batch": (lambda b: b.sample_sequences(0, 4), "batch_size must be"),
    "too much": (lambda b: b.sample_sequences(2**40, 2**40), "expected at most"),
    "all burn-in": (lambda b: b.sample_sequences(4, 4, burn_in=4), "leaves no step to learn"),
    "negative burn-in": (lambda b: b.sample_sequences(4, 4, burn_in=-1), "burn_in must be"),
    "all overlap": (lambda b: b.sample_sequences(4, 4, overlap=4), "overlap is 4"),
    "negative overlap": (lambda b: b.sample_sequences(4, 4, overlap=-2), "overlap must be"),
    "no column": (
        lambda b: b.sample_sequences(4, 4, initial_states="state"), "extra columns, which are",
    ),
    "others have priorities": (lambda b: b.sample_sequences(4, 3), "make another buffer"),
    "beta": (lambda b: b.sample_sequences(4, 4, beta=-1), "beta is -1"),
}  # fmt: skip
WRONG_OF_BATCH = {
    "errors by sequence": (lambda b, s: b.update_sequence_priorities(s, [1.0] * 4), "one for each"),
    "NaN": (lambda b, s: b.update_sequence_priorities(s, np.full((4, 4), np.nan)), "is nan"),
    "infinite": (lambda b, s: b.update_sequence_priorities(s, np.full((4, 4), np.inf)), "is inf"),
    "eta": (lambda b, s: b.update_sequence_priorities(s, np.ones((4, 4)), eta=2), "eta is 2"),
    "a copy": (lambda b, s: b.update_sequence_priorities(copy.copy(s), 0), "not a copy"),
    "transitions": (lambda b, s: b.refresh_states(b.sample(4), hidden=0), "a ReplayBatch"),
    "another buffer's": (
        lambda b, s: b.refresh_states(filled().sample_sequences(2, 3), hidden=0),
        "of this buffer",
    ),
    "no column": (lambda b, s: b.refresh_states(s, state=np.ones((4, 4, 2))), "extra columns"),
    "shape": (lambda b, s: b.refresh_states(s, hidden=torch.ones(4, 3, 2)), r"\(4, 4, 2\)"),
    "shape of array": (lambda b, s: b.refresh_states(s, hidden=np.ones((4, 2))), r"\(4, 4, 2\)"),
    "dtype": (lambda b, s: b.refresh_states(s, hidden=np.ones((4, 4, 2), complex)), "hidden"),
}


@pytest.mark.parametrize("case", [*WRONG, *WRONG_OF_BATCH])
def test_wrong_arguments_are_refused_and_change_nothing(case):
    buffer = filled()
    if case == "longer than anything":  # sequences without priorities may be of any length
        with pytest.raises(BufferMisuseError, match=WRONG[case][1]):
            WRONG[case][0](buffer)
        return
    batch = buffer.sample_sequences(4, 4)
    buffer.update_sequence_priorities(batch, np.ones((4, 4)))
    before = buffer.state_dict()
    call, message = WRONG.get(case) or WRONG_OF_BATCH[case]
    with pytest.raises(BufferMisuseError, match=message):
        call(buffer) if case in WRONG else call(buffer, batch)
    if case != "transitions":  # which draws some before
        after = buffer.state_dict()
        for name, value in before.items():
            same = torch.equal(value, after[name]) if torch.is_tensor(value) else True
            assert same, name


def test_constructors_refuse_what_has_no_sequences(tmp_path):
    made = {"observation_space": OBS, "action_space": Discrete(2)}
    with pytest.raises(BufferMisuseError, match="need num_envs"):
        SharedReplayBuffer(10, **made, track_episodes=True)
    with pytest.raises(BufferMisuseError, match="summed by the learner"):
        SharedReplayBuffer(10, **made, num_envs=1, n_step=2, gamma=0.9, track_episodes=True)
    with pytest.raises(BufferMisuseError, match="track_episodes=False"):
        SharedReplayBuffer(
            10, **made, num_envs=1, track_episodes=True, storage="memmap", folder=tmp_path / "f"
        )
    plain = SharedReplayBuffer(10, **made, num_envs=1)
    with pytest.raises(BufferMisuseError, match="track_episodes=True in the constructor"):
        plain.sample_sequences(1, 1)
    for name in ("steps", "mask", "is_first"):
        with pytest.raises(BufferMisuseError, match=name):
            SharedReplayBuffer(
                10, **made, num_envs=1, track_episodes=True, extra_columns={name: HIDDEN}
            )
