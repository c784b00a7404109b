"""Set-up of the tests of `vecenv.learn`."""

import pytest


@pytest.fixture(autouse=True)
def key_of_its_own(monkeypatch, tmp_path_factory):
    """The key that signs checkpoints is not written into the home of who runs the tests."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
