"""Batches gathered by one kernel on a device, as it runs without one."""

import device_kernels
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from buffers import PerEnvReplayBuffer, PrioritizedReplayBuffer, SharedReplayBuffer
from buffers.core.device_kernels import DeviceKernel
from buffers.replay.device_kernels import draw_kernel, gather_kernel, sum_kernel, update_kernel
from buffers.replay.priorities import BlockSums

WAYS = [
    device_kernels.plain,
    pytest.param(device_kernels.lowered, marks=pytest.mark.cuda),
]
FLOATS, BYTES = Box(-9, 9, (6,), np.float32), Box(0, 255, (3,), np.uint8)
BOTH = Dict({"a": Box(-9, 9, (2,), np.float64), "b": Box(0, 255, (5,), np.uint8)})
THREE = {"n_step": 3, "gamma": 0.9}
CASES = {
    "three steps": (SharedReplayBuffer, FLOATS, THREE),
    "one step with a discount": (SharedReplayBuffer, FLOATS, {"gamma": 0.9}),
    "stored once": (SharedReplayBuffer, FLOATS, {"store_next": False}),
    "bytes stored once": (SharedReplayBuffer, BYTES, {"store_next": False}),
    "both": (PerEnvReplayBuffer, BOTH, {**THREE, "store_next": False}),
    "by priority": (PrioritizedReplayBuffer, BOTH, {**THREE, "store_next": False}),
    "stacks": (SharedReplayBuffer, Box(-9, 9, (2, 3), np.float32), {**THREE, "frame_stack": 2}),
}


def fill(buffer, space, num_steps=23):
    """Steps of 4 envs, whose episodes end now and then; past the end of the ring."""
    rng = np.random.default_rng(0)
    space.seed(3)

    def sample():
        items = [space.sample() for _ in range(4)]
        if isinstance(space, Dict):
            return {name: np.stack([item[name] for item in items]) for name in space}
        return np.stack(items)

    obs = sample()
    for _ in range(num_steps):
        following, over = sample(), rng.random((2, 4)) < 0.15
        if space.shape == (2, 3):  # a stack of two frames
            following[:, 0] = obs[:, 1]
        buffer.add(
            obs=obs, next_obs=following, actions=rng.integers(0, 3, 4),
            rewards=rng.standard_normal(4), terminations=over[0], truncations=over[1],
        )  # fmt: skip
        other, is_over = sample(), over[0] | over[1]
        if isinstance(space, Dict):
            obs = {k: np.where(is_over[:, None], other[k], following[k]) for k in space}
        else:
            obs = np.where(is_over.reshape(4, *[1] * (obs.ndim - 1)), other, following)


def leaves(batch):
    columns = (batch.obs, batch.next_obs, batch.actions, batch.rewards, batch.terminations)
    columns += batch.truncations, batch.discounts, batch.indices
    for column in columns:
        yield from column.values() if isinstance(column, dict) else [column]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_torch_and_of_the_cpu(way, case, monkeypatch):
    kind, space, options = CASES[case]
    capacity = 15 if kind is PerEnvReplayBuffer else 60

    def make(**more):
        return kind(capacity, space, Discrete(3), num_envs=4, seed=0, **options, **more)

    cpu, staged = make(), make(staged=True)
    for buffer in (cpu, staged):
        fill(buffer, space)
    order = cpu.order()
    drawn, of_cpu = staged.sample(50), list(leaves(cpu.get(order)))
    found = [list(leaves(drawn)), list(leaves(staged.get(order)))]
    again = make(staged=True)
    fill(again, space)
    seen = device_kernels.use(monkeypatch, way)
    out = again.new_batch(50)
    for one in out.memory[:5]:  # what is left unwritten differs
        if isinstance(one, torch.Tensor):
            one.fill_(77)
    again.sample(50, out)
    got = [list(leaves(out)), list(leaves(again.get(order)))]
    for one, other in zip(found, got, strict=True):
        for expected, tensor in zip(one, other, strict=True):
            assert tensor.equal(expected)
    for expected, tensor in zip(of_cpu, got[1], strict=True):
        np.testing.assert_allclose(tensor, expected, rtol=1e-6)
    assert [name for name in seen if name != "draw_thread"] == ["gather_thread"] * 2


def test_single_steps_with_their_own_next_obs_are_one_copy_already(monkeypatch):
    buffer = SharedReplayBuffer(60, FLOATS, Discrete(3), num_envs=4, seed=0, staged=True)
    fill(buffer, FLOATS)
    seen = device_kernels.use(monkeypatch, device_kernels.plain)
    assert buffer.sample(8).size == 8
    assert not seen


