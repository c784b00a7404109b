"""The memory of a pool, and how envs are shared out."""

import numpy as np
import pytest
from workers.faulty_envs import faulty

from vecenv import AsyncVectorEnv
from vecenv.workers.plan import worker_bounds


def bounds(num_envs, num_workers=None, caller_steps=False, max_concurrency=None):
    return worker_bounds(num_envs, num_workers, max_concurrency, caller_steps)


def test_shares_of_workers():
    assert bounds(5, 9) == [0, 1, 2, 3, 4, 5]
    assert bounds(5, 9, caller_steps=True) == [1, 2, 3, 4, 5]
    assert bounds(1, 3, caller_steps=True) == [0, 1]
    assert bounds(64, 8, max_concurrency=3) == [0, 22, 43, 64]
    assert bounds(64) == bounds(64, "auto")
    assert {type(bound) for bound in bounds(4, np.int8(2))} == {int}
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="max_concurrency"):
            bounds(4, 2, max_concurrency=wrong)
    for wrong in (0, 2.0, True, "2"):
        with pytest.raises(ValueError, match=f"num_workers is {wrong!r}, expected an integer"):
            bounds(4, wrong)


def test_memory_that_is_closed_with_its_vector_env_is_given_back():
    before = num_mappings()
    envs = AsyncVectorEnv(faulty(2), num_workers=1)
    envs.reset()
    obs, *_ = envs.step([0, 0])
    envs.close()
    assert num_mappings() == before
    assert obs[:, 1].tolist() == [1, 1]
    assert envs.restarts.tolist() == [0, 0]
    assert envs.allocate((3,)).tolist() == [0, 0, 0]


def num_mappings():
    with open("/proc/self/maps") as file:
        return file.read().count("memfd:vecenv")
