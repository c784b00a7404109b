"""All buffers give the same answer to the same argument."""

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
    gae,
)
from buffers.core.arguments import read_array, resolve_device

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
def test_rewards_whose_sum_overflows_float32_are_taken(add):
    assert len(add(columns(rewards=np.full(4, 3e38, np.float32)))) == 4
    assert len(add(columns(rewards=torch.full((4,), 3e38)))) == 4


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


def test_flags_of_gae_may_be_integers_0_and_1():
    rewards, values = np.ones((3, 2), np.float32), np.arange(8, dtype=np.float32).reshape(4, 2)
    ends = np.array([[0, 1], [1, 0], [0, 0]])
    for convert in (np.asarray, torch.as_tensor):
        given = convert(rewards), convert(values)
        right = gae(*given, convert(ends == 1), convert(ends[::-1] == 1))
        found = gae(*given, convert(ends), convert(ends[::-1].astype(np.uint8)))
        assert (right[0] == found[0]).all() and (right[1] == found[1]).all()
        with pytest.raises(BufferMisuseError, match="terminations has 2, expected bool, or int"):
            gae(*given, convert(ends * 2), convert(ends))


NAMES = ["link", "size", "memory", "obs", "indices", "weights", "extras", "env_ids", "self"]
EPISODIC_NAMES = ["step", "room", "mask", "offsets", "boundaries", "count", "goal_obs", "memory"]


@pytest.mark.parametrize(
    ("kind", "names"), [(SharedReplayBuffer, NAMES), (EpisodicReplayBuffer, EPISODIC_NAMES)]
)
def test_names_of_columns_that_buffers_use_themselves_are_refused(kind, names):
    for name in (*names, "no identifier", 3):
        with pytest.raises(BufferMisuseError, match=f"column {name!r} has a name that is taken"):
            kind(10, *SPACES, num_envs=1, extra_columns={name: Box(0, 1)})


@EVERYWHERE
def test_bfloat16_is_read_as_float32(add):
    given = torch.tensor([1.5, 2.5, -3.0, 0.0], dtype=torch.bfloat16)
    buffer = add(columns(rewards=given, note=given), extra_columns={"note": Box(-9, 9, ())})
    stored = buffer.episode(0) if hasattr(buffer, "episode") else None
    if stored is None:
        stored = buffer if isinstance(buffer, TrajectoryBuffer) else buffer.rows()
    assert stored["rewards"][:4].tolist() == stored["note"][:4].tolist() == given.tolist()


def test_an_episode_of_one_step_may_have_next_obs():
    one = {name: column[:1] for name, column in columns().items()}
    buffer = add_episode({**one, "truncations": [True]})
    assert buffer.episode_lengths.tolist() == [1]
    assert buffer.episode(0)["obs"].tolist() == [[0.0, 0.5], [1.0, 1.5]]


class OnDevice(torch.Tensor):
    """A tensor that says it lies on the first GPU."""

    @property
    def device(self):
        return torch.device("cuda:0")

    is_cpu = False


def test_tensors_of_cuda_0_are_those_of_cuda(monkeypatch):
    tensor = torch.ones(3).as_subclass(OnDevice)
    with monkeypatch.context() as patch:  # the current device is the first
        patch.setattr(torch, "empty", lambda _, device: torch.ones(1).as_subclass(OnDevice))
        resolved = resolve_device("cuda")
    assert resolved == torch.device("cuda:0")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert read_array("rewards", tensor, (3,), np.dtype(np.float32), resolved).tolist() == [1] * 3
    with pytest.raises(BufferMisuseError, match="lies on cuda:0, expected the CPU or cuda:1; move"):
        read_array("rewards", tensor, (3,), np.dtype(np.float32), torch.device("cuda:1"))


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


@pytest.mark.parametrize("staged", [False, True])
def test_priorities_may_be_bfloat16(staged):
    buffer = PrioritizedReplayBuffer(10, *SPACES, alpha=1.0, staged=staged)
    buffer.add(**columns())
    buffer.update_priorities(torch.arange(3), torch.tensor([0.5, 2.0, 3.0], dtype=torch.bfloat16))
    assert buffer.priorities[:4].tolist() == [0.5, 2.0, 3.0, 1.0]


class Larger(np.ndarray):
    """Says that it has more rows than it has."""

    @property
    def shape(self):
        return (1000, *np.ndarray.shape.__get__(self)[1:])

    def __len__(self):
        return 1000


@pytest.mark.parametrize("name", ["rewards", "values", "terminations"])
def test_gae_does_not_believe_what_a_class_says_of_its_shape(name):
    arrays = {
        "rewards": np.zeros((1000, 2)),
        "values": np.zeros((1001, 2)),
        "terminations": np.zeros((1000, 2), bool),
        "truncations": np.zeros((1000, 2), bool),
    }
    arrays[name] = arrays[name][:3].view(Larger)
    with pytest.raises(BufferMisuseError, match="expected ndarray"):
        gae(**arrays)


def test_read_only_and_reversed_arrays_are_put_like_others():
    rollout = RolloutBuffer(1, 3, Box(-1, 1, (2,)), Discrete(2), autoreset_mode="SameStep")
    rollout.start(np.zeros((3, 2), np.float32))
    values = np.arange(3.0)[::-1]
    values.flags.writeable = False
    rollout.put(0, actions=np.ones(3, ">i8"), log_probs=np.zeros(3), values=values)
    assert rollout.values[0].tolist() == [2, 1, 0]
    assert rollout.actions[0].tolist() == [1, 1, 1]


def test_actions_that_their_dtype_cannot_hold_are_not_put():
    rollout = RolloutBuffer(
        1, 1, Box(-1, 1, (2,)), Box(0, 9, (), np.int32), autoreset_mode="SameStep"
    )
    rollout.start(np.zeros((1, 2), np.float32))
    with pytest.raises(BufferMisuseError, match="actions has dtype"):
        rollout.put(0, actions=np.array([2**40]), log_probs=np.zeros(1), values=np.zeros(1))


def test_a_step_that_only_equals_a_number_changes_nothing():
    """`True` indexes all rows of an array."""
    rollout = RolloutBuffer(3, 1, Box(-1, 1, (2,)), Discrete(2), autoreset_mode="SameStep")
    rollout.start(np.zeros((1, 2), np.float32))
    rollout.write_obs(True, np.ones((1, 2), np.float32))
    assert rollout.obs[:, 0, 0].tolist() == [0, 1, 0, 0]
    with pytest.raises(TypeError):
        rollout.write_obs(np.array([2]), np.ones((1, 2), np.float32))
    assert rollout.obs[:, 0, 0].tolist() == [0, 1, 0, 0]
