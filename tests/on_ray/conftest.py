"""A Ray of its own for each module: small, without dashboard, and gone afterwards."""

import gc
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("ray") is None:  # pip install 'vecenv[ray]'
    collect_ignore_glob = ["test_*.py"]


TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def actors_find_the_test_modules():
    """Processes of Ray inherit the environment, not what pytest adds to the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        yield


@pytest.fixture(scope="module")
def local_ray():
    import ray

    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level="WARNING",
    )
    yield ray
    ray.shutdown()


@pytest.fixture(autouse=True)
def no_test_leaves_actors():
    """A test that fails keeps its vector env alive, and the next ones would wait for its place."""
    yield
    from vecenv import RayVectorEnv

    for envs in [found for found in gc.get_objects() if type(found) is RayVectorEnv]:
        envs.close(terminate=True)
