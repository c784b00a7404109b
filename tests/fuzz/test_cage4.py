"""A case of the fuzzer of CAGE Challenge 4."""

import pytest
from fuzz import cage4


@pytest.mark.slow
def test_a_case_of_the_fuzzer_runs():
    assert cage4.run_case(7) > 0
