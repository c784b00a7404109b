"""Compiled envs on a real device: `make test-gpu`."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from jit.on_device.bundled import FLOATS, MAKERS, RETURNS_ARE_FLOATS, ZOO, check_states
from jit.on_device.recorded import RULES_OF_TRACE, count_differences

import vecenv
from buffers import RolloutBuffer
from vecenv import StepSlot
from vecenv.core.masks import sample_actions
from vecenv.jit.binding import uncompiled
from vecenv.jit.cuda.env import CudaVectorEnv
from vecenv.learn import Graph

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
NUM_ENVS = 4096
STEPS = {"cage4": 40, "cage4 agents": 40}  # else a million env steps


def pair(name, num_envs=NUM_ENVS, **options):
    """Envs on the CPU, and the same ones on the device."""
    make: Any = {**MAKERS, **ZOO}[name]
    cpu = make(num_envs, **options)
    with uncompiled():
        return cpu, CudaVectorEnv(make(1, **options), num_envs)


def array(found: Any):
    return found.cpu().numpy() if isinstance(found, torch.Tensor) else np.asarray(found)


def assert_same(found, expected, *, is_float):
    found = array(found)
    if is_float and found.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(found, np.asarray(expected).astype(found.dtype))


@pytest.mark.parametrize("name", [*MAKERS, *ZOO])
def test_steps_are_those_of_the_processor(name):
    """Bit for bit where kernels compute with integers; else from the same state, nearly."""
    rng, is_float = np.random.default_rng(0), name in FLOATS
    cpu, device = pair(name)
    assert_same(device.reset(seed=7)[0], cpu.reset(seed=7)[0], is_float=is_float)
    for _ in range(STEPS.get(name, 250)):
        if cpu.has_action_masks:
            masks = cpu.action_masks()
            assert_same(device.action_masks(), masks, is_float=False)
            actions = sample_actions(cpu.single_action_space, masks, rng)
        else:
            actions = cpu.action_space.sample()
        expected, found = cpu.step(actions), device.step(actions)
        for one, other in zip(found[:4], expected[:4], strict=True):
            assert_same(one, other, is_float=is_float)
        if is_float:
            device.load_state_dict(cpu.state_dict())
    device.check()
    nearly = ("episode_return", "last_return") if name in RETURNS_ARE_FLOATS else ()
    check_states(device.state_dict(), cpu.state_dict(), nearly)
    device.close()
    cpu.close()


@pytest.mark.parametrize("name", RULES_OF_TRACE)
def test_all_recorded_episodes_replay(name):
    differences, compared = count_differences(name)
    assert differences == 0 < compared


def new_slot(envs):
    flags = [envs.allocate((envs.num_envs,), np.bool_) for _ in range(2)]
    obs = envs.allocate(envs.observation_space.shape, envs.single_observation_space.dtype)
    return StepSlot(obs, envs.allocate((envs.num_envs,), np.float32), *flags)


def as_tuple(slot):
    return tuple(array(part).copy() for part in slot)


def test_graphs_streams_and_threads_do_what_a_call_does():
    """All by one env, whose state is put back before each."""
    envs: Any = vecenv.make_vec("Cage2-v0", 1000, device="cuda")
    envs.reset(seed=3)
    actions = torch.randint(envs.single_action_space.n, (1000,), device=envs.device)
    slot, state = new_slot(envs), envs.state_dict()

    def three_steps(step):
        envs.load_state_dict(state)
        found = []
        for _ in range(3):
            step()
            torch.cuda.synchronize()
            found.append(as_tuple(slot))
        return found

    def step():
        envs.step(actions, out=slot)

    def in_a_thread():
        """One in which nothing has used the device yet."""
        other = threading.Thread(target=step)
        other.start()
        other.join()

    def on_a_stream():
        with torch.cuda.stream(stream):
            step()

    expected, stream = three_steps(step), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()  # waits for nothing
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for way in (graph.replay, in_a_thread, on_a_stream):
        for one, other in zip(three_steps(way), expected, strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_array_equal(a, b, str(way))
    envs.close()


def test_a_rollout_in_a_graph_is_that_of_the_cpu():
    """From observations to minibatches; all that the host does is in the first calls."""
    cpu, device = pair("cage2", 64, max_episode_steps=20)
    spaces = cpu.single_observation_space, cpu.single_action_space
    mode = cpu.autoreset_mode
    one = RolloutBuffer(32, 64, *spaces, autoreset_mode=mode, allocate=cpu.allocate, seed=0)
    other = RolloutBuffer(
        32, 64, *spaces, autoreset_mode=mode, allocate=device.allocate, seed=0,
        device=device.device,
    )  # fmt: skip
    one.start(cpu.reset(seed=3)[0])
    other.start(device.reset(seed=3)[0])
    actions = torch.zeros((32, 64), dtype=torch.int64, device=device.device)
    floats = torch.ones(64, device=device.device)

    def collect():
        for t in range(32):
            given: Any = other.put(t, actions=actions[t], log_probs=floats, values=floats)
            device.step(given, out=other.slot(t))
        other.compute_advantages(floats)
        batches = other.minibatches(3, fixed=True, normalize_advantages=True)
        found = [(batch.indices, batch.weights, batch.advantages) for batch in batches]
        other.advance()
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    graph = Graph(collect, device.device, generators=[other.generator], log=pytest.fail)
    orders = []
    for number in range(6):
        drawn = np.random.default_rng(number).integers(0, spaces[1].n, (32, 64))
        actions.copy_(torch.from_numpy(drawn))
        for t in range(32):
            ones = np.ones(64, np.float32)
            given = one.put(t, actions=drawn[t], log_probs=ones, values=ones)
            cpu.step(given, out=one.slot(t))
        expected = one.episodes()
        one.compute_advantages(np.ones(64, np.float32))
        rows, weights, advantages = graph()
        other.check()
        device.check()
        assert_same(other.rewards, one.rewards, is_float=False)
        assert_same(other.obs[1:], one.obs[1:], is_float=False)
        np.testing.assert_allclose(array(other.advantages), one.advantages, rtol=1e-4, atol=1e-5)
        for a, b in zip(other.episodes(), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)
        own = array(rows[weights > 0])
        assert sorted(own) == np.flatnonzero(one.valid_pages).tolist()
        assert np.isfinite(array(advantages)).all()
        orders.append(tuple(own))
        one.advance()
    assert graph.is_captured
    assert len(set(orders)) == 6  # another order each time, also of replays
