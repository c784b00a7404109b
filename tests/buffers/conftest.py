"""Modules of kernels in other forms than the one that is imported; how much memory is free."""

import importlib.util
import sys

import numba
import pytest


def load_with(njit, module, monkeypatch):
    """The module once more, with another function in the place of numba.njit."""
    with monkeypatch.context() as patch:
        patch.setattr(numba, "njit", njit)
        spec = importlib.util.spec_from_file_location(f"other_{module.__name__}", module.__file__)
        other = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, other)
        spec.loader.exec_module(other)
    return other


@pytest.fixture(params=["compiled", "plain"])
def load_kernels(request, monkeypatch):
    """A function that returns a module of kernels as it is, or as the plain Python it also is."""

    def load(module):
        if request.param == "compiled":
            return module
        plain = load_with(lambda **_: lambda function: function, module, monkeypatch)
        for name, value in vars(plain).items():  # compiled ones of other modules
            vars(plain)[name] = getattr(value, "py_func", value)
        return plain

    return load


@pytest.fixture
def set_free_bytes(monkeypatch):
    """A function that lets every request be compared with so many bytes of free memory."""

    def set_to(number):
        monkeypatch.setattr("buffers.core.memory.free_bytes", lambda device: number)
        monkeypatch.setattr("buffers.core.memory._UNSEEN_BYTES", -1)

    return set_to
