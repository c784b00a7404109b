"""What replay buffers refuse, with the reason, and unchanged afterwards."""

import inspect
from typing import get_type_hints

import numpy as np
import pytest
import torch
from gymnasium.spaces import Text
from replay_model import ACTIONS, NESTED, OBS, RINGS, CountingEnvs, columns_of

from buffers import (
    BufferMemoryError,
    BufferMisuseError,
    MultiprocessReplayBuffer,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)
from buffers.replay.plan import PLAIN_DEFAULTS, ReplayOptions

GOOD = columns_of(CountingEnvs(2).random_steps([0, 1, 0, 1]))
WITH_NAN = np.array([0, 1, np.nan, 2], np.float32)


def snapshot(buffer):
    return {k: v.clone() for k, v in buffer.state_dict().items() if torch.is_tensor(v)}


def check_refused(buffer, message, columns, error=BufferMisuseError):
    before = snapshot(buffer)
    with pytest.raises(error, match=message):
        buffer.add(**columns)
    after = snapshot(buffer)
    assert all(after[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"obs": GOOD["obs"][:3]}, r"obs has shape \(3, 3\), expected \(4, 3\)"),
        ({"next_obs": GOOD["obs"][:, :2]}, r"next_obs has shape \(4, 2\), expected \(4, 3\)"),
        ({"obs": GOOD["obs"].astype(complex)}, "obs has dtype complex128, expected float32"),
        ({"obs": {"a": GOOD["obs"]}}, "obs"),
        ({"actions": GOOD["actions"][:, None]}, r"actions has shape \(4, 1\), expected \(4,\)"),
        ({"actions": GOOD["actions"] + 0.5}, "actions has dtype float64, expected int64"),
        ({"rewards": WITH_NAN}, r"rewards\[2\] is nan as float32, expected finite"),
        ({"rewards": WITH_NAN.astype(float)}, r"rewards\[2\] is nan"),
        ({"rewards": np.array([1, 2, 3, 1e300])}, r"rewards\[3\] is inf as float32"),
        ({"rewards": np.float32(1)}, r"rewards has shape \(\), expected \(K,\)"),
        ({"terminations": np.full(4, 2)}, "terminations has 2, expected bool, or integers 0"),
        ({"truncations": np.ones(3, bool)}, r"truncations has shape \(3,\), expected \(4,\)"),
        ({"terminations": None}, "missing: ..terminations"),
        ({"log_probs": np.ones(4)}, "unknown: ..log_probs"),
        ({"env_ids": [0, 1, 2, 0]}, "env_ids has 2, expected integers .* from 0 to 1"),
        ({"env_ids": [0, 1, -1, 0]}, "env_ids has -1"),
        ({"env_ids": [0, 1]}, r"env_ids has dtype int64 and shape \(2,\)"),
        ({"env_ids": np.zeros(4)}, "env_ids has dtype float64"),
        ({"obs": torch.zeros(4, 3, device="meta")}, "meta"),
    ],
)
def test_columns_that_do_not_fit(changes, message):
    buffer = SharedReplayBuffer(3, OBS, ACTIONS, num_envs=2, seed=0)
    buffer.add(**GOOD)
    check_refused(buffer, message, {**GOOD, **changes})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": 2.5}, "capacity"),
        ({"capacity": 2**40}, "expected at most"),
        ({"observation_space": Text(3)}, "obs is the space"),
        ({"action_space": NESTED}, "action_space"),
        ({"num_envs": 0}, "num_envs"),
        ({"n_step": 0}, "n_step"),
        ({"n_step": 3}, "n_step=3 needs gamma"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"extra_columns": {"obs": OBS}}, "extra column 'obs' has a name that is taken"),
        ({"extra_columns": {"goal": NESTED}}, "one column for each array"),
    ],
)
def test_constructors_refuse(options, message):
    given = {
        "capacity": 4, "observation_space": OBS, "action_space": ACTIONS, "num_envs": 2, **options
    }  # fmt: skip
    with pytest.raises(BufferMisuseError, match=message):
        SharedReplayBuffer(**given)


