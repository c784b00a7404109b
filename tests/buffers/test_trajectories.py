"""TrajectoryBuffer: where steps lie, what it refuses, and that it allocates nothing."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from buffers import BufferMemoryError, BufferMisuseError, TrajectoryBuffer

SPACE, ACTIONS = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(5)
EXTRA = {"log_probs": spaces.Box(-9, 9, ())}


def make_buffer(capacity=10, space=SPACE, **options):
    return TrajectoryBuffer(capacity, space, ACTIONS, **{"extra_columns": EXTRA, **options})


def make_trajectory(steps, seed=0, as_tensors=False):
    rng = np.random.default_rng(seed)
    trajectory = {
        "obs": rng.random((steps, 3), np.float32),
        "actions": rng.integers(0, 5, steps),
        "rewards": rng.random(steps, np.float32),
        "terminations": rng.random(steps) < 0.1,
        "truncations": rng.random(steps) < 0.1,
        "log_probs": rng.random(steps, np.float32),
    }
    if as_tensors:
        return {name: torch.from_numpy(array) for name, array in trajectory.items()}
    return trajectory


@pytest.mark.parametrize("as_tensors", [False, True])
def test_trajectories_lie_one_behind_the_other(as_tensors):
    buffer = make_buffer()
    for seed, lengths in enumerate([[3, 5], [1, 0, 40, 7], [2], []]):
        trajectories = [make_trajectory(n, 10 * seed + n, as_tensors) for n in lengths]
        stats = buffer.update(trajectories)
        assert stats.num_steps == len(buffer) == sum(lengths)
        assert buffer.offsets.tolist() == [0, *np.cumsum(lengths)]
        for name in make_trajectory(1):
            parts = [np.asarray(trajectory[name]) for trajectory in trajectories]
            expected = np.concatenate(parts) if parts else np.zeros(0)
            assert buffer[name].flatten().tolist() == expected.flatten().tolist()
        if lengths:
            rewards = np.concatenate([np.asarray(t["rewards"]) for t in trajectories])
            assert stats.mean_reward == pytest.approx(rewards.mean(dtype=np.float64), rel=1e-6)
    assert stats.mean_reward == 0


@pytest.mark.parametrize("as_tensors", [False, True])
def test_steps_in_which_an_agent_did_not_act_are_left_out(as_tensors):
    buffer = make_buffer()
    trajectories = [make_trajectory(n, n, as_tensors) for n in (5, 4, 3)]
    valid = [np.array([True, False, True, True, False]), None, np.zeros(3, bool)]
    for trajectory, own in zip(trajectories, valid, strict=True):
        if own is not None:
            trajectory["valid"] = torch.from_numpy(own) if as_tensors else own
    stats = buffer.update(trajectories)
    assert buffer.offsets.tolist() == [0, 3, 7, 7]
    for name in make_trajectory(1):
        first, second = (np.asarray(trajectory[name]) for trajectory in trajectories[:2])
        expected = np.concatenate([first[valid[0]], second])
        assert buffer[name].flatten().tolist() == expected.flatten().tolist()
    assert stats.mean_reward == pytest.approx(buffer["rewards"].mean().item(), rel=1e-6)
    with pytest.raises(BufferMisuseError, match=r"trajectory 0: valid has shape \(4,\), expected"):
        buffer.update([{**make_trajectory(3), "valid": np.ones(4, bool)}])
    with pytest.raises(BufferMisuseError, match=r"trajectory 0: valid has dtype .*float64"):
        buffer.update([{**make_trajectory(3), "valid": np.ones(3)}])
    assert len(buffer) == 7


def test_memory_doubles_at_least_and_stays_otherwise():
    buffer = make_buffer(10)
    capacities = []
    for steps in (8, 10, 11, 20, 100, 5):
        buffer.update([make_trajectory(steps)])
        capacities.append(buffer.capacity)
    assert capacities == [10, 10, 20, 20, 100, 100]
    pointer = buffer["obs"].data_ptr()
    buffer.update([make_trajectory(60), make_trajectory(40)])
    assert buffer["obs"].data_ptr() == pointer
    assert buffer.memory() == {n: 10 * size for n, size in make_buffer(10).memory().items()}


GOOD = make_trajectory(4)
BAD = {
    "missing": ({k: GOOD[k] for k in GOOD if k != "actions"}, r"trajectory 1 has the columns"),
    "unknown": ({**GOOD, "reward": GOOD["rewards"]}, "trajectory 1 has the columns"),
    "no dict": ([1, 2], "trajectory 1 has the columns <class 'list'>"),
    "lengths": (
        {**GOOD, "actions": np.zeros(3, int)},
        r"actions has shape \(3,\), expected \(4,\)",
    ),
    "shape": ({**GOOD, "obs": np.zeros((4, 2))}, r"obs has shape \(4, 2\), expected \(4, 3\)"),
    "scalar": ({**GOOD, "obs": 1.0}, r"obs has shape \(\)"),
    "dtype": ({**GOOD, "actions": np.zeros(4)}, "dtype float64, expected int64"),
    "complex": ({**GOOD, "rewards": np.zeros(4, complex)}, "rewards has dtype complex128"),
    "text": ({**GOOD, "rewards": np.array(list("abcd"))}, "rewards must be a tensor or an array"),
    "NaN": ({**GOOD, "rewards": np.array([0, np.nan, 0, 0])}, "trajectory 1: rewards.1. is nan"),
    "device": ({**GOOD, "actions": torch.zeros(4, dtype=int, device="meta")}, "lies on meta"),
}


@pytest.mark.parametrize("bad, message", BAD.values(), ids=BAD)
def test_bad_trajectories_are_refused_and_change_nothing(bad, message):
    buffer = make_buffer()
    buffer.update([make_trajectory(3, seed=5)])
    with pytest.raises(BufferMisuseError, match=message):
        buffer.update([GOOD, bad])
    assert len(buffer) == 3
    assert buffer["obs"].tolist() == make_trajectory(3, seed=5)["obs"].tolist()


def test_bad_arguments_are_refused(set_free_bytes):
    for capacity in (0, -1, 1.5):
        with pytest.raises(BufferMisuseError, match="capacity must be a positive integer"):
            make_buffer(capacity)
    buffer = make_buffer(4)
    buffer.update([GOOD])
    for name in ("next_obs", "obs['a']"):
        with pytest.raises(BufferMisuseError, match="no column"):
            buffer[name]
    set_free_bytes(100)
    with pytest.raises(BufferMemoryError, match="a trajectory buffer of 8 steps needs"):
        buffer.update([GOOD, GOOD])
    assert buffer["rewards"].tolist() == GOOD["rewards"].tolist()
