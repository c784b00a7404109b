"""A few interrupts of each kind of vector env; `make fuzz` takes a minute of new ones."""

import pytest
from fuzz.nursery import run_apart

from vecenv.core.compiling import is_jit_off

pytestmark = pytest.mark.skipif(
    is_jit_off(), reason="steps in Python are interrupted in their midst"
)


@pytest.mark.slow
def test_a_few_interrupts():
    """The same ones every time, as far as clocks allow."""
    assert run_apart("fuzz.interrupts", 5, "cartpole", 40) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("changes a state", "the state is none of"),
        ("dies", "died by SIGSEGV"),
        ("hangs", "hangs"),
    ],
)
def test_a_fault_is_found(fault, told):
    with pytest.raises(AssertionError, match=told):
        run_apart(
            "fuzz.interrupts", 7, "cartpole", 150, fault, limit_s=2.0 if fault == "hangs" else 30.0
        )
