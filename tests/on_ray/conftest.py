"""No test of Ray runs where it is not installed, and none leaves actors."""

import gc
from importlib.util import find_spec

import pytest

if find_spec("ray") is None:  # pip install 'vecenv[ray]'
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def actors_find_the_test_modules(path_for_actors):
    """For clusters that tests start themselves, too."""


@pytest.fixture(autouse=True)
def no_test_leaves_actors():
    """A test that fails keeps its vector env alive, and the next ones would wait for its place."""
    yield
    from vecenv import RayVectorEnv

    for envs in [found for found in gc.get_objects() if type(found) is RayVectorEnv]:
        envs.close(terminate=True)
