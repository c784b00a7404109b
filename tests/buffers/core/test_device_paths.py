"""What buffers do for devices, as far as it shows without one."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from staged_rollouts import make_rollout
from torch.utils._python_dispatch import TorchDispatchMode

from buffers import BufferMemoryError, BufferMisuseError, PrioritizedReplayBuffer
from buffers.core.memory import allocation, free_bytes

OBS, ACTIONS = Box(-1, 1, (3,), np.float32), Discrete(2)
CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


def columns(count, value=1.0):
    return {
        "obs": np.full((count, 3), value, np.float32),
        "next_obs": np.full((count, 3), value + 1, np.float32),
        "actions": np.zeros(count, np.int64),
        "rewards": np.ones(count),
        "terminations": np.zeros(count, np.bool_),
        "truncations": np.zeros(count, np.bool_),
    }


def test_memory_that_torch_keeps_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert free_bytes(CUDA) == 140


@pytest.mark.parametrize(
    "failure",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    ],
)
def test_failures_of_cuda_to_take_memory_are_those_of_buffers(failure):
    with (
        pytest.raises(BufferMemoryError, match="staging needs 10 bytes"),
        allocation("staging", 10, CPU, "use less"),
    ):
        raise failure


def filled_rollout(**options):
    """A rollout whose steps are made, and which has not been computed."""
    rollout = make_rollout(3, 2, OBS, ACTIONS, autoreset_mode="NextStep", seed=0, **options)
    rollout.start(np.zeros((2, 3), np.float32))
    for t in range(3):
        floats = np.full(2, t, np.float32)
        rollout.put(t, actions=np.zeros(2, np.int64), log_probs=floats, values=floats)
        slot = rollout.slot(t)
        slot.obs[:], slot.rewards[:], slot.terminations[:], slot.truncations[:] = (
            t,
            1 + t,
            0,
            t == 1,
        )
        if t == 1:  # steps that follow are not lost, nor is this change
            rollout.rewards[0] += 10
    return rollout


class Transfers(TorchDispatchMode):
    """Notes operations that wait, on tensors of some memory if that is given."""

    def __init__(self, memory=None):
        super().__init__()
        self.found, self.memory = [], memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in {"_to_copy", "item", "_local_scalar_dense", "nonzero"} and (
            self.memory is None or args[0].untyped_storage().data_ptr() in self.memory
        ):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_updates_and_minibatches_are_sent_without_waiting():
    buffer = PrioritizedReplayBuffer(16, OBS, ACTIONS, num_envs=4, seed=0, staged=True)
    buffer.add(**columns(8))
    rollout = filled_rollout(staged=True)
    rollout.compute_advantages(np.zeros(2, np.float32))
    rollout.is_first_at(0)
    with Transfers() as transfers:
        for _ in range(3):
            buffer.update_priorities(np.array([1, 6, 2]), np.array([4.0, 9.0, 1.0]))
    assert not transfers.found
    there = [c.tensor for c in rollout._storage.columns.values() if c.spec.place != "host"]
    own = {tensor.untyped_storage().data_ptr() for tensor in there}
    with Transfers(own) as transfers:
        for _ in range(3):
            taken = list(rollout.minibatches(2)) + list(rollout.minibatches(2, fixed=True))
            taken += list(rollout.sequences(2, length=2))
    assert not transfers.found
    assert buffer.priorities[[1, 6, 2]].tolist() == pytest.approx([4**0.6, 9**0.6, 1.0])
    assert all(len(batch.actions) for batch in taken)


class Elsewhere(torch.Tensor):
    """A tensor on a GPU, which is not here."""

    device: Any = torch.device("cuda:1")
    is_cpu: Any = False

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_observations_and_masks_of_a_rollout_may_be_tensors_on_its_device():
    rollout = make_rollout(1, 3, OBS, ACTIONS, autoreset_mode="SameStep", staged=True)
    rollout.device = CUDA
    rollout.start(torch.full((3, 3), 0.5).as_subclass(Elsewhere))
    assert rollout.obs_at(0).unique().tolist() == [0.5]
    rollout.write_obs(0, torch.full((3, 3), 0.25).as_subclass(Elsewhere))
    assert rollout.obs_at(0).unique().tolist() == [0.25]
    mask = torch.tensor([True, False, True])
    with pytest.raises(BufferMisuseError, match="lies on meta, expected the CPU or cuda:1"):
        rollout.set_final_values(0, mask.to("meta"), torch.ones(2))
    rollout.device = CPU  # where its memory is
    with pytest.raises(BufferMisuseError, match="lies on cuda:1, expected the CPU; move it"):
        rollout.set_final_values(0, mask.as_subclass(Elsewhere), torch.ones(2))
    rollout.set_final_values(0, mask, torch.ones(2))
    assert rollout.final_values is not None
    assert rollout.final_values.tolist() == [[1, 0, 1]]
