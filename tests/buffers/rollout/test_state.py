"""What a rollout buffer carries over: checkpoints, and the order of calls against a model."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from equality import assert_same
from gymnasium.spaces import Box, Discrete
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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


def test_state_is_refused_within_a_rollout():
    rollout = started(1, 2)
    rollout.slot(0)
    rollout.state_dict()  # nothing was written yet
    put(rollout, 0)

    def take_results():
        rollout.slot(0).rewards[:] = 0

    for step in (take_results, lambda: rollout.compute_advantages([0.0, 0.0])):
        with pytest.raises(BufferMisuseError, match="between rollouts only"):
            rollout.state_dict()
        step()
    with pytest.raises(BufferMisuseError, match="between rollouts only"):
        rollout.state_dict()


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


# The order of calls against a model.


class CallOrder(RuleBasedStateMachine):
    """Calls in any order either work or are refused, as a model of three states says."""

    def __init__(self):
        super().__init__()
        self.rollout = make(2, 1)
        self.state, self.has_results, self.has_policy = "new", set(), set()

    def expect(self, allowed, call):
        if allowed:
            return call()
        with pytest.raises(BufferMisuseError):
            call()
        return None

    @property
    def is_filled(self):
        return len(self.has_results) == 2

    def begin(self):
        self.state, self.has_results, self.has_policy = "open", set(), set()

    @rule()
    def start(self):
        self.rollout.start(np.zeros((1, 2), np.float32))
        self.begin()

    @rule(t=st.integers(-1, 2), writes=st.booleans())
    def slot(self, t, writes):
        allowed = self.state == "open" and t in {0, 1}
        slot = self.expect(allowed, lambda: self.rollout.slot(t))
        if allowed and writes:
            slot.obs[:] = slot.rewards[:] = slot.terminations[:] = slot.truncations[:] = 0
            self.has_results.add(t)

    @rule(t=st.integers(-1, 2))
    def put(self, t):
        allowed = self.state == "open" and t in {0, 1}
        self.expect(allowed, lambda: put(self.rollout, t))
        if allowed:
            self.has_policy.add(t)

    @rule(needs_policy=st.booleans())
    def compute(self, needs_policy):
        has_all = len(self.has_policy) == 2 or not needs_policy
        allowed = self.state != "new" and self.is_filled and has_all
        arguments = {"last_values": [0.0], "policy_outputs": needs_policy}
        self.expect(allowed, lambda: self.rollout.compute_advantages(**arguments))
        if allowed:
            self.state, self.has_policy = "complete", {0, 1}  # zeros count from now on

    @rule()
    def draw(self):
        batches = self.expect(self.state == "complete", lambda: self.rollout.minibatches(1))
        if batches is not None:
            assert sum(len(batch.actions) for batch in batches) == 2

    @rule()
    def advance(self):
        allowed = self.state != "new" and self.is_filled
        self.expect(allowed, self.rollout.advance)
        if allowed:
            self.begin()

    @rule()
    def save(self):
        allowed = self.state == "open" and not self.has_results and not self.has_policy
        self.expect(allowed, self.rollout.state_dict)

    @precondition(lambda self: self.state != "new")
    @invariant()
    def observations_can_be_read(self):
        assert self.rollout.obs_at(2).shape == (1, 2)


TestCallOrder = CallOrder.TestCase
TestCallOrder.settings = settings(max_examples=20, stateful_step_count=25)
