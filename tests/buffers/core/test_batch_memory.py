"""When the memory of batches is used again."""

import sys

import numpy as np
import pytest
import torch

from buffers.core import batches as batch_memory
from buffers.core.batches import BatchMemory

WAYS_TO_HOLD = {
    "tensor": torch.from_numpy,
    "view of the tensor": lambda array: torch.from_numpy(array)[1:],
    "storage": lambda array: torch.from_numpy(array).untyped_storage(),
    "array of the tensor": lambda array: torch.from_numpy(array).numpy()[::2],
}


def view(pages):
    return {"left": pages[:8].view(np.int32), "right": pages[8:]}, ["shared"]


@pytest.fixture(params=[-1, 0, 1])
def _other_count(request, monkeypatch):
    """Python counts references as a version does that counts this many more."""
    monkeypatch.setattr(
        batch_memory, "getrefcount", lambda array: sys.getrefcount(array) + request.param
    )


@pytest.mark.usefixtures("_other_count")
@pytest.mark.parametrize("hold", WAYS_TO_HOLD.values(), ids=WAYS_TO_HOLD)
@pytest.mark.parametrize("name", ["left", "right"])
def test_memory_is_used_again_when_nobody_holds_a_part_of_it_and_not_before(name, hold):
    memory = BatchMemory(24, view)
    kept = memory.take()
    pages, arrays, shared, *_ = kept
    memory.keep(kept)
    address, held = pages.ctypes.data, hold(arrays[name])
    del pages, arrays, shared, kept
    assert memory.take()[0].ctypes.data != address
    del held
    assert memory.take()[0].ctypes.data == address


def test_arrays_kept_alone_are_not_overwritten():
    memory = BatchMemory(24, view)
    held = [memory.take()[1]["left"] for _ in range(4)]
    assert len({array.ctypes.data for array in held}) == 4
