"""Devices that are none: the driver of `vecenv.jit.cuda` in plain Python, in the host's memory."""

import ctypes
import types

import numpy as np
import torch

from vecenv.jit.cuda import compiler, env
from vecenv.jit.cuda.env import Device


def host_view(dtype, inner):
    """Return a function from an address of the host's memory and a number of rows to an array."""
    dtype = np.dtype(dtype)
    row_bytes = dtype.itemsize * int(np.prod(inner, dtype=np.int64))

    def view(address, count):
        if not address or not count or not row_bytes:
            return np.zeros((count if address else 0, *inner), dtype)
        memory = (ctypes.c_char * (row_bytes * int(count))).from_address(int(address))
        return np.frombuffer(memory, dtype).reshape(count, *inner)

    return view


class HostDevice(Device):
    """Runs the threads of a launch one after another."""

    def __init__(self):
        self.torch_device = torch.device("cpu")

    def host_zeros(self, count):
        return torch.zeros(count, dtype=torch.int64, device="cpu")

    def load(self, kernels, params):
        thread = [0]
        cuda = types.SimpleNamespace(grid=lambda ndim: thread[0])
        run = compiler.bound_driver(kernels, params, cuda, host_view, is_compiled=False)

        def launch(num_rows, arguments):
            for thread[0] in range(num_rows + 3):  # a block has more threads than there are rows
                run(*arguments.tolist())

        return launch


def use(monkeypatch, device):
    """Let every `CudaVectorEnv` be made on this device."""
    monkeypatch.setattr(env, "open_device", lambda name: device)
    return device


def same(found, expected, what=""):
    """Require equal numbers of a device and of the CPU, of whatever dtype the latter are."""
    found = np.asarray(found)
    np.testing.assert_array_equal(found, np.asarray(expected).astype(found.dtype), what)


def all_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        same(one, other)


# What reads a tensor on the host; of a device each of them waits.
_READS = ("numpy", "cpu", "tolist", "item", "__array__", "__bool__", "__float__")


def refuse_host(patch, allowed=()):
    """Let reads of tensors on the host raise; return what they call, for others to be patched."""

    def refuse(*args, **kwargs):
        raise AssertionError("memory of the host was asked for")

    for name in set(_READS).difference(allowed):
        patch.setattr(torch.Tensor, name, refuse)
    return refuse
