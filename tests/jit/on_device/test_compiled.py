"""All bundled kernels compile for devices, without one, and need no memory beside registers."""

import itertools
import re

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from jit.on_device.bundled import MAKERS, ZOO

from vecenv.agents.compiled import state_kernels
from vecenv.core import cuda
from vecenv.jit import EnvKernels, KernelCompileError
from vecenv.jit.binding import uncompiled
from vecenv.jit.cuda import compiler

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(900)]
CAPABILITIES = [(8, 0), (9, 0)]
# Local memory that is there all the same, bytes per thread at most: of the reduction of large
# angles in sin and cos; else variables that are written and never read. No registers are spilled.
STACK_BYTES = {"cartpole": 40, "spread": 8, "pursuit": 16, "cage4": 8, "cage4 agents": 8}
STACK_BYTES |= {"JitAcrobot-v1": 40, "JitMountainCar-v0": 40, "JitMountainCarContinuous-v0": 48}
STACK_BYTES |= {"JitPendulum-v1": 48, "JitQuadrotor2D-v0": 48}


@pytest.mark.parametrize("name", [*MAKERS, *ZOO])
def test_nothing_is_spilled(name):
    with uncompiled():
        envs = {**MAKERS, **ZOO}[name](1)
    programs = [compiler.lower(envs.kernels, envs.params)]
    if envs.kernels.central_state is not None:
        kernels = state_kernels(envs.kernels)
        programs.append(compiler.lower(kernels, envs.params))
    for program, capability in itertools.product(programs, CAPABILITIES):
        _, report = cuda.machine_code(cuda.ptx(program, capability), capability)
        lines = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        frames = [tuple(map(int, found)) for found in re.findall(lines, report)]
        assert frames and not any(stores or loads for _, stores, loads in frames)
        assert max(stack for stack, _, _ in frames) <= STACK_BYTES.get(name, 0)
        assert 0 < max(map(int, re.findall(r"Used (\d+) registers", report))) <= 128


def reset(state, rng):
    state.x = 0.0


def step(state, action, rng):
    copies = np.zeros(3)  # the line at fault: devices allocate nothing
    return copies.sum(), False, False


def observe(state, out):
    out[0] = state.x


def test_a_kernel_that_uses_what_devices_lack_is_named_with_its_line():
    kernels = EnvKernels(
        [("x", np.float64)], Box(-1, 1, (1,)), Discrete(2), reset, step, observe, name="allocates"
    )
    with pytest.raises(KernelCompileError, match=r"test_compiled.py:\d+") as raised:
        compiler.lower(kernels, None)
    told = str(raised.value)
    assert "can't be compiled for a CUDA device" in told
    assert "in step" in told
    assert "np.zeros(3)" in told


def test_machine_code_is_kept_on_disk_and_made_anew_for_other_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "_cache_folder", lambda: tmp_path / "kept")
    envs = MAKERS["cartpole"](1)
    params = envs.kernels.params
    code = compiler.kept_code(envs.kernels, params, (9, 0))
    assert code[:4] == b"\x7fELF"
    with monkeypatch.context() as without:
        without.setattr(compiler, "lower", None)
        assert compiler.kept_code(envs.kernels, params, (9, 0)) == code
    assert len(list((tmp_path / "kept").iterdir())) == 1

    def other_observe(state, out, params):
        out[0], out[1], out[2], out[3] = state.x, state.x_dot, state.theta, 0.0

    other = EnvKernels(**{**vars(envs.kernels), "observe": other_observe})
    assert compiler.kept_code(other, params, (9, 0)) != code
    assert len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.parametrize("tool", [None, "/bin/false", "/there/is/none"])
def test_where_ptxas_fails_the_driver_gets_ptx(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "_cache_folder", lambda: tmp_path)
    from cuda import pathfinder

    monkeypatch.setattr(pathfinder, "find_nvidia_binary_utility", lambda name: tool)
    kernels = MAKERS["cartpole"](1).kernels
    code = compiler.kept_code(kernels, kernels.params, (9, 0))
    assert b".target sm_90" in code
    assert code.endswith(b"\0")
    assert not list(tmp_path.iterdir())
