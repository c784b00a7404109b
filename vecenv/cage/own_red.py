"""Checks of custom red agents, for any challenge: their type and their return values."""

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
    """Return a policy as compiled code; equal calls return the same object.

    Args:
        option: Name of the argument, for messages.
        policy: A compiled function, or a plain one, which is compiled.
        parameters: Names of the parameters that it must take.

    Raises:
        TypeError: The policy is not a function, or takes other parameters.
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
    """Return a description of what is wrong with a red policy's choice, or None.

    Args:
        policy: Name of the policy.
        choice: Its return value.
        length: Expected number of integers.
        expected: Meaning of the integers, in words.
        unknown: Function of the integers; returns which of them is invalid, such as "no host 9,
            expected 0..8", or None.
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
    """Return a message that no `what` has this number, or None if it is below `count`."""
    return None if 0 <= number < count else f"no {what} {number}, expected 0..{count - 1}"
