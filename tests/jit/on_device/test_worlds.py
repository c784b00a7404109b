"""Parameters per env, samplers and branches on a device: as on the CPU."""

import numpy as np
import pytest
import torch
from jit.on_device.host_device import all_same
from jit.toy_env import PARAMS, TOY

from vecenv.jit import JitVectorEnv
from vecenv.jit.cuda.env import CudaVectorEnv

pytestmark = pytest.mark.usefixtures("host_device")

N = 5
OWN = TOY.having(params=PARAMS)
COSTS = np.linspace(0.05, 0.9, N)


def pair(**options):
    options = {"max_episode_steps": 7, "debug": True, **options}
    return JitVectorEnv(OWN, N, **options), CudaVectorEnv(OWN, N, **options)


def assert_same(cpu, device, steps=20, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        actions = rng.integers(-1, 2, N)
        expected, found = cpu.step(actions), device.step(torch.from_numpy(actions))
        all_same(found[:4], expected[:4])
    np.testing.assert_array_equal(np.asarray(device.params_of()), cpu.params_of())


@pytest.mark.parametrize(
    "options", [{"params": {"cost": COSTS}}, {"sampler": {"cost": (0.05, 0.9)}}, {}], ids=str
)
def test_parameters_are_given_drawn_and_set_as_on_the_cpu(options):
    cpu, device = pair(**options)
    cpu.reset(seed=2), device.reset(seed=2)
    assert cpu.has_own_params == device.has_own_params == bool(options)
    assert_same(cpu, device)
    for envs in (cpu, device):
        envs.set_params([0, 3], {"cost": [0.7, 0.01]})
        assert envs.has_own_params
    assert_same(cpu, device)
    np.testing.assert_array_equal(np.asarray(device.params_of([3])), cpu.params_of([3]))
    other, there = pair(**options)
    other.load_state_dict(device.state_dict())
    there.load_state_dict(cpu.state_dict())
    assert_same(other, there, seed=1)


@pytest.mark.parametrize("luck", ["same", "fresh"])
def test_branches_are_those_of_the_cpu_and_go_there(luck):
    cpu, device = pair(sampler={"cost": (0.05, 0.9)})
    cpu.reset(seed=2), device.reset(seed=2)
    assert_same(cpu, device, steps=2)
    for envs in (cpu, device):
        envs.copy_rows([1, 1], [0, 4], luck=luck)
    assert_same(cpu, device, steps=2)
    theirs, ours = device.snapshot([1, 2]), cpu.snapshot([1, 2])
    assert theirs.runs["key"].tolist() == ours.runs["key"].tolist()
    cpu.restore([3, 0], theirs, luck=luck)
    device.restore([3, 0], ours, luck=luck)
    assert_same(cpu, device)
    while not (over := device.episode_over).any():
        device.step(torch.zeros(N, dtype=torch.int64))
    with pytest.raises(ValueError, match="whose episodes have ended"):
        device.copy_rows(int(over.int().argmax()), 1)
