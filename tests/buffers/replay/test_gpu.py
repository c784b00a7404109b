"""Replay buffers on a GPU: the same contents as lists have, no waiting, and CUDA graphs."""

import numpy as np
import pytest
import torch
from replay_model import ACTIONS, OBS, CountingEnvs, ListModel, columns_of, decode

from buffers import (
    BufferMisuseError,
    EpisodicReplayBuffer,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)

pytestmark = pytest.mark.gpu
CLASSES = {
    "shared": SharedReplayBuffer,
    "per_env": PerEnvReplayBuffer,
    "prioritized": PrioritizedReplayBuffer,
}
OPTIONS = {
    "plain": {},
    "three steps": {"n_step": 3, "gamma": 0.5},
    "stored once": {"store_next": False, "n_step": 2, "gamma": 0.5},
}


def filled(kind, option="plain", capacity=40, laps=3):
    buffer = CLASSES[kind](
        capacity, OBS, ACTIONS, num_envs=4, seed=0, device="cuda", **OPTIONS[option]
    )
    envs, model = CountingEnvs(4), ListModel(capacity, 4, kind == "per_env")
    for _ in range(laps * capacity // 4):
        made = envs.random_steps(range(4))
        buffer.add(**columns_of(made))
        model.add(made)
    return buffer, model


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("option", OPTIONS)
def test_drawing_does_not_wait_and_can_be_captured(kind, option):
    buffer, model = filled(kind, option)
    out = buffer.new_batch(512)
    errors = torch.rand(512, device="cuda") + 0.1
    buffer.sample(512, out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        buffer.sample(512, out)
        if kind == "prioritized":
            buffer.update_priorities(out.indices, errors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(buffer.generator)
    with torch.cuda.graph(graph):
        buffer.sample(512, out)
    held, seen = {made.obs for made in model.live()}, []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        seen.append(out.indices.cpu())
        assert set(decode(out.obs.cpu()).tolist()) <= held
    assert not seen[0].equal(seen[1])


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("option", OPTIONS)
def test_adds_of_tensors_can_be_captured(kind, option):
    capacity = 10 if kind == "per_env" else 40
    buffer, plain = (
        CLASSES[kind](capacity, OBS, ACTIONS, num_envs=4, seed=0, device=d, **OPTIONS[option])
        for d in ("cuda", "cpu")
    )
    buffer.reserve_final_obs(44)
    envs = CountingEnvs(4)

    def step():
        rows = columns_of(envs.random_steps(range(4)))
        rows.pop("env_ids", None)
        rows["rewards"] = rows["rewards"].astype(np.float32)
        plain.add(**rows)
        return {name: torch.from_numpy(np.array(column)).cuda() for name, column in rows.items()}

    given = step()
    buffer.add(**given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            buffer.add(**given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    buffer.load_state_dict(CLASSES[kind](
        capacity, OBS, ACTIONS, num_envs=4, seed=0, device="cuda", **OPTIONS[option]
    ).state_dict())  # fmt: skip
    buffer.add(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer.add(**given)
    for _ in range(30):
        for name, column in step().items():
            given[name].copy_(column)
        graph.replay()
    assert len(buffer) == len(plain) == 40
    assert buffer.num_added == plain.num_added
    found, expected = (one.get(plain.order()) for one in (buffer, plain))
    for name in ("obs", "next_obs", "actions", "terminations", "truncations"):
        assert getattr(found, name).cpu().equal(getattr(expected, name)), name
    torch.testing.assert_close(found.rewards.cpu(), expected.rewards, rtol=1e-5, atol=1e-5)
    if kind == "prioritized":
        assert buffer.priorities.cpu().equal(plain.priorities)
    rows = step()
    buffer.add(**rows)  # of arrays or tensors: all go on behind the last replay
    assert buffer.order().equal(plain.order())


@pytest.mark.parametrize("kind", ["replay", "episodes", "priorities"])
def test_the_host_does_not_wait_for_what_a_learner_has_queued(kind):
    rows = columns_of(CountingEnvs(1).random_steps([0] * 4, p=0.0))
    buffer = PrioritizedReplayBuffer(64, OBS, ACTIONS, seed=0, device="cuda")
    episodes = EpisodicReplayBuffer(64, OBS, ACTIONS, max_episodes=16, seed=0, device="cuda")
    episode = {name: rows[name] for name in ("obs", "next_obs", "actions", "rewards")}

    def call():
        if kind == "episodes":
            episodes.add_episode(episode)
        elif kind == "priorities":
            buffer.update_priorities(np.arange(4), np.ones(4))
        else:
            buffer.add(**rows)

    buffer.add(**rows)
    for _ in range(3):  # takes memory, and tells what does not fit
        call()
    weights = torch.ones(8192, 8192, device="cuda")
    for _ in range(2):
        weights @ weights
    torch.cuda.synchronize()
    for _ in range(40):  # about a second
        weights @ weights
    done = torch.cuda.Event()
    done.record()
    call()
    call()
    assert not done.query()
    torch.cuda.synchronize()
    assert len(episodes if kind == "episodes" else buffer) > 0


def test_states_of_the_cpu_and_of_the_device_are_told_apart():
    on_device, on_cpu = (SharedReplayBuffer(64, OBS, ACTIONS, device=d) for d in ("cuda", "cpu"))
    for one, other in ((on_device, on_cpu), (on_cpu, on_device)):
        with pytest.raises(BufferMisuseError, match="generator of another device"):
            one.load_state_dict(other.state_dict())
