"""Drawing from replay buffers: laws, reproducibility, caller's memory, checkpoints."""

import numpy as np
import pytest
import torch
from choices import fast_are, product
from replay_model import ACTIONS, NESTED, OBS, CountingEnvs, check_law, columns_of

from buffers import PerEnvReplayBuffer, PrioritizedReplayBuffer, ReplayBatch, SharedReplayBuffer

STAGED = pytest.mark.parametrize("staged", [False, True], ids=["compiled", "torch"])
CLASSES = {
    "shared": SharedReplayBuffer,
    "per_env": PerEnvReplayBuffer,
    "prioritized": PrioritizedReplayBuffer,
}


def filled(kind="shared", rows=30, capacity=20, num_envs=2, space=OBS, **options):
    buffer = CLASSES[kind](capacity, space, ACTIONS, num_envs=num_envs, **{"seed": 0, **options})
    ids = np.arange(rows) % num_envs
    buffer.add(**columns_of(CountingEnvs(num_envs).random_steps(ids), space), env_ids=ids)
    return buffer


def fields(batch):
    return {
        name: getattr(batch, name)
        for name in ReplayBatch.__slots__
        if name not in ("memory", "size", "extras", "drawn_from")
    }


def assert_same(left, right):
    torch.testing.assert_close(
        {name: f for name, f in fields(left).items() if f is not None},
        {name: f for name, f in fields(right).items() if f is not None},
        rtol=0,
        atol=0,
    )


def counts_of(buffer, draws=200, size=100, **options):
    out = buffer.new_batch(size)
    total = np.zeros(len(buffer.rows()["rewards"]))
    for _ in range(draws):
        drawn = buffer.sample(size, out, **options).indices.numpy()
        total += np.bincount(drawn, minlength=len(total))
    return total


@STAGED
@pytest.mark.parametrize("rows", [3, 20, 45])
def test_shared_draws_are_uniform_over_what_is_held(rows, staged):
    buffer = filled(rows=rows, staged=staged)
    held = np.arange(20) < len(buffer)
    check_law(counts_of(buffer), held.astype(float))


@STAGED
@pytest.mark.parametrize("over", ["transitions", "envs"])
def test_per_env_draws(over, staged):
    buffer = PerEnvReplayBuffer(8, OBS, ACTIONS, num_envs=4, over=over, seed=1, staged=staged)
    ids = np.repeat([0, 1, 3], [3, 20, 1])
    buffer.add(**columns_of(CountingEnvs(4).random_steps(ids)), env_ids=ids)
    assert buffer.counts.tolist() == [3, 8, 0, 1]
    weights = np.zeros((4, 8))
    for env, count in enumerate(buffer.counts):
        weights[env, :count] = 1 if over == "transitions" else 1 / max(count, 1)
    check_law(counts_of(buffer), weights.reshape(-1))


@pytest.mark.parametrize(
    ("kind", "staged"),
    fast_are([("shared", True), ("per_env", False)], product(["shared", "per_env"], [False, True])),
)
@pytest.mark.parametrize(("size", "count"), [(2, 5), (4, 4)])
def test_every_order_of_every_choice_is_drawn_equally_often(size, count, kind, staged):
    buffer = filled(kind, rows=count, capacity=20, staged=staged, seed=size)
    places = {row: place for place, row in enumerate(buffer.order().tolist())}
    out, total = buffer.new_batch(size), np.zeros((count,) * size)
    for _ in range(60 * count**2):
        drawn = buffer.sample(size, out, replace=False).indices.tolist()
        total[tuple(places[row] for row in drawn)] += 1
    different = [len(set(choice)) == size for choice in np.ndindex(*total.shape)]
    check_law(total.reshape(-1), np.array(different, float))


@STAGED
@pytest.mark.parametrize("kind", CLASSES)
def test_the_global_generators_are_left_alone_and_a_seed_decides(kind, staged):
    torch.manual_seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002  # the global one
    drawn = [filled(kind, seed=5, staged=staged).sample(50).indices for _ in range(2)]
    assert drawn[0].equal(drawn[1])
    assert not drawn[0].equal(filled(kind, seed=6, staged=staged).sample(50).indices)
    assert torch.get_rng_state().equal(before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002  # the global one


OTHERS = {
    "capacity": ({"capacity": 21}, "capacity is 20, expected 21"),
    "store_next": ({"store_next": False}, "store_next is True, expected False; "),
    "shape": ({"space": NESTED}, "fields obs is float32 .3,. at byte 0, expected None"),
    "num_envs": ({"num_envs": 3}, "num_envs is 2, expected 3"),
    "kind": ({"kind": "per_env"}, "Shared.*expected .*PerEnv"),
    "gamma": ({"gamma": 0.9}, "gamma is None, expected 0.9"),
    "n_step": ({"gamma": 0.9, "n_step": 2}, "n_step is 1, expected 2; .*gamma is None"),
}


@pytest.mark.parametrize("way", ["file", "state"])
@pytest.mark.parametrize(("options", "message"), OTHERS.values(), ids=OTHERS)
def test_states_of_other_buffers_are_refused_and_change_nothing(options, message, way, tmp_path):
    made = filled()
    made.save(tmp_path / "a")
    other = filled(**{"rows": 12, **options})
    before = other.state_dict()
    with pytest.raises(ValueError, match=message):
        other.load(tmp_path / "a") if way == "file" else other.load_state_dict(made.state_dict())
    after = other.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items() if torch.is_tensor(v))
