"""Sequences of a rollout: each valid row once, states where episodes begin, one shape always."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_rollouts import make_rollout

from buffers import BufferMisuseError, RolloutBatch

MODES = ["NextStep", "SameStep", "Disabled"]
OBS = Dict({"age": Box(0, 1000, (), np.int64), "image": Box(0, 255, (2, 3), np.uint8)})
ANY = (-np.inf, np.inf)
EXTRAS = {"hidden": Box(*ANY, (4,)), "masks": Box(0, 1, (3,), np.bool_)}


class Ages:
    """Envs whose observation is how many steps ago their episode began, and ends are random."""

    def __init__(self, mode, num_envs, seed):
        self.mode, self.rng = mode, np.random.default_rng(seed)
        self.ages = np.zeros(num_envs, np.int64)
        self.is_over = np.zeros(num_envs, bool)

    def obs(self):
        image = np.repeat(self.ages % 256, 6).reshape(-1, 2, 3).astype(np.uint8)
        return {"age": self.ages.copy(), "image": image}

    def step(self, slot):
        """Write a step; return under DISABLED the observations after the resets, else None."""
        resets = self.is_over if self.mode == "NextStep" else np.zeros_like(self.is_over)
        self.ages = np.where(resets, 0, self.ages + 1)
        self.is_over = (self.rng.random(len(self.ages)) < 0.3) & ~resets
        is_cut = self.rng.random(len(self.ages)) < 0.5
        slot.rewards[:] = np.where(resets, 0.0, self.rng.random(len(self.ages)))
        slot.terminations[:], slot.truncations[:] = self.is_over & ~is_cut, self.is_over & is_cut
        if self.mode == "SameStep":
            self.ages[self.is_over] = 0
        for key, column in self.obs().items():
            slot.obs[key][:] = column
        if self.mode == "Disabled":
            self.ages[self.is_over] = 0
            return self.obs()
        return None


class Policy:
    """A recurrent policy whose values depend on the whole episode so far."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.matrix = 0.5 * torch.randn(4, 4, generator=generator)

    def step(self, ages, state, is_first):
        """Values, and the states before and after."""
        state = state.masked_fill(is_first[:, None], 0.0)
        after = torch.tanh(state @ self.matrix + 0.1 * ages[:, None].float())
        return after.sum(1), state, after


def collect(rollout, envs, policy, state):
    """Fill a rollout as a recurrent learner does, checking where episodes begin."""
    for t in range(rollout.num_steps):
        ages, is_first = rollout.obs_at(t)["age"], rollout.is_first_at(t)
        assert is_first.equal(ages == 0)
        values, before, state = policy.step(ages, state, is_first)
        rollout.put(
            t, actions=ages % 7, log_probs=-values, values=values, hidden=before,
            masks=np.eye(3, dtype=bool)[ages.numpy() % 3],
        )  # fmt: skip
        slot = rollout.slot(t)
        obs = envs.step(slot)
        if rollout.final_values is not None:
            rollout.set_final_values(t, slot.truncations, np.zeros(slot.truncations.sum()))
        if obs is not None:
            rollout.write_obs(t + 1, obs)
    last = rollout.is_first_at(rollout.num_steps)
    assert last.equal(rollout.obs_at(rollout.num_steps)["age"] == 0)
    return policy.step(rollout.obs_at(rollout.num_steps)["age"], state, last)[0], state


def made(mode, num_steps, num_envs, seed, **options):
    options = {"autoreset_mode": mode, "seed": seed, "extra_columns": EXTRAS, **options}
    return make_rollout(num_steps, num_envs, OBS, Discrete(7), **options)


