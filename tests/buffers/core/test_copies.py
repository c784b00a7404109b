"""Copies and pickles of buffers and batches."""

import copy
import pickle

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from replay_model import RINGS
from staged_rollouts import make_rollout

from buffers import (
    BufferMisuseError,
)

SPACE = Dict(place=Box(-1, 1, (3,)), time=Box(0, 1, (1,), np.float64), gear=Discrete(5))
ACTIONS, NUM_ENVS = Discrete(2), 3


def pickled_out_of_band(buffer):
    """As Ray does it: the receiver gets arrays that it cannot write."""
    pages = []
    text = pickle.dumps(buffer, protocol=5, buffer_callback=pages.append)
    return pickle.loads(text, buffers=[bytes(page.raw()) for page in pages])


WAYS = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda buffer: pickle.loads(pickle.dumps(buffer)),
    "out of band": pickled_out_of_band,
}


@pytest.fixture(params=WAYS)
def duplicate(request):
    return WAYS[request.param]


def make_obs(rng, count):
    return {
        "place": rng.normal(size=(count, 3)).astype(np.float32),
        "time": rng.random((count, 1)),
        "gear": rng.integers(0, 5, count),
    }


def make_steps(rng, count=NUM_ENVS):
    return {
        "obs": make_obs(rng, count),
        "next_obs": make_obs(rng, count),
        "actions": rng.integers(0, 2, count),
        "rewards": rng.random(count),
        "terminations": rng.random(count) < 0.2,
        "truncations": rng.random(count) < 0.1,
        "note": rng.integers(0, 9, count),
    }


def make_ring(kind, staged=False, **options):
    options = {"n_step": 2, "gamma": 0.9, "store_next": False, **options}
    return kind(
        20, SPACE, ACTIONS, num_envs=NUM_ENVS, extra_columns={"note": Discrete(9)}, seed=1,
        staged=staged, **options,
    )  # fmt: skip


def equal_batches(left, right):
    """Whether two batches have the same fields with the same values."""
    names = set(left.__slots__) - {
        "memory",
        "extras",
        "obs",
        "next_obs",
        "size",
        "num_added",
        "drawn_from",
    }
    pairs = [(getattr(left, name), getattr(right, name)) for name in names]
    pairs += [(left.obs[key], right.obs[key]) for key in SPACE]
    pairs += [(left.next_obs[key], right.next_obs[key]) for key in SPACE]
    pairs += [(left.extras[name], right.extras[name]) for name in left.extras]
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("kind", RINGS)
def test_a_copied_ring_goes_on_as_the_old_one_would_and_leaves_it_alone(kind, staged, duplicate):
    rng, buffer = np.random.default_rng(0), make_ring(kind, staged)
    for _ in range(9):
        buffer.add(**make_steps(rng))
    buffer.sample(4)
    made = duplicate(buffer)

    assert type(made) is kind
    assert torch.equal(made.order(), buffer.order())
    assert equal_batches(made.get(made.order()), buffer.get(buffer.order()))
    kept = buffer.get(buffer.order())
    more = make_steps(rng)
    made.add(**more)
    made.add(**more)
    assert equal_batches(buffer.get(buffer.order()), kept)
    buffer.add(**more)
    buffer.add(**more)
    for _ in range(2):
        assert equal_batches(made.sample(16), buffer.sample(16))


@pytest.mark.parametrize("staged", [False, True])
def test_a_rollout_is_not_copied_and_says_what_to_do_instead(staged, duplicate):
    rollout = make_rollout(3, 2, SPACE, ACTIONS, autoreset_mode="SameStep", staged=staged)
    with pytest.raises(BufferMisuseError, match="not copied; load its state_dict"):
        duplicate(rollout)
