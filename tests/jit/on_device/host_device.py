"""Devices that are none: the driver of `vecenv.jit.cuda` in plain Python, in the host's memory."""

import types

import torch

from vecenv.jit.cuda import compiler, env
from vecenv.jit.cuda.devices import TorchMemory


class HostDevice(TorchMemory):
    """Runs the threads of a launch one after another."""

    def __init__(self, free_bytes=None):
        self.torch_device = torch.device("cpu")
        self._free_bytes = free_bytes

    def free_bytes(self):
        return self._free_bytes

    def host_zeros(self, count):
        return torch.zeros(count, dtype=torch.int64, device="cpu")

    def load(self, kernels, params):
        thread = [0]
        cuda = types.SimpleNamespace(grid=lambda ndim: thread[0])
        run = compiler.bound_driver(kernels, params, cuda, compiler.host_view, is_compiled=False)

        def launch(num_rows, arguments):
            for thread[0] in range(num_rows + 3):  # a block has more threads than there are rows
                run(*arguments.tolist())

        return launch


def use(monkeypatch, device):
    """Let every `CudaVectorEnv` be made on this device."""
    monkeypatch.setattr(env, "open_device", lambda name: device)
    return device


# What reads a tensor on the host; of a device each of them waits.
_READS = ("numpy", "cpu", "tolist", "item", "__array__", "__bool__", "__float__")


def refuse_host(patch, allowed=()):
    """Let reads of tensors on the host raise; return what they call, for others to be patched."""

    def refuse(*args, **kwargs):
        raise AssertionError("memory of the host was asked for")

    for name in set(_READS).difference(allowed):
        patch.setattr(torch.Tensor, name, refuse)
    return refuse
