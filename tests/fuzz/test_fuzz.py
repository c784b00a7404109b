"""A small case of each fuzzer, the same every time; `make fuzz` takes a minute of new ones."""

import importlib

import pytest
from fuzz.__main__ import FUZZERS

from vecenv.core.compiling import is_jit_off


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(is_jit_off(), reason="steps in Python are interrupted in their midst")
@pytest.mark.parametrize("name", FUZZERS)
def test_a_case_of_each_fuzzer_finds_nothing(name):
    fuzzer = importlib.import_module(f"fuzz.{name}")
    assert fuzzer.run_case(6) > 0
