"""All buffers give the same answer to the same argument."""

import contextlib

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from replay_model import RINGS

from buffers import (
    BufferMisuseError,
    EpisodicReplayBuffer,
    PrioritizedReplayBuffer,
    RolloutBuffer,
    SharedReplayBuffer,
    TrajectoryBuffer,
)

SPACES = Box(-9, 9, (2,)), Discrete(2)
NUM_STEPS = 4


def columns(**changes):
    """Four steps of one env, in order."""
    obs = np.arange(10.0, dtype=np.float32).reshape(5, 2) / 2
    flags = np.zeros(4, bool)
    made = {
        "obs": obs[:4], "next_obs": obs[1:], "actions": np.zeros(4, int), "rewards": np.ones(4),
        "terminations": flags, "truncations": np.arange(4) == 3,
    }  # fmt: skip
    return {**made, **changes}


def add_to_ring(kind, **options):
    def add(given, **made):
        buffer = kind(10, *SPACES, num_envs=1, **options, **made)
        buffer.add(**given)
        return buffer

    return add


def add_episode(given, **made):
    buffer = EpisodicReplayBuffer(10, *SPACES, **made)
    buffer.add_episode(given)
    return buffer


def add_steps(given, **made):
    buffer = EpisodicReplayBuffer(10, *SPACES, num_envs=1, **made)
    for t in range(NUM_STEPS):
        buffer.add(**{name: column[t : t + 1] for name, column in given.items()})
    return buffer


def update(given, **made):
    buffer = TrajectoryBuffer(10, *SPACES, **made)
    buffer.update([{name: column for name, column in given.items() if name != "next_obs"}])
    return buffer


ADDERS = {kind.__name__: add_to_ring(kind) for kind in RINGS}
ADDERS |= {"staged": add_to_ring(SharedReplayBuffer, staged=True)}
ADDERS |= {"episode": add_episode, "steps": add_steps, "trajectory": update}
EVERYWHERE = pytest.mark.parametrize("add", ADDERS.values(), ids=ADDERS)


@EVERYWHERE
def test_rewards_that_are_not_finite_are_refused(add):
    for wrong, said in ((np.inf, "inf"), (-np.inf, "-inf"), (np.nan, "nan"), (1e39, "inf")):
        for convert in (np.asarray, torch.as_tensor):
            rewards = convert(np.array([0.0, 1.0, wrong, 2.0]))
            with pytest.raises(BufferMisuseError, match=rf"rewards\[.\] is {said} as float32"):
                add(columns(rewards=rewards))


@EVERYWHERE
@pytest.mark.parametrize("dtype", [np.uint8, torch.int32])
def test_flags_may_be_integers_0_and_1(dtype, add):
    flags = np.array([0, 0, 0, 1])
    convert = np.asarray if isinstance(dtype, type) else torch.as_tensor
    buffer = add(columns(truncations=convert(flags, dtype=dtype)))
    stored = buffer.episode(0) if hasattr(buffer, "episode") else None
    stored = buffer["truncations"] if isinstance(buffer, TrajectoryBuffer) else (
        buffer.rows()["truncations"][:4] if stored is None else stored["truncations"]
    )  # fmt: skip
    assert stored.dtype is torch.bool and stored.tolist() == [False, False, False, True]
    with pytest.raises(BufferMisuseError, match="truncations has"):
        add(columns(truncations=convert(flags * 2, dtype=dtype)))
    with pytest.raises(BufferMisuseError, match="truncations has"):
        add(columns(truncations=flags.astype(float)))


NAMES = ["link", "size", "memory", "obs", "indices", "weights", "extras", "env_ids", "self"]
EPISODIC_NAMES = ["step", "room", "mask", "offsets", "boundaries", "count", "goal_obs", "memory"]


