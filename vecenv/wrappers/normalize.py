"""Normalise observations and rewards by their variation, with common moments for all envs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from gymnasium.spaces import Box

from vecenv.core.base import VecEnv
from vecenv.core.errors import EnvStateError, ObservationError
from vecenv.core.moments import joined
from vecenv.wrappers.base import Part, VecWrapper

__all__ = ["NormalizeObservation", "NormalizeReward", "RunningMoments"]


class RunningMoments:
    """Running mean and variance of rows, in NumPy.

    The formulas are those of the torch module `vecenv.learn.Moments`, and the entries of
    `state_dict` have the same names, so that module can continue from them:
    `moments.load_state_dict({k: torch.as_tensor(v) for k, v in running.state_dict().items()})`.

    Args:
        shape: Shape of a row; () for numbers.

    Attributes:
        mean: float64 `shape`.
        variance: float64 `shape`, the mean of squared deviations; 1 before the first row.
        count: int64 (), number of rows so far.

    Example:
        >>> moments = RunningMoments((2,))
        >>> moments.update(np.array([[1.0, 10.0], [3.0, 30.0]]))
        True
        >>> moments.mean, moments.variance
        (array([ 2., 20.]), array([  1., 100.]))
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean, self.variance = np.zeros(shape), np.ones(shape)
        self.count = np.zeros((), np.int64)

    def update(self, rows: np.ndarray, counts: np.ndarray | None = None) -> bool:
        """Add rows to the moments.

        Args:
            rows: (B, *shape) of any number type.
            counts: bool (B,), the rows that count; None for all.

        Returns:
            Whether all numbers are finite; otherwise nothing was changed.

        Raises:
            ValueError: The shape is wrong; nothing was changed.
        """
        if rows.ndim == 0 or rows.shape[1:] != self.mean.shape:
            raise ValueError(f"rows has shape {rows.shape}, expected (B, *{self.mean.shape})")
        counts = np.ones(len(rows), np.bool_) if counts is None else counts
        rows, seen = rows if counts.all() else rows[counts], int(self.count)
        if not rows.size:
            return True
        x = rows.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):  # such rows are refused
            mean = x.mean(0)
            x -= mean
            squares = np.square(x, out=x).sum(0)
        if not np.isfinite(squares).all():
            return False
        before = seen, self.mean, self.variance * seen
        self.count[...], self.mean[...], squares = joined(*before, len(rows), mean, squares)
        self.variance[...] = squares / self.count
        return True

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of mean, variance and count."""
        return {
            "mean": self.mean.copy(),
            "variance": self.variance.copy(),
            "count": self.count.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of this class or of `vecenv.learn.Moments` returned.

        Raises:
            EnvStateError: Entries are missing, of another shape, not finite, or negative.
        """
        own = self.state_dict()
        given = {key: np.asarray(state[key]) if key in state else None for key in own}
        for key, value in given.items():
            if value is None or value.shape != own[key].shape:
                came = "no entry" if value is None else f"shape {value.shape}"
                raise EnvStateError(
                    f"the moments have {came} for {key!r}, expected shape {own[key].shape}"
                )
            if not np.isfinite(value).all() or (key != "mean" and (value < 0).any()):
                raise EnvStateError(f"the moments have {key} {value!s:.100}, expected numbers >= 0")
        for key, value in given.items():
            getattr(self, key)[...] = value


