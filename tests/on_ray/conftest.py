"""No test of Ray runs where it is not installed, and none leaves actors."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None:  # pip install 'vecenv[ray]'
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def actors_find_the_test_modules(path_for_actors):
    """For clusters that tests start themselves, too."""


@pytest.fixture(autouse=True)
def no_test_leaves_actors(no_actors_stay):
    """A test that fails must not make the next ones wait."""
