"""Wrappers that apply a user's function to observations, rewards or actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box

from vecenv.core.base import VecEnv
from vecenv.core.errors import ObservationError
from vecenv.core.spaces import is_arrays, leaves
from vecenv.wrappers.base import Part, VecWrapper, new_batch

__all__ = [
    "ClipAction",
    "ClipReward",
    "RescaleAction",
    "TransformAction",
    "TransformObservation",
    "TransformReward",
    "require_arrays",
]


class TransformObservation(VecWrapper):
    """Applies a function to batches of observations.

    Args:
        env: The vector env.
        func: Gets observations (B, *obs_shape) of some envs or all, nested as the env's space, and
            must not change them; returns (B, *new_shape), row for row, which is copied.
        single_observation_space: Space of what `func` returns for one observation; None if shape,
            dtype and bounds are unchanged. Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple.

    Raises:
        TypeError: `func` can't be called, or the space has no fixed shape.
        ObservationError: In `reset`, `step` and `recv`: `func` returned another shape or dtype.

    Example:
        >>> import vecenv
        >>> from gymnasium.spaces import Box
        >>> envs = vecenv.make_vec("CartPole-v1", 2)
        >>> envs = TransformObservation(envs, lambda obs: obs[:, :2], Box(-5, 5, (2,)))
        >>> envs.reset(seed=1)[0].shape
        (2, 2)
        >>> envs.close()
    """

    changes_obs = True

    def __init__(
        self,
        env: VecEnv,
        func: Callable[[Any], Any],
        single_observation_space: Space | None = None,
    ) -> None:
        _require_callable(func, type(self).__name__)
        super().__init__(env, single_observation_space=single_observation_space)
        require_arrays(self.single_observation_space, type(self).__name__)
        self.func = func

    def observations(self, obs: Any, part: Part, out: Any) -> None:
        """Write the function's result."""
        self._put(self.func(obs), out)

    def final_observations(self, obs: Any, rows: np.ndarray) -> Any:
        """Return the function's result."""
        out = new_batch(self.single_observation_space, len(rows))
        self._put(self.func(obs), out)
        return out

    def _put(self, found: Any, out: Any) -> None:
        space, given = self.single_observation_space, list[Any]()
        targets = leaves(out, space)
        try:
            given = leaves(found, space)
            came, wanted = ([(x.shape, str(x.dtype)) for x in xs] for xs in (given, targets))
        except (TypeError, LookupError, AttributeError):
            came, wanted = type(found).__name__, "arrays"
        if came != wanted:
            raise ObservationError(
                f"{type(self).__name__}: the function returned {came}, expected {wanted} (a batch "
                f"of {space}); say what it makes of one observation with "
                "single_observation_space=..."
            )
        for value, target in zip(given, targets, strict=True):
            target[...] = value


class TransformReward(VecWrapper):
    """Applies a function to batches of rewards.

    Args:
        env: The vector env.
        func: Gets rewards float64 (B,), which it must not change; returns as many numbers. The step
            that only resets (NEXT_STEP) keeps its reward of 0, whatever `func` returns for it.

    Raises:
        TypeError: `func` can't be called; or, in `step` and `recv`, it returned no numbers.
        ValueError: In `step` and `recv`: it returned another shape.
    """

    changes_rewards = True

    def __init__(self, env: VecEnv, func: Callable[[np.ndarray], Any]) -> None:
        _require_callable(func, type(self).__name__)
        super().__init__(env)
        self.func = func

    def rewards(self, rewards: np.ndarray, part: Part) -> np.ndarray:
        """Return the function's result."""
        found = np.asarray(self.func(rewards))
        if found.shape != rewards.shape:
            raise ValueError(
                f"{type(self).__name__}: the function returned shape {found.shape} for rewards of "
                f"shape {rewards.shape}, expected one reward per row"
            )
        if found.dtype.kind not in "fiub":
            raise TypeError(
                f"{type(self).__name__}: the function returned {found.dtype}, expected real numbers"
            )
        return np.array(found, np.float64)


