"""All bundled kernels compile for devices, without one, and need no memory beside registers."""

import itertools
import os
import re
import shutil
import subprocess
import sys

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


# What a driver of NVIDIA's would be called with: it writes that to its output.
_DRIVER = r"""
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
static __thread void *current;
static int context;
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    *found = dlsym(self, name);
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : 500;
}
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuCtxGetCurrent(void **found) { *found = current; return 0; }
int cuCtxSetCurrent(void *given) { current = given; return 0; }
int cuModuleLoadData(void **module, const char *code) {
    current = &context;  // as torch has done before
    *module = (void *)5;
    return strcmp(code, "code") ? 200 : 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    printf("function %s of %d\n", name, (int)(intptr_t)module);
    *function = (void *)6;
    return 0;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **params, void **extra) {
    if (!current) return 201;  // CUDA_ERROR_INVALID_CONTEXT
    printf("launch %d grid %u %u %u block %u %u %u shared %u stream %d extra %d:",
           (int)(intptr_t)function, gx, gy, gz, bx, by, bz, shared, (int)(intptr_t)stream, !!extra);
    for (int k = 0; k < 3; k++) printf(" %lld", *(long long *)params[k]);
    printf("\n");
    fflush(stdout);
    return 0;
}
"""
_LAUNCHES = r"""
import threading
import numpy as np
from vecenv.core import cuda

launch = cuda.loaded("toy", b"code\0", "the_entry")
values = np.array([11, -12, 1 << 40])
places = np.array([values[k:].ctypes.data for k in range(3)], np.uint64)
launch(3, 128, 77, places.ctypes.data)
other = threading.Thread(target=launch, args=(1, 64, 0, places.ctypes.data))  # has no context yet
other.start()
other.join()
try:
    cuda.loaded("toy", b"other code\0", "the_entry")
except cuda.DeviceError as error:
    print(error)
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_the_driver_of_devices_gets_what_it_expects(tmp_path):
    source = tmp_path / "driver.c"
    source.write_text(_DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True, timeout=60
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", _LAUNCHES],
        env={**os.environ, "LD_LIBRARY_PATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    *lines, told = done.stdout.splitlines() or [""]
    assert lines == [
        "function the_entry of 5",
        "launch 6 grid 3 1 1 block 128 1 1 shared 0 stream 77 extra 0: 11 -12 1099511627776",
        "launch 6 grid 1 1 1 block 64 1 1 shared 0 stream 0 extra 0: 11 -12 1099511627776",
    ], done.stderr
    assert "CUDA_ERROR_INVALID_IMAGE: the driver of the device is for CUDA 12.8" in told
