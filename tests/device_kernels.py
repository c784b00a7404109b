"""Kernels of `buffers` for devices, run on the host: as plain Python, or as what devices get."""

import ctypes
import types

import numpy as np
import torch

from buffers.core.device_kernels import DeviceKernel

_LLVM = {"int64": "i64", "float32": "float", "float64": "double"}
_lowered = {}  # by function and kinds; what is compiled must be kept


def page(given, kind):
    """All memory from a tensor's first element to the end of its storage, as an array."""
    if not isinstance(given, torch.Tensor):
        return np.zeros(0, kind)  # an address of nothing, which is not to be read
    size = given.untyped_storage().nbytes() - given.storage_offset() * given.element_size()
    dtype = np.dtype(kind)
    size -= size % dtype.itemsize
    if not size:
        return np.zeros(0, kind)
    return np.frombuffer((ctypes.c_char * size).from_address(given.data_ptr()), dtype)


def plain(kernel):
    """A launch that runs the threads one after another, and three more than were asked for."""
    thread = [0]
    run = kernel.bound(types.SimpleNamespace(grid=lambda ndim: thread[0]))

    def launch(num_threads, *arguments):
        given = [
            page(argument, kind[:-1]) if kind.endswith("*") else np.dtype(kind).type(argument)
            for kind, argument in zip(kernel.kinds, arguments, strict=True)
        ]
        with np.errstate(all="ignore"):
            for thread[0] in range(num_threads + 3):
                run(*given)

    return launch


def lowered(kernel):
    """A launch of what numba-cuda has lowered, compiled for the processor."""
    from jit.on_device.lowered import compiled_texts

    key = kernel.name, kernel.kinds
    if key not in _lowered:
        kinds = ["ptr" if kind.endswith("*") else _LLVM[kind] for kind in kernel.kinds]
        _lowered[key] = compiled_texts(kernel.lower(), kinds)
    run, _ = _lowered[key]

    def launch(num_threads, *arguments):
        run(
            num_threads + 3,
            *(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments),
        )

    return launch


def use(monkeypatch, how):
    """Let all kernels be launched in one of these ways, also for memory of the host."""
    seen = []

    def on(self, device):
        launch = how(self)

        def noted(*arguments):
            seen.append(self.name)
            launch(*arguments)

        return noted

    monkeypatch.setattr(DeviceKernel, "on", on)
    return seen


def check_resources(kernel, most_registers=128):
    """Compile it for devices; nothing may be spilled, nor lie in local memory."""
    from vecenv.core import cuda

    for capability in ((8, 0), (9, 0)):
        text = cuda.ptx(kernel.lower(), capability)
        found = cuda.resources(cuda.machine_code(text, capability)[1])
        assert found.spill_bytes == found.stack_bytes == 0
        assert 0 < found.registers <= most_registers
