"""What buffers do for devices, as far as it shows without one."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from buffers import (
    BufferMemoryError,
    EpisodicReplayBuffer,
    PrioritizedReplayBuffer,
    RolloutBuffer,
    SharedReplayBuffer,
)
from buffers.core.memory import allocation, free_bytes
from buffers.core.staging import StagingBlock
from buffers.replay.priorities import BlockSums
from buffers.replay.staging import Staging

OBS, ACTIONS = Box(-1, 1, (3,), np.float32), Discrete(2)
CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


def columns(count, value=1.0):
    return {
        "obs": np.full((count, 3), value, np.float32),
        "next_obs": np.full((count, 3), value + 1, np.float32),
        "actions": np.zeros(count, np.int64),
        "rewards": np.ones(count, np.float32),
        "terminations": np.zeros(count, np.bool_),
        "truncations": np.zeros(count, np.bool_),
    }


def make_and_use_replay(kind, **options):
    buffer = kind(16, OBS, ACTIONS, num_envs=4, seed=0, **options)
    buffer.add(**columns(4))
    batch = buffer.sample(8)
    assert batch.obs.device == CPU
    buffer.load_state_dict(buffer.state_dict())


def make_and_use_rollout(**options):
    rollout = RolloutBuffer(2, 2, OBS, ACTIONS, autoreset_mode="NextStep", **options)
    rollout.start(np.zeros((2, 3), np.float32))
    for t in range(2):
        floats = np.zeros(2, np.float32)
        rollout.put(t, actions=np.zeros(2, np.int64), log_probs=floats, values=floats)
        slot = rollout.slot(t)
        slot.obs[:], slot.rewards[:], slot.terminations[:], slot.truncations[:] = 0, 1, 0, 0
    rollout.compute_advantages(np.zeros(2, np.float32))
    assert [len(batch.actions) for batch in rollout.minibatches(2)] == [2, 2]


def make_and_use_episodes(**options):
    buffer = EpisodicReplayBuffer(50, OBS, ACTIONS, max_episodes=5, seed=0, **options)
    flags = np.zeros(5, np.bool_)
    flags[-1] = True
    buffer.add_episode({
        "obs": np.zeros((6, 3), np.float32), "actions": np.zeros(5, np.int64),
        "rewards": np.zeros(5, np.float32), "boundaries": flags,
    })  # fmt: skip
    assert len(buffer.sample(4, 0.9).obs) == 4


@pytest.mark.parametrize("staged", [False, True])
def test_the_default_device_of_a_context_is_not_that_of_host_memory(staged):
    with torch.device("meta"):
        make_and_use_replay(SharedReplayBuffer, store_next=False, staged=staged)
        make_and_use_replay(PrioritizedReplayBuffer, staged=staged)
        make_and_use_rollout(staged=staged)
        make_and_use_episodes(staged=staged)


def test_the_end_of_a_copy_is_noted_on_the_stream_of_its_own_device(monkeypatch):
    recorded = []

    class Event:
        def record(self, stream):
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    block = StagingBlock(64, CPU)
    block._copied = Event()
    block.upload(0, 64)
    assert recorded == [("stream of", block.device.device)]


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


def test_priorities_on_a_device_may_have_gradients_or_be_none():
    with torch.inference_mode():
        sums = BlockSums(10, CPU)
    sums.insert(10, 10, 0.5)
    before = sums.leaves.clone()
    sums.update(torch.zeros(0, dtype=torch.int64), torch.zeros(0), 10, 0.5, 1e9)
    assert sums.leaves.equal(before)
    given = torch.tensor([4.0, 9.0], requires_grad=True)
    sums.update(torch.tensor([1, 7]), given * 1, 10, 0.5, 1e9)
    assert sums.leaves[[1, 7]].tolist() == [2.0, 3.0]
    assert not sums.leaves.requires_grad
    assert sums.largest.item() == 9.0


def test_rows_on_their_way_to_a_device_have_no_links_of_earlier_ones(monkeypatch):
    seen = []
    spread = Staging._spread

    def look(self, block, num_rows, num_links, span):
        field = self._layout.fields["link"]
        packed = block.device[span[0] : span[1]].view(num_rows, -1)
        seen.append(packed[:, field.offset : field.offset + field.nbytes].clone())
        block.host[span[0] : span[1]].fill_(255)  # what is left there for the next add
        spread(self, block, num_rows, num_links, span)

    monkeypatch.setattr(Staging, "_spread", look)
    buffer = SharedReplayBuffer(16, OBS, ACTIONS, num_envs=4, n_step=2, gamma=0.9, staged=True)
    for value in range(6):
        buffer.add(**columns(4, value))
    assert len(seen) == 6
    assert not torch.stack(seen).any()
