"""How much memory is free."""

import pytest


@pytest.fixture
def set_free_bytes(monkeypatch):
    """A function that lets every request be compared with so many bytes of free memory."""

    def set_to(number):
        monkeypatch.setattr("buffers.core.memory.free_bytes", lambda device: number)
        monkeypatch.setattr("buffers.core.memory._UNSEEN_BYTES", -1)

    return set_to
