"""All bundled kernels compile for devices, without one, and need no memory beside registers."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from jit.on_device.bundled import MAKERS

from vecenv.jit import EnvKernels, KernelCompileError
from vecenv.jit.binding import uncompiled
from vecenv.jit.cuda import compiler

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(900)]
CAPABILITIES = [(8, 0), (9, 0)]
# Local memory that is there all the same, bytes per thread at most: of the reduction of large
# angles in sin and cos; else variables that are written and never read. No registers are spilled.
STACK_BYTES = {"cartpole": 40, "spread": 8, "pursuit": 16, "cage4": 8, "cage4 agents": 8}


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_spilled(name):
    with uncompiled():
        envs = MAKERS[name](1)
    program = compiler.lower(envs.kernels, envs.params)
    for capability in CAPABILITIES:
        _, report = compiler.machine_code(compiler.ptx(program, capability), capability)
        found = compiler.resources(report)
        assert found.spill_bytes == 0
        assert found.stack_bytes <= STACK_BYTES.get(name, 0)
        assert 0 < found.registers <= 128


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
    code = compiler.kept_code(envs.kernels, None, (9, 0))
    assert code[:4] == b"\x7fELF"
    with monkeypatch.context() as without:
        without.setattr(compiler, "lower", None)
        assert compiler.kept_code(envs.kernels, None, (9, 0)) == code
    assert len(list((tmp_path / "kept").iterdir())) == 1

    def other_observe(state, out):
        out[0], out[1], out[2], out[3] = state.x, state.x_dot, state.theta, 0.0

    other = EnvKernels(**{**vars(envs.kernels), "observe": other_observe})
    assert compiler.kept_code(other, None, (9, 0)) != code
    assert len(list((tmp_path / "kept").iterdir())) == 2
