"""Compiled envs on a real device: `make test-gpu`."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from jit.on_device.bundled import FLOATS, MAKERS, RETURNS_ARE_FLOATS, ZOO, check_states

import vecenv
from vecenv import StepSlot
from vecenv.core.masks import sample_actions
from vecenv.jit.binding import uncompiled
from vecenv.jit.cuda.env import CudaVectorEnv

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
