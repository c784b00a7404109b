"""Kernels of our own: how they are launched, and what takes their place."""

import ctypes
import importlib
import logging
import types

import numpy as np
import pytest
import torch

from buffers.core import device_kernels
from buffers.core.device_kernels import DeviceKernel
from vecenv.core import cuda as cuda_code

GPU = torch.device("cuda", 1)
cuda = None  # which DeviceKernel puts there
REQUIRE = cuda_code.require.__wrapped__


def scale_thread(numbers, size, factor):
    i = cuda.grid(1)  # type: ignore[union-attr]  # None without numba-cuda
    if i < size:
        numbers[i] = numbers[i] * factor


KINDS = ("float32*", "int64", "float32")


@pytest.fixture
def driver(monkeypatch):
    """A CUDA device, which is not here: notes what its driver is given."""
    done, refused = types.SimpleNamespace(name="SUCCESS"), types.SimpleNamespace(name="REFUSED")
    seen = types.SimpleNamespace(code=[], launches=[], entries=[], answer=done)
    seen.refused, seen.context, lost = refused, "context", types.SimpleNamespace(name="LOST")

    def launch(*arguments):
        if seen.context is None:
            return (lost,)
        function, *sizes, stream, places, extra = arguments
        at = (ctypes.c_int64 * 3).from_address(places)
        address, size = (ctypes.c_int64.from_address(place).value for place in at[:2])
        factor = ctypes.c_float.from_address(at[2]).value
        seen.launches.append((function, sizes, stream, extra, address, size, factor))
        return (seen.answer,)

    def load(code):
        seen.code.append(code)
        return seen.answer, "module"

    def find(module, name):
        seen.entries.append((module, name))
        return done, "function"

    fake = types.SimpleNamespace(
        CUresult=types.SimpleNamespace(CUDA_SUCCESS=done, CUDA_ERROR_INVALID_CONTEXT=lost),
        cuCtxGetCurrent=lambda: (done, seen.context), cuLaunchKernel=launch,
        cuCtxSetCurrent=lambda context: (setattr(seen, "context", context), (done,))[1],
        cuModuleLoadData=load, cuModuleGetFunction=find, cuDriverGetVersion=lambda: (done, 13000),
    )  # fmt: skip
    monkeypatch.setitem(importlib.import_module("sys").modules, "cuda.bindings.driver", fake)
    monkeypatch.setattr(cuda_code, "require", lambda: None)
    device_kernels._say.cache_clear()
    monkeypatch.setattr(DeviceKernel, "lower", lambda self: self.name)
    monkeypatch.setattr(cuda_code, "ptx", lambda name, capability: f"{name} {capability}")
    monkeypatch.setattr(device_kernels, "_machine_code", lambda text, _: f"code of {text}".encode())
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)
    state = {"capturing": False}
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.inference_mode(False))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=77)
    )
    seen.state = state
    return seen


def test_a_launch_goes_to_the_current_stream_with_each_argument_at_its_address(driver):
    kernel, numbers = DeviceKernel(scale_thread, KINDS), torch.ones(300)
    for context in ("context", None):  # as in a thread of which the driver knows nothing
        launch = kernel.on(GPU)
        assert launch is not None
        driver.context = context
        launch(300, numbers[4:], 296, 0.5)
    assert driver.code == [b"code of scale_thread (9, 1)"]  # compiled once
    assert driver.entries == [("module", b"buffers_kernel")]
    sizes = [3, 1, 1, 128, 1, 1, 0]
    assert driver.launches == [("function", sizes, 77, 0, numbers.data_ptr() + 16, 296, 0.5)] * 2
    assert driver.context == "context"
    driver.answer = driver.refused
    with pytest.raises(
        RuntimeError, match="launching the kernel of scale_thread failed with REFUSED"
    ):
        launch(300, numbers, 300, 0.5)


def test_nothing_is_compiled_while_a_graph_is_captured(driver):
    kernel = DeviceKernel(scale_thread, KINDS)
    driver.state["capturing"] = True
    assert kernel.on(GPU) is None
    driver.state["capturing"] = False
    assert kernel.on(GPU) is not None
    driver.state["capturing"] = True
    assert kernel.on(GPU) is not None


def test_where_code_is_refused_torch_has_to_do_and_it_is_said_once(driver, caplog):
    driver.answer = driver.refused
    with caplog.at_level(logging.INFO, "buffers"):
        for _ in range(2):
            assert DeviceKernel(scale_thread, KINDS).on(GPU) is None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert (
        "scale_thread can't be compiled for cuda:1: loading the code of scale_thread failed"
        in told[0]
    )
    assert "operations of torch do the same" in told[0]


def test_without_numba_cuda_torch_has_to_do(driver, monkeypatch, caplog):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(cuda_code, "require", REQUIRE)
    monkeypatch.setattr(cuda_code, "_module", missing)
    with caplog.at_level(logging.INFO, "buffers"):
        assert DeviceKernel(scale_thread, KINDS).on(GPU) is None
    assert 'pip install "vecenv[cuda]"' in caplog.text
    assert not driver.code


def test_numba_cuda_that_cannot_be_imported_is_told_and_torch_has_to_do(
    driver, monkeypatch, caplog
):
    def broken(name):
        raise AttributeError("module 'numpy' has no attribute 'row_stack'")

    monkeypatch.setattr(cuda_code, "require", REQUIRE)
    monkeypatch.setattr(cuda_code, "_module", broken)
    assert DeviceKernel(scale_thread, KINDS).on(GPU) is None
    assert "numba-cuda can't be imported" in caplog.text
    assert "row_stack" in caplog.text


@pytest.mark.parametrize("tool", [None, "/bin/false", "/there/is/none"])
def test_where_ptxas_fails_the_driver_gets_ptx(tool, monkeypatch):
    found = types.SimpleNamespace(find_nvidia_binary_utility=lambda name: tool)
    monkeypatch.setitem(importlib.import_module("sys").modules, "cuda.pathfinder", found)
    assert device_kernels._machine_code("text", (9, 0)) == b"text\0"


def test_memory_of_the_cpu_has_no_kernels():
    assert DeviceKernel(scale_thread, KINDS).on(torch.device("cpu")) is None


@pytest.mark.cuda
def test_a_kernel_is_compiled_without_a_device():
    kernel = DeviceKernel(scale_thread, KINDS)
    text = cuda_code.ptx(kernel.lower(), (8, 0))
    assert ".target sm_80" in text
    assert device_kernels._machine_code(text, (8, 0)).startswith(b"\x7fELF")
    head = text[text.index(".visible .entry buffers_kernel(") :].partition(")")[0]
    assert [line.split()[1] for line in head.splitlines()[1:] if line] == [".u64", ".u64", ".f32"]
    from device_kernels import lowered  # of the tests

    numbers = torch.arange(10.0)
    lowered(kernel)(10, numbers, 9, 2.0)
    np.testing.assert_array_equal(numbers, [0, 2, 4, 6, 8, 10, 12, 14, 16, 9])
