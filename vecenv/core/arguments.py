"""Checks of numbers and names that users pass; messages begin with the name of the argument."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np
from gymnasium.vector import AutoresetMode

__all__ = [
    "Deadline",
    "check_choice",
    "read_autoreset_mode",
    "read_count",
    "read_timeout",
    "take_options",
]

_Options = TypeVar("_Options")


def read_count(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Return an integer from `least` to `most` (None: no limit); raise ValueError for others.

    Example:
        >>> read_count("num_envs", np.int64(8))
        8
        >>> read_count("num_envs", True)
        Traceback (most recent call last):
        ValueError: num_envs is True, expected an integer of at least 1
    """
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if is_integer and value >= least and (most is None or value <= most):
        return int(value)
    expected = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise ValueError(f"{name} is {value!r}, expected an integer {expected}")


def read_timeout(name: str, value: Any) -> float | None:
    """Return the longest wait in seconds; None waits without limit. Raises TypeError or ValueError.

    Example:
        >>> read_timeout("timeout", -1)
        Traceback (most recent call last):
        ValueError: timeout is -1, expected seconds from 0 on, or None
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}, expected a number of seconds, or None")
    if not float(value) >= 0:
        raise ValueError(f"{name} is {value!r}, expected seconds from 0 on, or None")
    # As a Python float: a time plus a float32 would be a float32, too coarse for clock times.
    return value if isinstance(value, int | float) else float(value)


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ValueError unless an argument is one of some strings (or None, if that is a choice)."""
    if not isinstance(value, str | None) or value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(str, choices))}")


def read_autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    """Return the mode for an enum member, or for its name or value in any spelling.

    Example:
        >>> read_autoreset_mode("same_step"), read_autoreset_mode("NextStep")
        (<AutoresetMode.SAME_STEP: 'SameStep'>, <AutoresetMode.NEXT_STEP: 'NextStep'>)
    """
    if isinstance(mode, AutoresetMode):
        return mode
    if isinstance(mode, str):
        spelled = mode.rpartition(".")[2].replace("_", "").replace("-", "").replace(" ", "").lower()
        for member in AutoresetMode:
            if spelled == member.value.lower():
                return member
    known = ", ".join(repr(member.value) for member in AutoresetMode)
    raise ValueError(
        f"autoreset_mode is {mode!r}, expected one of {known} (or 'next_step', ... or a member of "
        "gymnasium.vector.AutoresetMode)"
    )


def take_options(
    kind: Callable[..., _Options], fields: Iterable[str], options: dict[str, Any]
) -> _Options:
    """Make `kind` from the options that are its fields, and remove them from `options`."""
    return kind(**{name: options.pop(name) for name in fields if name in options})


class Deadline:
    """A point in time; with timeout None it never comes.

    Attributes:
        timeout: Seconds from now.
        is_limit: Whether an env that takes longer is at fault. Else only the wait is over.
    """

    def __init__(self, timeout: float | None, *, is_limit: bool = False) -> None:
        self.timeout = timeout
        self.is_limit = is_limit
        self._end = None if timeout is None else time.monotonic() + timeout

    @staticmethod
    def of_call(timeout: float | None, limit: float | None) -> Deadline:
        """Return the deadline of a call: its own timeout, which only ends the wait, or a limit."""
        if timeout is not None:
            return Deadline(timeout)
        return _NEVER if limit is None else Deadline(limit, is_limit=True)

    def left(self) -> float:
        """Return the seconds left, at least 0; infinity if it never comes."""
        return float("inf") if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return self._end is not None and time.monotonic() >= self._end


_NEVER = Deadline(None, is_limit=True)
