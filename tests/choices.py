"""Parametrisations of which some cases are fast tests, the others slow ones."""

import itertools

import pytest

from vecenv.core.compiling import is_jit_off

needs_jit = pytest.mark.skipif(is_jit_off(), reason="needs compiled code")


def fast_are(fast, cases):
    """Return all cases of a parametrisation, each a tuple or one value; those not in `fast` slow.

    So that each value of each parameter is in a fast test, but not each product of them.
    """
    fast, found = list(fast), []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=[] if case in fast else [pytest.mark.slow]))
    missing = [case for case in fast if case not in cases]
    assert not missing, f"no cases: {missing}"
    return found


def in_turn(values, *others):
    """Return a case for each of the values, with one of each of the others in turn."""
    return list(zip(values, *map(itertools.cycle, others), strict=False))


def product(*parameters):
    return list(itertools.product(*parameters))
