"""Ctrl-C at any instant, and forks of the caller: no wait for ever, no rows of another step."""

import pytest
from programs import printed

pytestmark = pytest.mark.ray

STRUCK = """
import ray
from fuzz.interrupts import run_here
options = {"include_dashboard": False, "object_store_memory": 80 * 2**20, "logging_level": 40}
ray.init(address="local", num_cpus=2, **options)
print(run_here(6, "ray"))
"""


def test_ctrl_c_at_any_instant_and_forks_lose_no_count_of_what_is_in_flight():
    assert int(printed(STRUCK)[-1]) > 150
