"""What a rollout buffer carries over: checkpoints, and the order of calls."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from equality import assert_same
from gymnasium.spaces import Box, Discrete

from buffers import BufferMisuseError, RolloutBuffer


def make(num_steps=3, num_envs=2, seed=0):
    options = {"autoreset_mode": "NextStep", "seed": seed}
    return RolloutBuffer(num_steps, num_envs, Box(-1, 1, (2,)), Discrete(4), **options)


def started(*args, **options):
    rollout = make(*args, **options)
    rollout.start(np.zeros((rollout.num_envs, 2), np.float32))
    return rollout


def put(rollout, t):
    ones = torch.ones(rollout.num_envs)
    rollout.put(t, actions=ones.long(), log_probs=-ones, values=2 * ones)


def contents(rollout):
    columns = rollout._storage.columns.items()
    return {name: column.tensor.numpy().copy() for name, column in columns}


def run_rollout(rollout, number):
    for t in range(rollout.num_steps):
        put(rollout, t)
        slot = rollout.slot(t)
        slot.obs[:], slot.rewards[:] = number + t, [number, t]
        slot.terminations[:] = [t == number % 3, False]
        slot.truncations[:] = False
    rollout.compute_advantages([1.0, 2.0])
    passes = rollout.minibatches(2, fixed=True), rollout.sequences(2, length=2)
    batches = [list(copy.deepcopy(batch)) for batches in passes for batch in batches]
    episodes = [part.tolist() for part in rollout.episodes()]
    rollout.advance()
    return batches, episodes


def test_a_restored_buffer_goes_on_alike():
    first = started(seed=1)
    for number in range(3):
        run_rollout(first, number)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make(seed=9)
    second.load_state_dict(torch.load(file, weights_only=True))
    for number in range(3, 6):
        left, right = run_rollout(first, number), run_rollout(second, number)
        torch.testing.assert_close(left[0], right[0], rtol=0, atol=0)
        assert left[1] == right[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version is 2, expected 1"),
        ({"running_returns": torch.zeros(3)}, r"\(3,\).* for running_returns, expected"),
        ({"obs": torch.zeros(2, 2).double()}, r"float64.* for obs, expected"),
        ({"obs": None}, "state holds None for obs"),
        (
            {"autoreset_mode": "SameStep", "gamma": 0.9},
            "autoreset_mode is SameStep, expected NextStep; gamma is 0.9, expected 0.99; load",
        ),
    ],
)
def test_states_that_do_not_fit_change_nothing(changes, message):
    rollout = started()
    state = {**rollout.state_dict(), "running_returns": torch.ones(2).double(), **changes}
    before = contents(rollout)
    with pytest.raises(BufferMisuseError, match=message):
        rollout.load_state_dict(state)
    assert_same(contents(rollout), before)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_rollout_is_not_copied_and_says_what_to_do_instead(duplicate):
    with pytest.raises(BufferMisuseError, match="not copied; load its state_dict"):
        duplicate(started())


# What can be called after a start, a step, all results, all results and outputs, advantages.
CALLS = {
    "slot": lambda rollout: rollout.slot(0),
    "slot -1": lambda rollout: rollout.slot(-1),
    "slot beyond": lambda rollout: rollout.slot(2),
    "put": lambda rollout: put(rollout, 1),
    "put beyond": lambda rollout: put(rollout, 2),
    "compute": lambda rollout: rollout.compute_advantages([0.0]),
    "compute alone": lambda rollout: rollout.compute_advantages([0.0], policy_outputs=False),
    "draw": lambda rollout: rollout.minibatches(1),
    "advance": lambda rollout: rollout.advance(),
    "state": lambda rollout: rollout.state_dict(),
}
ALLOWED = {
    "new": set(),
    "started": {"slot", "put", "state"},
    "stepped": {"slot", "put"},
    "full": {"slot", "put", "compute alone", "advance"},
    "with outputs": {"slot", "put", "compute", "compute alone", "advance"},
    "complete": {"compute", "compute alone", "draw", "advance"},
}


def brought_to(state):
    rollout, step = make(2, 1), list(ALLOWED).index(state)
    if step > 0:
        rollout.start(np.zeros((1, 2), np.float32))
    for t in range(min(max(step - 1, 0), 2)):
        slot = rollout.slot(t)
        slot.obs[:] = slot.rewards[:] = slot.terminations[:] = slot.truncations[:] = 0
    for t in range(2 if step > 3 else 0):
        put(rollout, t)
    if state == "complete":
        rollout.compute_advantages([0.0])
    return rollout


@pytest.mark.parametrize("state", ALLOWED)
def test_calls_out_of_order_are_refused(state):
    for name, call in CALLS.items():
        rollout = brought_to(state)
        if name in ALLOWED[state]:
            call(rollout)
        else:
            with pytest.raises(BufferMisuseError):
                call(rollout)
        assert state == "new" or rollout.obs_at(2).shape == (1, 2)
