"""Copies and pickles of buffers; those of batches are in test_batches.py."""

import copy
import pickle

import numpy as np
import pytest
import torch
from equality import assert_same
from gymnasium.spaces import Discrete
from replay_model import ACTIONS, NESTED, RINGS, CountingEnvs, columns_of
from staged_rollouts import make_rollout

from buffers import BufferMisuseError

NUM_ENVS = 3


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


def columns(batch):
    found = {**batch._asdict(), **batch.extras}
    leaves = {name: value for name, value in found.items() if torch.is_tensor(value)}
    for name in ("obs", "next_obs"):
        leaves |= {(name, key): part for key, part in found[name].items()}
    return {name: value.numpy() for name, value in leaves.items()}


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("kind", RINGS)
def test_a_copied_ring_goes_on_as_the_old_one_would_and_leaves_it_alone(kind, staged, duplicate):
    envs = CountingEnvs(NUM_ENVS)
    buffer = kind(
        20, NESTED, ACTIONS, num_envs=NUM_ENVS, extra_columns={"note": Discrete(9)}, seed=1,
        staged=staged, n_step=2, gamma=0.9, store_next=False,
    )  # fmt: skip

    def steps():
        made = columns_of(envs.random_steps(range(NUM_ENVS)), NESTED)
        return made | {"note": np.arange(NUM_ENVS) + envs.made % 5}

    for _ in range(9):
        buffer.add(**steps())
    buffer.sample(4)
    made, more = duplicate(buffer), [steps(), steps()]

    assert type(made) is kind
    assert torch.equal(made.order(), buffer.order())
    kept = columns(buffer.get(buffer.order()))
    assert_same(columns(made.get(made.order())), kept)
    for given in more:
        made.add(**given)
    assert_same(columns(buffer.get(buffer.order())), kept)
    for given in more:
        buffer.add(**given)
    for _ in range(2):
        assert_same(columns(made.sample(16)), columns(buffer.sample(16)))


@pytest.mark.parametrize("staged", [False, True])
def test_a_rollout_is_not_copied_and_says_what_to_do_instead(staged, duplicate):
    rollout = make_rollout(3, 2, NESTED, ACTIONS, autoreset_mode="SameStep", staged=staged)
    with pytest.raises(BufferMisuseError, match="not copied; load its state_dict"):
        duplicate(rollout)