class NormalizeObservation(VecWrapper):
    """Subtracts the running mean of observations and divides by their running standard deviation.

    The moments are common to all envs. They count every observation that an env returns, including
    the first and last ones of episodes, but not final observations of SAME_STEP, which are only
    normalised. Zeros of agents that are not alive do not count, and stay zeros. A batch counts
    before it is normalised. After a reset by mask only the envs that were reset count, from the
    next step on, so that other rows are unchanged.

    Args:
        env: The vector env; its observations are a Box.
        epsilon: Added to the variance.
        clip: Results are clipped to -clip ... clip; None for no bound.

    Attributes:
        moments: The `RunningMoments`; part of the env's `state_dict`.
        update_running_mean: Whether observations count; set it to False for
            evaluation.

    Raises:
        TypeError: The observations are no Box.
        ValueError: `epsilon` or `clip` is not positive.
        ObservationError: In `reset`, `step` and `recv`: NaN or infinity; names the env.
    """

    changes_obs = True
    single_observation_space: Box

    def __init__(self, env: VecEnv, epsilon: float = 1e-8, clip: float | None = 10.0) -> None:
        name = type(self).__name__
        given = getattr(env, "single_observation_space", None)
        if not isinstance(given, Box):
            raise TypeError(
                f"{name} needs observations that are a Box, got {given}; make them one with "
                "TransformObservation, or gymnasium.wrappers.FlattenObservation around single envs"
            )
        self.clip, self.epsilon = _bound(name, clip), _positive(name, "epsilon", epsilon)
        space = Box(-self.clip, self.clip, given.shape, np.float32)
        super().__init__(env, single_observation_space=space)
        self.update_running_mean = True
        self.moments = RunningMoments(given.shape)
        self._is_partial = False  # whether the reset has left envs out

    def restart(self, rows: np.ndarray) -> None:
        """Note whether the reset has left envs out."""
        self._is_partial = not rows.all()

    def reset_observations(self, obs: Any, part: Part, out: Any) -> None:
        """Write the observations normalised; those of a reset by mask count from the next step."""
        if self._is_partial:
            self._normalize(obs, out, part)
            self._count(obs, part)
        else:
            self.observations(obs, part, out)

    def observations(self, obs: Any, part: Part, out: Any) -> None:
        """Write the observations normalised, after counting them."""
        self._count(obs, part)
        self._normalize(obs, out, part)

    def final_observations(self, obs: Any, rows: np.ndarray) -> Any:
        """Return the observations normalised; they do not count."""
        out = np.empty(obs.shape, np.float32)
        self._normalize(obs, out, None)
        return out

    def _count(self, obs: Any, part: Part) -> None:
        if self.update_running_mean and not self.moments.update(obs, part.is_new):
            bad = ~np.isfinite(obs).reshape(len(obs), -1).all(axis=1) & part.is_new
            _refuse("NaN, infinity or numbers too large in its observation", obs, bad, part)

    def _normalize(self, obs: np.ndarray, out: np.ndarray, part: Part | None) -> None:
        """Normalise observations by the moments; rows of dead agents stay zeros."""
        found = (obs - self.moments.mean) / np.sqrt(self.moments.variance + self.epsilon)
        np.clip(found, -self.clip, self.clip, out=out, casting="same_kind")
        if part is not None and part.is_dead is not None:
            out[part.is_dead] = 0.0

    def own_state(self) -> dict[str, Any]:
        """Return the moments."""
        return {"moments": self.moments.state_dict()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `own_state` returned."""
        self.moments.load_state_dict(state["moments"])


class NormalizeReward(VecWrapper):
    """Divides rewards by the running standard deviation of discounted returns.

    The return of an env is gamma times its former value plus the reward; it begins at 0 with every
    episode. Steps that only reset (NEXT_STEP) and agents that are not alive do not count. Rewards
    keep their sign, as the mean is not subtracted.

    Args:
        env: The vector env.
        gamma: Discount of the returns, from 0 to 1.
        epsilon: Added to the variance.
        clip: Results are clipped to -clip ... clip; None for no bound.

    Attributes:
        moments: The `RunningMoments` of the returns; part of the env's `state_dict`.
        update_running_mean: Whether rewards count.

    Raises:
        ValueError: `gamma`, `epsilon` or `clip` is out of range.
        ObservationError: In `step` and `recv`: a reward is NaN or infinite; names the env.
    """

    changes_rewards = True

    def __init__(
        self,
        env: VecEnv,
        gamma: float = 0.99,
        epsilon: float = 1e-8,
        clip: float | None = 10.0,
    ) -> None:
        name = type(self).__name__
        if not 0 <= gamma <= 1:
            raise ValueError(f"{name}: gamma is {gamma}, expected a number from 0 to 1")
        self.gamma, self.epsilon = float(gamma), _positive(name, "epsilon", epsilon)
        self.clip = _bound(name, clip)
        super().__init__(env)
        self.update_running_mean = True
        self.moments = RunningMoments()
        self._returns = np.zeros(self.num_envs)

    def rewards(self, rewards: np.ndarray, part: Part) -> np.ndarray:
        """Return the rewards divided, after counting them."""
        returns = self._returns[part.rows] * self.gamma + np.where(part.acted, rewards, 0.0)
        if self.update_running_mean:
            is_finite = self.moments.update(returns, part.acted)
        else:
            is_finite = np.isfinite(returns).all()
        if not is_finite:
            bad = ~np.isfinite(returns)
            self._returns[part.rows] = np.where(bad, 0.0, returns)
            _refuse("the reward", rewards, bad, part)
        self._returns[part.rows] = np.where(part.is_over | part.begins, 0.0, returns)
        found = rewards / np.sqrt(self.moments.variance + self.epsilon)
        return np.clip(found, -self.clip, self.clip, out=found)

    def restart(self, rows: np.ndarray) -> None:
        """Begin the returns of these envs anew."""
        self._returns[rows] = 0.0

    def own_state(self) -> dict[str, Any]:
        """Return the moments, and the returns of unfinished episodes."""
        return {"moments": self.moments.state_dict(), "returns": self._returns.copy()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `own_state` returned."""
        self.moments.load_state_dict(state["moments"])
        self._returns[...] = state["returns"]


def _refuse(what: str, values: np.ndarray, bad: np.ndarray, part: Part) -> NoReturn:
    """Raise an error that names the env of the first bad row, bool (B,)."""
    row = int(bad.argmax())
    raise ObservationError(
        f"returned {what} {values[row]!s:.200}, of which there are no moments; correct the env",
        row if isinstance(part.rows, slice) else int(part.rows[row]),
    )


def _positive(name: str, argument: str, value: Any) -> float:
    if not value > 0:  # refuses NaN too
        raise ValueError(f"{name}: {argument} is {value}, expected a number above 0")
    return float(value)


def _bound(name: str, clip: float | None) -> float:
    return np.inf if clip is None else _positive(name, "clip", clip)
