"""Read tensors that `torch.save` has written, without torch.

Such a file is a zip archive: a pickle that refers to storages, and a file for each storage. Only
tensors, containers and plain values are accepted, so that no file can run code of its own.
"""

from __future__ import annotations

import pickle
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["TorchFileError", "read_torch_file"]

_STORAGE_DTYPES = {
    "DoubleStorage": np.dtype("f8"),
    "FloatStorage": np.dtype("f4"),
    "HalfStorage": np.dtype("f2"),
    "LongStorage": np.dtype("i8"),
    "IntStorage": np.dtype("i4"),
    "ShortStorage": np.dtype("i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}


class TorchFileError(ValueError):
    """A file is not what `torch.save` writes, or holds more than tensors and plain values."""


def read_torch_file(path: str | Path) -> Any:
    """Return what was saved, with NumPy arrays in place of tensors.

    Raises:
        TorchFileError: See there.
        OSError: The file can't be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            (pickled,) = (name for name in names if name.endswith("/data.pkl"))
            folder = pickled.removesuffix("data.pkl")
            if archive.read(f"{folder}byteorder") != sys.byteorder.encode():
                raise TorchFileError(f"{path} was written on a machine of another byte order")
            with archive.open(pickled) as stream:
                return _Reader(stream, archive, f"{folder}data/").load()
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        raise TorchFileError(
            f"{path} is no file of tensors as `torch.save` writes: {error}"
        ) from error


class _Reader(pickle.Unpickler):
    """Unpickles containers, plain values and tensors, and nothing else."""

    def __init__(self, stream: Any, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(stream)
        self._archive, self._folder = archive, folder

    def find_class(self, module: str, name: str, /) -> Any:
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        raise pickle.UnpicklingError(f"it holds {module}.{name}")

    def persistent_load(self, pid: Any, /) -> np.ndarray:
        kind, dtype, key, _, num_elements = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError(f"it refers to {pid}")
        return np.frombuffer(self._archive.read(f"{self._folder}{key}"), dtype, num_elements)


def _tensor(storage: np.ndarray, offset: int, shape: Any, strides: Any, *_: Any) -> np.ndarray:
    """Return a tensor as an array of its own."""
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if min(offset, *shape, *strides, 0) < 0 or (0 not in shape and last >= len(storage)):
        raise pickle.UnpicklingError(f"a tensor of shape {tuple(shape)} is beyond its storage")
    steps = [step * storage.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps).copy()


def _parameter(tensor: np.ndarray, *_: Any) -> np.ndarray:
    return tensor