def check_pass(rollout, policy, number, length):
    """One pass against the rollout itself, row by row."""
    num_steps, num_envs = rollout.num_steps, rollout.num_envs
    length = length or num_steps
    num_sequences = -(-num_steps // length) * num_envs
    number = min(number, num_sequences)
    size = -(-num_sequences // number)
    seen = []
    batches = list(rollout.sequences(number, length=length, initial_states=["hidden"]))
    flat = {name: getattr(rollout, name).flatten(0, 1) for name in ("actions", "advantages")}
    flat["image"] = rollout.obs["image"].flatten(0, 1)
    firsts = [rollout.is_first_at(t).clone() for t in range(num_steps)]
    for batch in batches:
        assert type(batch) is RolloutBatch
        assert len(batch) == size
        assert batch.actions.shape == batch.weights.shape == (length, size)
        assert batch.obs["image"].dtype is torch.uint8
        assert batch.obs["image"].shape == (length, size, 2, 3)
        assert batch.extras["masks"].dtype is torch.bool
        assert list(batch.extras) == ["masks"]
        own = []
        for s in range(size):
            rows, weights = batch.indices[:, s].tolist(), batch.weights[:, s].tolist()
            start, env = divmod(rows[0], num_envs)
            times = [min(start + j, num_steps - 1) for j in range(length)]
            assert start % length == 0
            assert rows == [t * num_envs + env for t in times]
            assert batch.is_first[:, s].tolist() == [bool(firsts[t][env]) for t in times]
            assert batch.initial_states["hidden"][s].equal(rollout.extras["hidden"][start, env])
            is_there = (torch.arange(length) < num_steps - start) & rollout.valid[times, env]
            is_repeated = rows[0] in own
            assert weights == (is_there.float() * (not is_repeated)).tolist()
            seen += [row for row, weight in zip(rows, weights, strict=True) if weight]
            own.append(rows[0])
        for name, column in flat.items():
            found = batch.obs["image"] if name == "image" else getattr(batch, name)
            assert found.equal(column[batch.indices])
        check_values(batch, policy)
    assert sorted(seen) == rollout.valid.flatten().nonzero()[:, 0].tolist()


def check_values(batch, policy):
    """What the policy made of each step when it acted, it makes of the sequences."""
    state, values = batch.initial_states["hidden"], []
    for ages, is_first in zip(batch.obs["age"], batch.is_first, strict=True):
        value, _, state = policy.step(ages, state, is_first)
        values.append(value)
    is_own = batch.weights > 0
    assert is_own.any()
    torch.testing.assert_close(torch.stack(values)[is_own], batch.values[is_own])


@settings(max_examples=12)
@given(
    mode=st.sampled_from(MODES),
    num_steps=st.integers(1, 9),
    num_envs=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    number=st.integers(1, 20),
    length=st.none() | st.integers(1, 9),
    staged=st.booleans(),
)
def test_sequences_are_those_of_the_rollout(
    mode, num_steps, num_envs, seed, number, length, staged
):
    rollout = made(mode, num_steps, num_envs, seed, staged=staged)
    envs, policy = Ages(mode, num_envs, seed), Policy()
    state = torch.zeros(num_envs, 4)
    rollout.start(envs.obs())
    for number_of_rollout in range(3):
        last_values, state = collect(rollout, envs, policy, state)
        if number_of_rollout == 1:
            rollout.valid_pages[:, 0] = False
        rollout.compute_advantages(last_values)
        if rollout.num_valid:
            check_pass(rollout, policy, number, min(length, num_steps) if length else None)
        rollout.advance()


def complete(**options):
    rollout, envs = made("NextStep", 6, 4, 0, **options), Ages("NextStep", 4, 1)
    rollout.start(envs.obs())
    rollout.compute_advantages(collect(rollout, envs, Policy(), torch.zeros(4, 4))[0])
    return rollout


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((0,), {}, "num_minibatches must be a positive integer, got 0"),
        ((5,), {}, "num_minibatches is 5, but the rollout has 4 sequences of 6 steps"),
        ((9,), {"length": 3}, "num_minibatches is 9, but the rollout has 8 sequences"),
        ((1,), {"length": 7}, "length is 7, but the rollout has 6 steps"),
        ((1,), {"length": 0}, "length must be a positive integer, got 0"),
        ((1,), {"initial_states": ["state"]}, r"'state', expected .* \['hidden', 'masks'\]"),
    ],
)
def test_mistakes_are_named_at_the_call(args, options, message):
    with pytest.raises(BufferMisuseError, match=message):
        complete().sequences(*args, **options)
