"""A red agent of a user's own, in any challenge: what it may be, and what it may return."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

__all__ = ["choice_problem", "compiled_red", "outside"]


@functools.cache
def compiled_red(option: str, policy: Any, parameters: tuple[str, ...]) -> Any:
    """Return a policy as compiled code, the same for the same function.

    Args:
        option: What the argument is called.
        policy: A function; a plain one is compiled.
        parameters: What it takes.

    Raises:
        TypeError: It is something else, or takes others.
    """
    function = getattr(policy, "py_func", policy)
    wanted = f"a function of ({', '.join(parameters)}) for one env"
    if not inspect.isfunction(function):
        raise TypeError(f"{option} is {policy!r}, expected {wanted}")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        came = f"{function.__name__}{inspect.signature(function)}"
        raise TypeError(f"{option} is {came}, expected {wanted}") from error
    return njit(function, error_model="numpy") if function is policy else policy


def choice_problem(
    policy: str, choice: Any, length: int, expected: str, unknown: Callable[..., str | None]
) -> str | None:
    """Return what is wrong with the choice of a red policy, or None.

    Args:
        policy: Its name.
        choice: What it returned.
        length: How many integers that should be.
        expected: What they should be, in words.
        unknown: Takes the integers; returns which of them means nothing, as "no host 9, expected
            0..8", or None.
    """
    if not isinstance(choice, tuple) or len(choice) != length:
        came = "None (this branch ends without `return`)" if choice is None else repr(choice)
        return f"red agent {policy} returns {came}, expected {expected}"
    told = f"red agent {policy} returns ({', '.join(map(str, choice))})"
    if not all(isinstance(one, int | np.integer) for one in choice):
        return f"{told}, expected {expected}"
    problem = unknown(*choice)
    return None if problem is None else f"{told}: there is {problem}"


def outside(what: str, number: int, count: int) -> str | None:
    """Say that there is no `what` of this number, if there are `count` of them."""
    return None if 0 <= number < count else f"no {what} {number}, expected 0..{count - 1}"
