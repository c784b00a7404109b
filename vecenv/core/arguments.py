"""Read what users pass: numbers, names, seeds, options of `reset`, "module:object".

Messages begin with the name of the argument.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import operator
import os
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np
from gymnasium.vector import AutoresetMode

__all__ = [
    "Deadline",
    "Seed",
    "check_choice",
    "checked_seed",
    "import_module",
    "import_object",
    "read_autoreset_mode",
    "read_count",
    "read_timeout",
    "seed_per_env",
    "split_reset_mask",
    "take_options",
]

Seed = int | Sequence[int | None] | None
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


def checked_seed(seed: Seed, num_envs: int) -> int | list[int | None] | None:
    """Return the seed of `reset` as None, an int, or a list with an int or None per env.

    Raises:
        TypeError, ValueError: The seed is something else, or a list of wrong length.
    """
    if seed is None or isinstance(seed, int | np.integer):
        return None if seed is None else int(seed)
    has_items = hasattr(seed, "__len__") and not isinstance(seed, str | bytes)
    if not has_items or getattr(seed, "ndim", 1) == 0:  # arrays and tensors of one number
        raise TypeError(
            f"seed must be None, an integer or a list of them, got {seed!r} ({type(seed)})"
        )
    if len(seed) != num_envs:
        raise ValueError(
            "If seeds are passed as a list the length must match "
            f"num_envs={num_envs} but got length={len(seed)}."
        )
    try:
        return [None if one is None else operator.index(one) for one in seed]
    except TypeError as error:
        raise TypeError(f"a seed in the list {seed!r} is no integer: {error}") from None


def seed_per_env(seed: Seed, num_envs: int) -> list[int | None]:
    """Return one seed per env: for an integer s, env i gets s + i; for None, each gets None."""
    seed = checked_seed(seed, num_envs)
    if isinstance(seed, int):
        return [seed + index for index in range(num_envs)]
    return [None] * num_envs if seed is None else seed


def split_reset_mask(
    options: Mapping[str, Any] | None, num_envs: int
) -> tuple[np.ndarray | None, dict[str, Any] | None]:
    """Take `reset_mask` out of reset options, without changing the caller's dict.

    Returns:
        The mask, bool (num_envs,), a copy, or None; and the other options for the envs.

    Raises:
        TypeError: The options are not a dict, or the mask is not a NumPy array of bool.
        ValueError: The mask has the wrong shape or selects no env.
    """
    if options is None:
        return None, None
    if not isinstance(options, Mapping):
        raise TypeError(
            f"options is {options!r}, expected None or a dict, of which each env gets a copy"
        )
    rest = dict(options)
    if "reset_mask" not in rest:
        return None, rest
    mask = rest.pop("reset_mask")
    where = "`options['reset_mask']`"
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"{where} must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"{where} must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"{where} must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            f"{where} must contain a boolean array with at least one True value, "
            f"got reset_mask={mask}"
        )
    return np.array(mask), rest


def import_module(name: str) -> types.ModuleType:
    """Import a module, also one in the working directory.

    Raises:
        ImportError: The module can't be imported.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        here, package = os.getcwd(), name.partition(".")[0]
        if error.name != package:
            raise
        if here not in sys.path and "" not in sys.path:
            sys.path.append(here)  # for good, so that worker processes find it too
            importlib.invalidate_caches()
            if importlib.util.find_spec(package) is not None:
                return importlib.import_module(name)
        told = f"there is no module {package!r}, neither installed nor in {here}; go to the folder "
        told += "that it is in, or name that in PYTHONPATH"
        raise ModuleNotFoundError(told, name=package) from None


def import_object(argument: str, text: str) -> Any:
    """Import the object that "module:object" names; messages call the text `argument`.

    Raises:
        ValueError: The text has another form, or the module has no such object.
        ImportError: There is no such module, or it can't be imported.
    """
    module_name, _, path = text.partition(":")
    if not module_name or not path:
        raise ValueError(f"{argument} is {text!r}, expected 'module:object'")
    try:
        found = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0]:
            raise  # another module, which that one imports
        told = f"{argument} is {text!r}, but {error}"
        raise ModuleNotFoundError(told, name=error.name) from None
    for name in path.split("."):
        if not hasattr(found, name):
            own = [key for key in dir(found) if not key.startswith("_")]
            near = difflib.get_close_matches(name, own, 3) or own[:8]
            raise ValueError(
                f"{argument} is {text!r}, but {found!r} has no {name!r}; it has {', '.join(near)}"
            )
        found = getattr(found, name)
    return found


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
        return self.left() == 0


_NEVER = Deadline(None, is_limit=True)