class ClipReward(TransformReward):
    """Clips rewards.

    Args:
        env: The vector env.
        min_reward: Lowest reward; None for no bound.
        max_reward: Highest reward; None for no bound.

    Raises:
        ValueError: There is no bound, one is NaN, or the lowest is above the highest.
    """

    def __init__(
        self, env: VecEnv, min_reward: float | None = None, max_reward: float | None = None
    ) -> None:
        low = -np.inf if min_reward is None else float(min_reward)
        high = np.inf if max_reward is None else float(max_reward)
        if (min_reward is None and max_reward is None) or not low <= high:
            raise ValueError(
                f"ClipReward: min_reward is {min_reward} and max_reward {max_reward}, expected at "
                "least one number, and min_reward <= max_reward"
            )
        # It takes a third of the time of `np.clip`.
        super().__init__(env, lambda rewards: np.minimum(np.maximum(rewards, low), high))
        self.min_reward, self.max_reward = low, high


class TransformAction(VecWrapper):
    """Applies a function to batches of actions before the env gets them.

    Args:
        env: The vector env.
        func: Gets actions (B, *action_shape) of `single_action_space` for some envs or all; returns
            actions (B, ...) of the env's space.
        single_action_space: Space of what `func` takes; None if it is unchanged. With another space
            the wrapper has no action masks, as the env's masks are for its own actions.

    Raises:
        TypeError: `func` can't be called.
        ActionError: In `step` and `send`: the given actions, or those that `func` returned, do not
            fit; nothing was stepped.
    """

    def __init__(
        self,
        env: VecEnv,
        func: Callable[[Any], Any],
        single_action_space: Space | None = None,
    ) -> None:
        _require_callable(func, type(self).__name__)
        super().__init__(env, single_action_space=single_action_space)
        self.func = func

    def actions(self, actions: Any, env_ids: np.ndarray | None) -> Any:
        """Return the function's result."""
        return self.func(actions)


class ClipAction(TransformAction):
    """Clips actions to the bounds of the env's Box, so that any number is accepted.

    Args:
        env: The vector env; its actions are a Box.

    Raises:
        TypeError: The actions are no Box.
    """

    def __init__(self, env: VecEnv) -> None:
        space = _action_box(env, type(self).__name__)
        wide = Box(-np.inf, np.inf, space.shape, space.dtype)  # type: ignore[arg-type]  # Space allows no dtype, a Box has one
        super().__init__(env, lambda actions: np.clip(actions, space.low, space.high), wide)


class RescaleAction(TransformAction):
    """Takes actions with equal bounds in every dimension, and rescales them to the env's.

    Args:
        env: The vector env; its actions are a Box with finite bounds.
        min_action: Stands for the env's lowest action: a number, or an array of the action's shape.
        max_action: Stands for the env's highest action, likewise.

    Raises:
        TypeError: The actions are no Box.
        ValueError: Bounds are infinite, of another shape, or the lowest is not below the highest.
    """

    def __init__(self, env: VecEnv, min_action: Any = -1.0, max_action: Any = 1.0) -> None:
        from gymnasium.wrappers.utils import rescale_box

        name = type(self).__name__
        space = _action_box(env, name)
        low, high = (np.asarray(bound, space.dtype) for bound in (min_action, max_action))
        try:
            low, high = (np.broadcast_to(bound, space.shape).copy() for bound in (low, high))
        except ValueError:
            raise ValueError(
                f"{name}: min_action and max_action have shapes {low.shape} and {high.shape}, "
                f"expected numbers or arrays of shape {space.shape}"
            ) from None
        if not np.isfinite([space.low, space.high]).all():
            raise ValueError(
                f"{name} rescales to the bounds of the env's actions, which are infinite: {space}; "
                "wrap it in TransformAction with a function of your own"
            )
        if not (low < high).all():  # refuses NaN too
            raise ValueError(f"{name}: min_action is {low}, max_action {high}, expected min < max")
        wide, _, backward = rescale_box(space, low, high)
        super().__init__(env, backward, wide)


def _require_callable(func: Any, name: str) -> None:
    if not callable(func):
        raise TypeError(f"{name}: func is {func!r}, expected a function of a batch")


def require_arrays(space: Space, name: str) -> None:
    """Raise for observations without a fixed shape."""
    if not is_arrays(space):
        raise TypeError(
            f"{name} returns arrays, and {space} has no fixed shape; give the space of what it "
            "returns as single_observation_space, or wrap the single envs "
            "(make_vec(..., wrappers=[...]))"
        )


def _action_box(env: Any, name: str) -> Box:
    space = getattr(env, "single_action_space", None)
    if not isinstance(space, Box):
        raise TypeError(f"{name} needs actions that are a Box, got {space}")
    return space