@pytest.mark.cuda
@pytest.mark.parametrize("word", ["int64", "uint8"])
def test_nothing_is_spilled(word):
    device_kernels.check_resources(gather_kernel(word), most_registers=64)


def some_sums(seed=0):
    """Of 3000 leaves, of which 2500 are in use, many of them 0; with a block that has none."""
    rng = np.random.default_rng(seed)
    values = rng.random(3000) * (rng.random(3000) < 0.3)
    values[1024:2048] = 0
    sums = BlockSums(3000, torch.device("cpu"))
    for exponent, number in ((sums.alpha, 0.5), (sums.beta, 0.4), (sums.bound, 1e6)):
        exponent.fill_(number)
    sums.restore(torch.from_numpy(values), 2500)
    return sums


@pytest.mark.parametrize("way", WAYS)
def test_draws_by_priority_are_those_of_torch(way, monkeypatch):
    drawn = []
    for has_kernel in (False, True):
        sums = some_sums()
        seen = device_kernels.use(monkeypatch, way) if has_kernel else []
        leaves, weights = torch.zeros(500, dtype=torch.int64), torch.zeros(500)
        sums.draw(torch.Generator().manual_seed(3), leaves, weights, None)
        assert (sums.leaves[leaves] > 0).all()
        drawn.append((leaves, weights))
    assert seen == ["draw_thread"]
    np.testing.assert_array_equal(drawn[0][0], drawn[1][0])
    np.testing.assert_array_equal(drawn[0][1], drawn[1][1])
    only = BlockSums(3000, torch.device("cpu"))  # whichever point is drawn
    only.restore(torch.zeros(3000).double().index_fill_(0, torch.tensor([2047]), 1.0), 3000)
    leaves, weights = torch.zeros(64, dtype=torch.int64), torch.zeros(64)
    only.draw(torch.Generator(), leaves, weights, 1.0)
    assert (leaves == 2047).all()
    assert (weights == 1).all()
    only.restore(torch.zeros(3000).double(), 3000)  # a row that was written, not one behind
    only.draw(torch.Generator(), leaves, weights, 1.0)
    assert (leaves == 0).all()


def test_sums_follow_where_only_the_kernel_of_updates_is_there(monkeypatch):
    """The first of the others may be asked for while a graph is being captured."""
    by_torch, found = some_sums(), some_sums()
    given = torch.tensor([3, 1400]), torch.tensor([4.0, 9.0])
    by_torch.update(*given)
    found.insert_rows(torch.zeros(0, dtype=torch.int64), torch.tensor(2500))

    def on(self, device):
        return device_kernels.plain(self) if self.name == "update_thread" else None

    monkeypatch.setattr(DeviceKernel, "on", on)
    found.update(*given)
    torch.testing.assert_close(by_torch._groups, found._groups)
    torch.testing.assert_close(by_torch._sums, found._sums)


def test_sums_are_compiled_before_an_add_is_captured(monkeypatch):
    seen = []
    monkeypatch.setattr(DeviceKernel, "on", lambda self, device: seen.append(self.name))
    some_sums().insert(10, 10, 10)
    assert "sum_thread" in seen


@pytest.mark.parametrize("way", WAYS)
def test_updates_of_priorities_are_those_of_torch(way, monkeypatch):
    leaves = torch.tensor([0, 7, 7, 2499, 2500, -1, 5000, 1500, 3, 4, 2999])
    given = torch.tensor([4.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1e7, -1.0, torch.nan, 2.0]).double()
    made = []
    for has_kernel in (False, True):
        sums = some_sums()
        seen = device_kernels.use(monkeypatch, way) if has_kernel else []
        sums.update(leaves, given)
        sums.insert_rows(torch.tensor([2500, 10]), torch.tensor(2501))
        made.append(sums)
    assert seen == ["update_thread", *["sum_thread"] * 4]
    by_torch, found = made
    assert found.leaves[[0, 7, 2499]].tolist() == [2.0, 3.0, 1.0]
    assert (found.largest.item(), found.num_refused.item(), found.num_rows.item()) == (9.0, 7, 2501)
    assert by_torch.num_refused.item() == 7
    np.testing.assert_array_equal(by_torch.leaves, found.leaves)
    torch.testing.assert_close(by_torch._groups, found._groups)
    torch.testing.assert_close(by_torch._sums, found._sums)


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", [draw_kernel, update_kernel, sum_kernel])
def test_kernels_of_priorities_spill_nothing(kernel):
    device_kernels.check_resources(kernel())