@pytest.mark.parametrize(
    "options", [{"n_step": 2, "gamma": 0.9}, {"store_next": False}, {"track_env": True}]
)
def test_following_rows_needs_the_number_of_envs(options):
    with pytest.raises(BufferMisuseError, match="need num_envs"):
        SharedReplayBuffer(4, OBS, ACTIONS, **options)


@pytest.mark.parametrize("cls", RINGS)
def test_sampling_too_early_or_wrongly(cls):
    buffer = cls(4, OBS, ACTIONS, num_envs=2, seed=0)
    with pytest.raises(BufferMisuseError, match="the buffer is empty"):
        buffer.sample(1)
    with pytest.raises(BufferMisuseError, match=r"2 arguments without a name, expected obs=\.\.\."):
        buffer.add(GOOD["obs"], GOOD["next_obs"])
    with pytest.raises(BufferMisuseError, match=r"'truncations'\]; missing: \['actions'"):
        buffer.add(obs=GOOD["obs"])
    buffer.add(**GOOD)
    for size in (0, -1, 1.5, "a"):
        with pytest.raises(BufferMisuseError, match="batch_size"):
            buffer.sample(size)
    with pytest.raises(BufferMisuseError, match=r"of 3 rows, expected a batch .* of 2 rows"):
        buffer.sample(2, buffer.new_batch(3))
    other = cls(4, OBS, ACTIONS, num_envs=2, seed=0)
    for out in ({}, other.new_batch(2)):
        with pytest.raises(BufferMisuseError, match="expected a batch that new_batch"):
            buffer.sample(2, out)
    if cls is not PrioritizedReplayBuffer:
        with pytest.raises(BufferMisuseError, match="batch_size is 9 without replacement"):
            buffer.sample(9, replace=False)
    for rows in ([8], [-1], [0.5], [[0]], []):
        with pytest.raises(BufferMisuseError, match="indices is"):
            buffer.get(np.array(rows))


@pytest.mark.parametrize("cls", RINGS)
@pytest.mark.parametrize("store_next", [True, False])
def test_what_does_not_fit_is_refused(cls, store_next, set_free_bytes):
    spaces, options = (OBS, ACTIONS), {"num_envs": 2, "store_next": store_next}
    free = cls.nbytes_for(1000, *spaces, **options)
    set_free_bytes(free)
    with pytest.raises(
        BufferMemoryError, match=r"with capacity 1000000 needs .* free; use a smaller capacity"
    ):
        cls(10**6, *spaces, **options)
    made = cls(1000, *spaces, **options)
    assert made.nbytes == sum(made.memory().values()) == free


def test_rows_that_are_no_whole_steps():
    buffer = SharedReplayBuffer(9, OBS, ACTIONS, num_envs=3)
    check_refused(buffer, "got 4 rows without env_ids, expected a multiple of num_envs = 3", GOOD)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (SharedReplayBuffer, get_type_hints(ReplayOptions)),
        (PerEnvReplayBuffer, get_type_hints(ReplayOptions)),
        (PrioritizedReplayBuffer, get_type_hints(ReplayOptions)),
        (MultiprocessReplayBuffer, PLAIN_DEFAULTS),
    ],
)
def test_an_unknown_keyword_is_told_all_known_ones(cls, options):
    own = [p.name for p in inspect.signature(cls).parameters.values() if p.kind is p.KEYWORD_ONLY]
    given = {"num_writers": 2} if "num_writers" in own else {}
    given |= {"num_envs": 4} if cls is PerEnvReplayBuffer else {}
    with pytest.raises(TypeError, match=f"{cls.__name__} has no option 'n_envs'") as caught:
        cls(10, OBS, ACTIONS, n_envs=4, **given)
    assert str(caught.value).endswith(f"expected some of {sorted([*options, *own])}")
    assert "num_envs" in own


def test_sizes_are_told_the_number_of_envs_among_known_keywords():
    with pytest.raises(TypeError, match=r"no option 'n_envs'; expected some of .*'num_envs'"):
        SharedReplayBuffer.nbytes_for(10, OBS, ACTIONS, n_envs=4)
