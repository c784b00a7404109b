"""Set-up of the tests of devices: one that is none."""

import pytest
from jit.on_device.host_device import HostDevice, use


@pytest.fixture
def host_device(monkeypatch):
    return use(monkeypatch, HostDevice())
