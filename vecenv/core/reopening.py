"""Envs made anew in their row of a vector env, and what stands in a row whose env is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import Env, Space
from gymnasium.vector.utils import create_empty_array

from vecenv.core.batches import take_row
from vecenv.core.errors import EnvCreationError
from vecenv.core.spaces import require_new_env, require_spaces

__all__ = ["MissingEnv", "raise_creation_errors", "read_reopened", "remade"]


class MissingEnv(Env):
    """Stands in the row of an env that could not be made, until that row is reopened.

    Args:
        reason: What kept the env from being made: a text, or an `EnvFault`.
        is_empty: Whether its row is reset and stepped all the same: observations are zeros and
            every step is truncated, with the reason as `restart_reason` in the info. Else both
            raise EnvCreationError.
        spaces: (observation space, action space) of its row, once they are known.
    """

    def __init__(
        self, reason: Any, is_empty: bool, spaces: tuple[Space, Space] | None = None
    ) -> None:
        self.reason, self._is_empty = reason, is_empty
        if spaces is not None:
            self.be_of(*spaces)

    def be_of(self, observation_space: Space, action_space: Space) -> None:
        """Take on the spaces of the other envs."""
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Return an empty observation, or raise."""
        reason = getattr(self.reason, "text", self.reason)
        if not self._is_empty:
            raise EnvCreationError(f"this row has no env until it is reopened: {reason}")
        rows = create_empty_array(self.observation_space, 1, np.zeros)
        return take_row(self.observation_space, rows, 0), {"restart_reason": reason}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return a truncated step, or raise."""
        obs, info = self.reset()
        return obs, 0.0, False, True, info

    def get_wrapper_attr(self, name: str) -> Any:
        """Return None, whatever is asked for, or raise."""
        if not self._is_empty:
            self.reset()
        return None

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set nothing, or raise."""
        self.get_wrapper_attr(name)
        return False


def remade(
    env_id: int,
    env: Env,
    factory: Callable[[], Env],
    others: Iterable[Env],
    spaces: tuple[Space, Space],
    observation_mode: Any,
) -> Env:
    """Close an env, then return a new one for its row; raise what keeps it from being made.

    The old one goes first, as a process may have memory, or a display, for one of them only.

    Args:
        env_id: Which row, for messages.
        env: The old env.
        factory: Makes the new one.
        others: Envs of the same process, none of which it may return.
        spaces: (observation space, action space) that it must have; else it is closed again.
        observation_mode: That of the vector env: whether bounds of observations may differ.
    """
    with contextlib.suppress(Exception):  # its results are not asked for any more
        env.close()
    new = factory()
    if not isinstance(new, Env):
        raise TypeError(f"expected a gymnasium.Env, got {type(new).__name__}")
    require_new_env(new, {id(other.unwrapped): number for number, other in enumerate(others)})
    try:
        found = new.observation_space, new.action_space
        require_spaces(env_id, found, spaces, observation_mode, "that of the other envs")
    except BaseException:
        with contextlib.suppress(Exception):
            new.close()
        raise
    return new


def read_reopened(env_ids: np.ndarray, factories: Any) -> dict[int, Callable[[], Env]]:
    """Return the new factory of each row that is to be reopened, rows in ascending order.

    Args:
        env_ids: Distinct rows, int64 (B,).
        factories: One factory for all of them, or a sequence of one for each.

    Raises:
        TypeError: A factory can't be called.
        ValueError: Another number of factories than of rows.
    """
    given: Sequence[Any] = [factories] * len(env_ids) if callable(factories) else factories
    if not isinstance(given, Sequence) or len(given) != len(env_ids):
        raise ValueError(
            f"rows has {len(env_ids)} envs, but factories is {given!r}; give one factory for all "
            "of these rows, or a list of one for each"
        )
    found = dict(sorted(zip(env_ids.tolist(), given, strict=True)))
    for env_id, factory in found.items():
        if not callable(factory):
            raise TypeError(
                f"the factory of env {env_id} is {factory!r}, expected a function that makes an "
                "env, such as `lambda: MyEnv()`"
            )
    return found


def raise_creation_errors(errors: Sequence[EnvCreationError]) -> None:
    """Raise the first of some errors in reopening rows, with the others as notes."""
    if errors:
        error, *others = errors
        error.add_note("Its row has no env until it is reopened; the other rows are as they were.")
        for other in others:
            error.add_note(str(other))
        raise error
