"""Copies and pickles of buffers and batches."""

import copy
import pickle

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode
from replay_model import RINGS
from staged_rollouts import make_rollout

from buffers import (
    BufferMisuseError,
    EpisodicReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
    TrajectoryBuffer,
    TransitionWriter,
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


@pytest.mark.parametrize("kind", RINGS)
def test_views_of_a_copied_ring_are_of_one_memory(kind, duplicate):
    buffer = make_ring(kind, n_step=1, store_next=True)
    made = duplicate(buffer)
    made.add(**make_steps(np.random.default_rng(0)))
    made.rows()["rewards"][:] = 5.0
    assert made.get(made.order()[:1]).rewards.tolist() == [5.0]
    assert not buffer.rows()["rewards"].any()


def test_a_copied_buffer_keeps_priorities_and_exponents(duplicate):
    buffer = make_ring(PrioritizedReplayBuffer, alpha=0.7, beta=0.5)
    buffer.add(**make_steps(np.random.default_rng(0)))
    buffer.update_priorities([0, 1], [3.0, 0.5])
    buffer.beta = 0.9  # annealed
    made = duplicate(buffer)
    assert torch.equal(made.priorities, buffer.priorities)
    assert (made.alpha, made.beta) == (0.7, 0.9)
    assert torch.equal(made.sample(8).weights, buffer.sample(8).weights)


def test_a_copy_of_a_subclass_needs_nothing_of_its_constructor(duplicate):
    made = duplicate(Numbered(20))
    assert type(made) is Numbered and made.capacity == 20


class Numbered(SharedReplayBuffer):
    """Has a constructor of its own."""

    def __init__(self, number):
        super().__init__(number, SPACE, ACTIONS)


@pytest.mark.parametrize("staged", [False, True])
def test_a_copied_episodic_buffer_takes_steps_and_episodes(staged, duplicate):
    rng = np.random.default_rng(0)
    space = Box(-1, 1, (2,), np.float64)
    buffer = EpisodicReplayBuffer(30, space, ACTIONS, num_envs=2, seed=3, staged=staged)

    def add(target, t, over):
        target.add(
            obs=np.full((2, 2), t, float), next_obs=np.full((2, 2), t + 1, float),
            actions=np.zeros(2, int), rewards=np.ones(2), terminations=np.full(2, over),
            truncations=np.zeros(2, bool),
        )  # fmt: skip

    for t in range(25):
        add(buffer, t, t % 7 == 6)
    made = duplicate(buffer)
    assert made.open_lengths.tolist() == buffer.open_lengths.tolist() == [4, 4]
    assert made.episode_lengths.tolist() == buffer.episode_lengths.tolist()
    for target in (made, buffer):
        add(target, 25, True)
    obs = rng.normal(size=(6, 2))
    for target in (made, buffer):
        target.add_episode({"obs": obs, "actions": np.zeros(5, int), "rewards": np.ones(5)})
        assert target.episode_lengths[-3:].tolist() == [5, 5, 5]
        assert torch.equal(target.episode(-1)["obs"], torch.from_numpy(obs))
    left, right = made.sample(32), buffer.sample(32)
    assert torch.equal(left.obs, right.obs) and torch.equal(left.offsets, right.offsets)


@pytest.mark.parametrize("staged", [False, True])
def test_a_rollout_is_not_copied_and_says_what_to_do_instead(staged, duplicate):
    rollout = make_rollout(3, 2, SPACE, ACTIONS, autoreset_mode="SameStep", staged=staged)
    with pytest.raises(BufferMisuseError, match="not copied; load its state_dict"):
        duplicate(rollout)


@pytest.mark.parametrize("duplicate", [WAYS["deepcopy"], WAYS["pickle"]])
def test_a_copied_trajectory_buffer_has_memory_of_its_own(duplicate):
    buffer = TrajectoryBuffer(2, SPACE, ACTIONS)
    steps = make_steps(np.random.default_rng(0), 5)
    given = {name: steps[name] for name in steps if name not in ("next_obs", "note")}
    buffer.update([given, given])
    made = duplicate(buffer)
    assert made.capacity == buffer.capacity and made.offsets.tolist() == [0, 5, 10]
    assert torch.equal(made["obs"]["place"], buffer["obs"]["place"])
    buffer.update([given])
    assert len(made) == 10
    assert made.update([given] * 3).num_steps == 15


def test_a_copied_writer_feeds_the_buffer_copied_with_it():
    class Envs:
        metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        num_envs, single_observation_space, single_action_space = 2, Box(-1, 1, (1,)), ACTIONS

    buffer = SharedReplayBuffer(20, Envs.single_observation_space, ACTIONS, num_envs=2)
    writer = TransitionWriter(Envs, buffer)
    writer.reset(np.zeros((2, 1), np.float32))
    flags = np.zeros(2, bool)
    step = np.zeros(2, int), np.ones((2, 1), np.float32), np.ones(2), flags, flags, {}
    writer.step(*step)
    made, made_writer = copy.deepcopy((buffer, writer))
    made_writer.step(*step)
    assert (len(buffer), len(made)) == (2, 4)
    assert made.rows()["obs"][:4, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("staged", [False, True])
def test_a_copied_batch_keeps_its_values_when_the_memory_is_used_again(staged, duplicate):
    buffer = make_ring(SharedReplayBuffer, staged)
    for seed in range(5):
        buffer.add(**make_steps(np.random.default_rng(seed)))
    batch = buffer.sample(64)
    made, again = duplicate(batch), duplicate(batch)
    assert equal_batches(made, batch)
    buffer.sample(64, out=batch)
    assert equal_batches(made, again) and not equal_batches(made, batch)
    with pytest.raises(BufferMisuseError, match="expected a batch that new_batch or sample"):
        buffer.sample(64, out=made)


@pytest.mark.parametrize("staged", [False, True])
def test_copied_batches_of_episodes_keep_their_values(staged, duplicate):
    buffer = EpisodicReplayBuffer(90, Box(-1, 1, (2,)), ACTIONS, seed=0, staged=staged)
    obs = np.random.default_rng(0).normal(size=(31, 2)).astype(np.float32)
    for _ in range(3):
        buffer.add_episode({"obs": obs, "actions": np.zeros(30, int), "rewards": np.arange(30.0)})
    batch = buffer.sample(16)
    made, rewards = duplicate(batch), batch.rewards.clone()
    batch.rewards += 1
    assert torch.equal(made.rewards, rewards)
    assert torch.equal(made.obs, torch.from_numpy(obs)[made.rewards.long()])
    for other in (
        buffer.sample_sequences(4, 5), buffer.sample_stacks(4, 2), buffer.sample_goals(4)
    ):  # fmt: skip
        twin = duplicate(other)
        assert torch.equal(twin.obs, other.obs) and torch.equal(twin.rewards, other.rewards)
