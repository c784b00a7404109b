"""Read the seed and the options of `reset`."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["Seed", "checked_seed", "seed_per_env", "split_reset_mask"]

Seed = int | Sequence[int | None] | None

_MISSING = object()


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
    if (mask := rest.pop("reset_mask", _MISSING)) is _MISSING:
        return None, rest
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