@pytest.mark.parametrize(
    ("kind", "names"), [(SharedReplayBuffer, NAMES), (EpisodicReplayBuffer, EPISODIC_NAMES)]
)
def test_names_of_columns_that_buffers_use_themselves_are_refused(kind, names):
    for name in (*names, "no identifier", 3):
        with pytest.raises(BufferMisuseError, match=f"column {name!r} has a name that is taken"):
            kind(10, *SPACES, num_envs=1, extra_columns={name: Box(0, 1)})


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("alpha", "wrong"), [(2.0, 1e200), (1.0, 1e308), (0.6, np.inf), (2.0, -1.0), (0.6, np.nan)]
)
def test_priorities_whose_powers_or_sums_overflow_are_refused(alpha, wrong, staged):
    buffer = PrioritizedReplayBuffer(10, *SPACES, alpha=alpha, seed=0, staged=staged)
    for _ in range(2):
        buffer.add(**columns())
    before = buffer.priorities
    with pytest.raises(BufferMisuseError, match=r"priorities\[1\] .* so that no sum overflows"):
        buffer.update_priorities([0, 1], [2.0, wrong])
    assert torch.equal(buffer.priorities, before)
    largest = buffer._bound
    buffer.update_priorities(range(8), [largest] * 8)
    buffer.add(**columns())  # as large
    assert torch.isfinite(buffer.priorities.sum())
    assert set(buffer.sample(100).indices.tolist()) == set(range(10))


def test_actions_that_their_dtype_cannot_hold_are_not_put():
    rollout = RolloutBuffer(
        1, 1, Box(-1, 1, (2,)), Box(0, 9, (), np.int32), autoreset_mode="SameStep"
    )
    rollout.start(np.zeros((1, 2), np.float32))
    with pytest.raises(BufferMisuseError, match="actions has dtype"):
        rollout.put(0, actions=np.array([2**40]), log_probs=np.zeros(1), values=np.zeros(1))


# Numbers that no integer of the machine holds, or that only look like one.
ODD = [
    2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 2**200, -1, -(2**31), -(2**63), -(2**64), 1e300,
    np.nan, np.inf, 1.5, None, "3", b"3", [], [2], {}, np.array([1, 2]), np.array("x"), 3j, int,
    np.uint64(2**63), np.datetime64("2020"), torch.tensor([3, 4]), object(), np.zeros(2, object),
]  # fmt: skip
NUMBERS = {
    "ring": (add_to_ring(PrioritizedReplayBuffer, track_episodes=True), {
        "sample": lambda b, n: b.sample(n),
        "new_batch": lambda b, n: b.new_batch(n),
        "get": lambda b, n: b.get(np.array([n])),
        "update_priorities": lambda b, n: b.update_priorities(np.array([n]), [1.0]),
        "priorities": lambda b, n: b.update_priorities([0], np.array([n])),
        "cut_episodes": lambda b, n: b.cut_episodes(np.array([n])),
        "sequences": lambda b, n: b.sample_sequences(n, 2),
        "length": lambda b, n: b.sample_sequences(2, n),
        "reserve_final_obs": lambda b, n: b.reserve_final_obs(n),
        "env_ids": lambda b, n: b.add(**columns(), env_ids=np.array([n] * 4)),
    }),
    "episodes": (add_episode, {
        "sample": lambda b, n: b.sample(n),
        "discount": lambda b, n: b.sample(2, n),
        "sequences": lambda b, n: b.sample_sequences(n, 2),
        "length": lambda b, n: b.sample_sequences(2, n),
        "goals": lambda b, n: b.sample_goals(n),
        "episode": lambda b, n: b.episode(n),
        "cut_episodes": lambda b, n: b.cut_episodes(np.array([n])),
    }),
}  # fmt: skip
SENSIBLE = (BufferMisuseError, TypeError, ValueError, IndexError, OverflowError)


@pytest.mark.parametrize(
    ("kind", "call"), [(kind, call) for kind, (_, calls) in NUMBERS.items() for call in calls]
)
@pytest.mark.filterwarnings("ignore")
def test_odd_numbers_are_refused_or_taken_and_the_buffer_goes_on(kind, call):
    add, calls = NUMBERS[kind]
    buffer = add(columns(), seed=0)
    for odd in ODD:
        with contextlib.suppress(*SENSIBLE):
            calls[call](buffer, odd)
        assert len(buffer.sample(3)) == 3
