"""What all kinds of batches have in common."""

import copy
import pickle

import numpy as np
import pytest
import torch
from choices import fast_are, product
from gymnasium.spaces import Box, Dict, Discrete
from staged_rollouts import make_rollout

from buffers import (
    Batch,
    EpisodicReplayBuffer,
    GoalBatch,
    PairBatch,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBatch,
    RolloutBatch,
    SequenceBatch,
    SharedReplayBuffer,
    StackBatch,
)

SPACES = {"flat": Box(-1, 1, (3,)), "nested": Dict({"a": Box(-1, 1, (3,)), "b": Discrete(5)})}
EXTRA = {"costs": Box(0, 9, ()), "plan": Box(-1, 1, (2,), np.float64)}
NUM_ENVS, NUM_STEPS = 2, 20

FIELDS = {
    RolloutBatch: ("obs", "actions", "log_probs", "values", "advantages", "returns"),
    ReplayBatch: (
        *("obs", "next_obs", "actions", "rewards", "terminations", "truncations", "discounts"),
    ),
    PairBatch: (
        *("obs", "future_obs", "offsets", "actions", "rewards", "terminations", "truncations"),
    ),
    SequenceBatch: (
        *("obs", "next_obs", "actions", "rewards", "terminations", "truncations"),
        *("boundaries", "steps", "mask"),
    ),
    StackBatch: (
        *("obs", "next_obs", "actions", "rewards", "terminations", "truncations", "steps"),
    ),
    GoalBatch: (
        *("obs", "next_obs", "actions", "rewards", "terminations", "truncations"),
        *("goal_obs", "goal_offsets", "relabelled"),
    ),
}


def make_obs(space, count):
    if isinstance(space, Dict):
        return {key: make_obs(part, count) for key, part in space.spaces.items()}
    return np.ones((count, *space.shape), space.dtype)


def step_of(space, count):
    return {
        "obs": make_obs(space, count), "next_obs": make_obs(space, count),
        "actions": np.ones(count, int), "rewards": np.ones(count), "costs": np.arange(count) * 1.0,
        "terminations": np.zeros(count, bool), "truncations": np.zeros(count, bool),
        "plan": np.ones((count, 2)),
    }  # fmt: skip


def rollout_batch(space, staged):
    rollout = make_rollout(
        NUM_STEPS, NUM_ENVS, space, Discrete(2), autoreset_mode="NextStep", seed=0,
        extra_columns=EXTRA, staged=staged,
    )  # fmt: skip
    rollout.start(make_obs(space, NUM_ENVS))
    ones = torch.ones(NUM_ENVS, device="cpu")
    for t in range(NUM_STEPS):
        extras = {"costs": ones * t, "plan": torch.ones(NUM_ENVS, 2, device="cpu")}
        rollout.put(t, actions=ones.long(), log_probs=-ones, values=ones, **extras)
        for array in rollout.slot(t)[1:]:
            array[:] = 0
    rollout.compute_advantages(0 * ones)
    return next(rollout.minibatches(5))


def ring_batch(kind, **options):
    def draw(space, staged):
        given = {"extra_columns": EXTRA, "staged": staged, "seed": 0, "num_envs": NUM_ENVS}
        buffer = kind(100, space, Discrete(2), **given, **options)
        buffer.add(**step_of(space, 40))
        buffer.load_state_dict(buffer.state_dict())
        return buffer.sample(8)

    return draw


def episodic_batch(method, *args):
    def draw(space, staged):
        given = {"extra_columns": EXTRA, "staged": staged, "seed": 0}
        buffer = EpisodicReplayBuffer(100, space, Discrete(2), **given)
        steps = step_of(space, 30)
        buffer.add_episode({k: v for k, v in steps.items() if not k.endswith("ations")})
        return getattr(buffer, method)(8, *args)

    return draw


KINDS = {
    "rollout": (RolloutBatch, rollout_batch),
    "shared": (ReplayBatch, ring_batch(SharedReplayBuffer)),
    "n steps": (ReplayBatch, ring_batch(SharedReplayBuffer, n_step=3, gamma=0.9)),
    "stored once": (ReplayBatch, ring_batch(SharedReplayBuffer, store_next=False)),
    "per env": (ReplayBatch, ring_batch(PerEnvReplayBuffer, track_env=True)),
    "prioritized": (ReplayBatch, ring_batch(PrioritizedReplayBuffer, gamma=0.9)),
    "pairs": (PairBatch, episodic_batch("sample")),
    "sequences": (SequenceBatch, episodic_batch("sample_sequences", 4)),
    "stacks": (StackBatch, episodic_batch("sample_stacks", 4)),
    "goals": (GoalBatch, episodic_batch("sample_goals")),
}


def leaves(column):
    if isinstance(column, dict):
        return [leaf for part in column.values() for leaf in leaves(part)]
    return [column]


def assert_same(left, right):
    assert type(left) is type(right)
    for one, other in zip((*left, left.extras), (*right, right.extras), strict=True):
        torch.testing.assert_close(leaves(one), leaves(other), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("space", "staged"),
    fast_are([("flat", False), ("nested", True)], product(SPACES, [False, True])),
)
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_batches_are_used_alike(kind, space, staged):
    batch_class, draw = KINDS[kind]
    batch = draw(SPACES[space], staged)
    assert type(batch) is batch_class
    assert isinstance(batch, Batch)
    assert len(batch) == len(batch.actions) == 8
    # Unpacking: the columns in the order documented, each a tensor or a nest of tensors.
    names = FIELDS[batch_class]
    columns = list(batch)
    assert len(columns) == len(names)
    for name, column in zip(names, columns, strict=True):
        for given, named in zip(leaves(column), leaves(getattr(batch, name)), strict=True):
            assert given.equal(named)
            assert len(given) == 8
    if batch_class is ReplayBatch and kind != "n steps":  # by `fuzz.replays`
        assert (batch.discounts == (0.9 if kind == "prioritized" else 1.0)).all()
    # The columns that the user declared.
    assert list(batch.extras) == list(EXTRA)
    for name, column in batch.extras.items():
        assert getattr(batch, name) is column
        assert column.dtype is (torch.float32 if name == "costs" else torch.float64)
    with pytest.raises(AttributeError, match=rf"a {batch_class.__name__} has no 'cost'; .* costs"):
        _ = batch.cost
    # A short text without values.
    text = repr(batch)
    assert text.startswith(f"{batch_class.__name__}(8 rows of obs, ")
    assert len(text) < 700
    assert "\n" not in text
    assert "tensor" not in text
    # Copies.
    replaced = batch._replace(actions=batch.actions + 1)
    assert replaced.actions.equal(batch.actions + 1)
    assert replaced.obs is batch.obs
    with pytest.raises(ValueError, match=r"no columns \['action'\]"):
        batch._replace(action=batch.actions)
    assert set(names) <= set(batch._asdict())
    assert_same(copy.deepcopy(batch), batch)
    pickled = pickle.dumps(batch)
    assert_same(pickle.loads(pickled), batch)
    assert len(pickled) < 20_000, "nothing of the memory around it"


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_device_of_a_context_is_not_that_of_host_memory(kind, staged):
    with torch.device("meta"):
        batch = KINDS[kind][1](SPACES["flat"], staged)
    assert all(leaf.device.type == "cpu" for leaf in leaves(batch.obs))
