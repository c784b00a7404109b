"""Restart of an env that has raised: its episode is truncated, a new env takes its place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Env

from vecenv.core.faults import leave_if_copied, shorten
from vecenv.core.infos import copy_value

__all__ = ["RestartingEnv", "mixed_seed", "with_restarts", "without_restarts"]


class RestartingEnv:
    """Stands for an env in `EnvGroup`; when the env raises, makes a new one and reports truncation.

    The step that failed returns the last observation, reward 0, truncated, and the info fields
    `restarts` (int, so far) and `restart_reason` (text). What follows is autoreset's business.

    Attributes:
        env: The env that is being stepped.

    Args:
        env: The first env.
        factory: Makes the next ones.
        count: int64 (1,), shared with the caller: how often the env has been replaced.
        is_callers: Whether the caller's own process steps it.
    """

    def __init__(
        self, env: Env, factory: Callable[[], Env], count: np.ndarray, is_callers: bool
    ) -> None:
        self.env = env
        self._is_callers = is_callers
        self._count = count
        self._factory = factory
        self._seed: int | None = None
        self._last_obs: Any = None
        self._lost: str | None = None  # why the episode in progress is lost

    def lose(self, last_obs: Any, reason: str) -> None:
        """Let the next step report that the episode was lost with the former worker."""
        self._last_obs, self._lost = last_obs, reason

    def go_on_with(self, env: Env, last_obs: Any, factory: Callable[[], Env] | None = None) -> None:
        """Stand for another env from now on, whose last observation was this."""
        self.env, self._last_obs, self._lost = env, last_obs, None
        self._factory = factory or self._factory

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the env; if it raises, try once with a new one."""
        self._lost = None
        if seed is not None:
            self._seed = seed
        again = None if options is None else copy_value(options)  # envs may change theirs
        try:
            result = self.env.reset(seed=seed, options=options)
        except BaseException as error:
            self._require_fault(error)
            self._replace()
            result = self.env.reset(seed=seed, options=again)
        self._last_obs = result[0]
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env, or report its loss."""
        reason, self._lost = self._lost, None
        if reason is None:
            try:
                result = self.env.step(action)
                self._last_obs = result[0]
                return result
            except BaseException as error:
                self._require_fault(error)
                reason = _reason(error, action)
                self._replace()
        info = {"restarts": int(self._count[0]), "restart_reason": reason}
        return self._last_obs, 0.0, False, True, info

    def _require_fault(self, error: BaseException) -> None:
        """Let Ctrl-C through where it can come from the terminal: workers ignore it."""
        leave_if_copied(error)
        if self._is_callers and isinstance(error, KeyboardInterrupt):
            raise error

    def _replace(self) -> None:
        """Make a new env and seed it from the seed of the last reset and the number of restarts."""
        with contextlib.suppress(Exception, SystemExit):  # it has just raised; it is a courtesy
            self.env.close()
        self.env = self._factory()
        self._count += 1
        if self._seed is not None:
            self.env.reset(seed=mixed_seed(self._seed, int(self._count[0])))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


def _reason(error: BaseException, action: Any) -> str:
    try:
        return f"{type(error).__name__}: {error} (action {shorten(repr(action))})"
    except Exception:  # texts come from users' classes
        return type(error).__name__


def mixed_seed(seed: int, count: int) -> int:
    """Return the seed of the env that replaces one for the `count`-th time."""
    return int(np.random.SeedSequence([seed, count]).generate_state(1)[0])


def with_restarts(
    envs: Sequence[Env],
    factories: Sequence[Callable[[], Env]],
    counts: np.ndarray,
    *,
    is_callers: bool = True,
) -> list[Any]:
    """Have every env restarted when it raises; counts int64 (num_envs,) is shared with the caller.

    With `is_callers`, Ctrl-C while an env is stepped is no fault of the env's.
    """
    return [
        RestartingEnv(env, factory, counts[index : index + 1], is_callers)
        for index, (env, factory) in enumerate(zip(envs, factories, strict=True))
    ]


def without_restarts(env: Any) -> Env:
    """Return the env itself."""
    return env.env if isinstance(env, RestartingEnv) else env
