"""Goals in hindsight: laws of their distances, a slow twin, nested goals, rewards anew."""

import numpy as np
import pytest
import torch
from episodes import ACTIONS, make_buffer, make_episode, slow_bound
from gymnasium import spaces

from buffers import BufferMisuseError, EpisodicReplayBuffer
from buffers.core.kernels import random_word, unit_float
from buffers.episodic.draws import Steps

BOUNDARIES, LENGTHS = [2, 5, 6, 11], (15, 4, 1)


def slow_room(strategy, length, t):
    """How many later observations can be the goal."""
    return (length if strategy == "future" else slow_bound(length, BOUNDARIES, t)) - t


def filled(**options):
    buffer = make_buffer(**options)
    for number, length in enumerate(LENGTHS):
        buffer.add_episode(make_episode(number, length, [b for b in BOUNDARIES if b < length]))
    return buffer


@pytest.mark.parametrize("strategy, discount", [
    ("future", 1.0), ("future", 0.9), ("final", 1.0), ("episode", 1.0), ("bound", 0.5),
])  # fmt: skip
def test_goals_equal_those_of_a_slow_twin(strategy, discount):
    buffer = filled()
    table, drawn = buffer._table, []
    for first, length, _ in table.table[:3, : len(LENGTHS)].T.tolist():
        for t in range(length):
            if strategy != "bound" or slow_room("bound", length, t) > 0:
                drawn.append((first, length, t))
    key, counter = buffer._generator.words.copy()
    expected, count = [], len(drawn)
    with np.errstate(over="ignore"):
        words = [random_word(key, counter + np.uint64(k)) for k in range(2 * count)]
    uniforms = [unit_float(np.uint64(word)) for word in words]
    for u, (_, length, t) in zip(uniforms[count:], drawn, strict=True):
        if strategy == "final":
            goal = length
        elif strategy == "episode":
            goal = 1 + int(u * length)
        else:
            law = float(discount) ** np.arange(slow_room(strategy, length, t))
            goal = t + 1 + int(np.searchsorted(np.cumsum(law / law.sum()), u, side="right"))
        expected.append(goal - t)
    steps = Steps(*torch.tensor(drawn).T)
    later, used = buffer._draws.goals(steps, strategy, 0.4, discount)
    assert later.tolist() == expected
    assert used.tolist() == [u < 0.4 for u in uniforms[:count]]


PLACE = spaces.Dict(
    cube=spaces.Box(-1, 99, (2,), np.float32), held=spaces.Tuple([spaces.Discrete(99)])
)
SPACE = spaces.Dict(observation=spaces.Discrete(99), achieved_goal=PLACE, desired_goal=PLACE)


def nested_buffer(**options):
    extra = {"effort": spaces.Box(0, 9, ())}
    buffer = EpisodicReplayBuffer(100, SPACE, ACTIONS, extra_columns=extra, seed=0, **options)
    for length in (6, 3):
        steps = np.arange(length + 1)
        reached = {"cube": np.stack([steps, steps], 1), "held": (steps,)}
        goal = {"cube": np.full((length + 1, 2), 50), "held": (np.full(length + 1, 50),)}
        buffer.add_episode({
            "obs": {"observation": steps, "achieved_goal": reached, "desired_goal": goal},
            "actions": steps[:-1], "rewards": np.full(length, -7.0),
            "effort": np.ones(length, np.float32), "terminations": steps[:-1] == length - 1,
        })  # fmt: skip
    return buffer


@pytest.mark.parametrize("staged", [False, True], ids=["compiled", "staged"])
def test_nested_goals_are_exchanged_with_rewards_and_ends(staged):
    buffer = nested_buffer(staged=staged)

    def is_there(achieved, desired):
        return np.linalg.norm(achieved["cube"] - desired["cube"], axis=-1) < 0.5

    def compute_reward(achieved, desired, extras):
        return is_there(achieved, desired) - np.asarray(extras["effort"])

    def compute_terminated(achieved, desired, extras):
        return is_there(achieved, desired) & (achieved["held"][0] == desired["held"][0])

    batch = buffer.sample_goals(
        400, relabel_ratio=0.5, compute_reward=compute_reward, compute_terminated=compute_terminated
    )
    mask, goal = batch.relabelled, batch.goal_obs["achieved_goal"]
    for obs in (batch.obs, batch.next_obs):
        assert torch.equal(obs["desired_goal"]["cube"][mask], goal["cube"][mask])
        assert torch.equal(obs["desired_goal"]["held"][0][mask], goal["held"][0][mask])
        assert (obs["desired_goal"]["cube"][~mask] == 50).all()
    reached = batch.goal_offsets == 1
    assert torch.equal(batch.rewards[mask], torch.where(reached, 0.0, -1.0)[mask])
    assert (batch.rewards[~mask] == -7).all()
    assert torch.equal(batch.terminations[mask], reached[mask])
    last = (batch.actions == 5) | ((batch.actions == 2) & (batch.goal_offsets <= 1))
    assert not batch.terminations[~mask & ~last].any() and batch.terminations[~mask].any()
    assert buffer.episode(0)["obs"]["desired_goal"]["cube"].unique().tolist() == [50]


@pytest.mark.parametrize("made, message", [
    (np.zeros((8, 1)), r"compute_reward returned shape \(8, 1\), expected \(8,\)"),
    (np.full(8, np.nan), "compute_reward returned nan, expected finite numbers"),
])  # fmt: skip
def test_what_a_reward_function_returns_is_checked(made, message):
    with pytest.raises(BufferMisuseError, match=message):
        nested_buffer().sample_goals(8, compute_reward=lambda *given: made)


@pytest.mark.parametrize("value", [-1.0, 0.5, 2, np.nan])
def test_what_says_where_episodes_end_is_a_flag(value):
    with pytest.raises(BufferMisuseError, match=r"compute_terminated returned .*, expected f"):
        nested_buffer().sample_goals(8, compute_terminated=lambda *given: np.full(8, value))


def test_goals_that_are_not_alike_are_refused():
    with pytest.raises(BufferMisuseError, match=r"observation has the parts .*, but desired_goal"):
        nested_buffer().sample_goals(8, achieved="observation")
    with pytest.raises(BufferMisuseError, match="none with a later one in its bound"):
        buffer = make_buffer()
        buffer.add_episode(make_episode(0, 1))
        buffer.sample_goals(4, "bound")
