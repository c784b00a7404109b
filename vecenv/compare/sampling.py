"""Collecting transitions from one env and from several, to see how different they are."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env, Space
from gymnasium.spaces import Box, flatten, flatten_space

from vecenv.compare import diversity
from vecenv.core.random_actions import RandomActions

__all__ = ["Diversity", "Trajectories", "collect", "compare_sets", "measure_diversity"]

NUM_TRANSITIONS = 16_384
_LIMIT_S = 3.0  # of collecting from one env; the others collect as many transitions
_MOST_FEATURES = 64  # the numbers of longer observations are added up in as many random groups
_MOST_POINTS = 2048  # of which nearest neighbours are looked for
_FRAGMENT = 8  # steps over which rewards are added up, at most
_NUM_BATCHES, _FEWEST_BATCHES = 32, 4
_SMALL_BATCH = 32  # rows that correlation is about; more if there are more envs


class Trajectories(NamedTuple):
    """Transitions as they were collected.

    Attributes:
        states: float32 (T, N, D), observations before the step, flattened; the numbers of longer
            ones added up in 64 random groups with random signs, which keeps distances on average.
        keys: int64 (T, N), checksums of the whole observations.
        actions: (T, N, *action_shape); object (T, N) if they are no arrays.
        rewards: float64 (T, N).
        is_over: bool (T, N), whether the step ended its episode.
    """

    states: np.ndarray
    keys: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    is_over: np.ndarray


@dataclass(frozen=True)
class Diversity:
    """How different the transitions from a number of envs are.

    Attributes:
        num_envs: Collected from.
        num_transitions: As many for every number of envs, but for rounding.
        distinct: Share of states that are different from each other.
        neighbour_distance: Mean distance of a state to the one most like it, in standard deviations
            of all sets together.
        correlation: How much alike consecutive states are, see `intraclass_correlation`, in batches
            of 32, or of one step of all envs where these are more; None if there are too few.
        batch_size: Transitions in the batches that a policy gradient is estimated from.
        gradient_variance: Of that estimate over batches, with states and returns at mean 0 and
            variance 1; None if there are too few, or for action spaces without a gradient.
        gradient_error: Standard error of that variance.
    """

    num_envs: int
    num_transitions: int
    distinct: float
    neighbour_distance: float
    correlation: float | None
    batch_size: int
    gradient_variance: float | None
    gradient_error: float | None


class _Features:
    """Turns observations into vectors of at most 64 numbers."""

    def __init__(self, space: Space) -> None:
        flat = flatten_space(space)
        if not isinstance(flat, Box):
            raise ValueError(f"observations of {space} can't be laid out as vectors of numbers")
        self._space = space
        self._is_flat = isinstance(space, Box)
        size = int(np.prod(flat.shape))
        rng = np.random.default_rng(0)
        self._is_long = size > _MOST_FEATURES
        self._groups = rng.integers(0, _MOST_FEATURES, size)
        self._signs = rng.choice([-1.0, 1.0], size)

    def __call__(self, obs: Any) -> tuple[np.ndarray, int]:
        """Return float32 (D,) and a checksum."""
        flat = np.ravel(obs) if self._is_flat else np.asarray(flatten(self._space, obs))
        key = zlib.crc32(flat.tobytes())
        if self._is_long:
            flat = np.bincount(self._groups, self._signs * flat, _MOST_FEATURES)
        return flat.astype(np.float32), key


def collect(
    envs: Sequence[Env], num_steps: int, *, seed: int = 0, limit_s: float = np.inf
) -> Trajectories:
    """Step envs in turn with random actions that masks allow; env i is seeded with seed + i.

    Args:
        envs: At least one.
        num_steps: Of each env.
        seed: Of the envs and the actions.
        limit_s: Seconds after which no further step is begun; there always is one.

    Raises:
        ValueError: The observations are no vectors of numbers.
    """
    features = _Features(envs[0].observation_space)
    latest, draws = [], []
    for index, env in enumerate(envs):
        draws.append(RandomActions(env, seed + index))
        obs, info = env.reset(seed=seed + index)
        draws[index].see(obs, info)
        latest.append(features(obs))
    columns: tuple[list[Any], ...] = ([], [], [], [], [])
    begin = perf_counter()
    for step in range(num_steps):
        if step and perf_counter() - begin > limit_s:
            break
        for index, env in enumerate(envs):
            action = draws[index]()
            obs, reward, terminated, truncated, info = env.step(action)
            is_over = bool(terminated or truncated)
            row = (*latest[index], action, float(reward), is_over)
            for column, value in zip(columns, row, strict=True):
                column.append(value)
            if is_over:
                obs, info = env.reset()
            draws[index].see(obs, info)
            latest[index] = features(obs)
    return _laid_out(columns, len(envs))


def _laid_out(columns: Sequence[list[Any]], num_envs: int) -> Trajectories:
    """Make arrays (T, N, ...) of lists of rows."""

    def array(values: list[Any], dtype: Any = None) -> np.ndarray:
        if dtype is object:
            rows = np.empty(len(values), object)
            rows[:] = values
        else:
            rows = np.array(values, dtype)
        return rows.reshape(-1, num_envs, *rows.shape[1:])

    states, keys, actions, rewards, is_over = columns
    is_array = isinstance(actions[0], np.ndarray | np.generic | int | float)
    return Trajectories(
        array(states, np.float32),
        array(keys, np.int64),
        array(actions, None if is_array else object),
        array(rewards, np.float64),
        array(is_over, np.bool_),
    )


def measure_diversity(
    make_env: Callable[[], Env],
    num_envs: Sequence[int],
    *,
    seed: int = 0,
    num_transitions: int = NUM_TRANSITIONS,
    limit_s: float = _LIMIT_S,
) -> list[Diversity]:
    """Collect as many transitions from one env and from each number of envs, and compare them.

    Args:
        make_env: Called once per env.
        num_envs: Numbers of envs; 1 is added, and those that leave fewer than 4 steps per env are
            left out.
        seed: Of the envs and the random actions.
        num_transitions: From each set of envs.
        limit_s: If one env takes longer for its transitions, there are fewer, in all sets.

    Raises:
        ValueError: The observations are no vectors of numbers.
        Exception: What an env raises.
    """
    sets: list[Trajectories] = []
    action_space = None
    for count in sorted({1, *num_envs}):
        num_steps = num_transitions // count
        if sets and num_steps < _FEWEST_BATCHES:
            break
        envs = [make_env() for _ in range(count)]
        try:
            action_space = envs[0].action_space
            is_first = not sets
            sets.append(
                collect(envs, num_steps, seed=seed, limit_s=limit_s if is_first else np.inf)
            )
        finally:
            for env in envs:
                env.close()
        num_transitions = min(num_transitions, sets[0].rewards.size)
    assert action_space is not None
    return compare_sets(sets, action_space)


def compare_sets(sets: Sequence[Trajectories], action_space: Space) -> list[Diversity]:
    """Return the measures of sets of about equally many transitions, in common units."""
    num_features = sets[0].states.shape[-1]
    everything = np.concatenate([found.states.reshape(-1, num_features) for found in sets])
    scale, middle = everything.std(0), everything.mean(0)
    unit = np.where(scale > 0, scale, 1.0)
    most_envs = max(found.rewards.shape[1] for found in sets)
    size = sets[0].rewards.size
    fragment = min(_FRAGMENT, max(1, size // (_FEWEST_BATCHES * most_envs)))
    batch_size = max(fragment * most_envs, size // _NUM_BATCHES)
    results = []
    for found in sets:
        num_envs = found.rewards.shape[1]
        found = found._replace(states=(found.states - middle) / unit)
        steps = fragment * max(1, round(batch_size / (num_envs * fragment)))
        variance, error = _gradient_variance(found, action_space, steps, fragment)
        rows = found.states.reshape(-1, num_features)
        chosen = np.linspace(0, len(rows) - 1, min(len(rows), _MOST_POINTS)).astype(int)
        results.append(
            Diversity(
                num_envs=num_envs,
                num_transitions=len(rows),
                distinct=diversity.distinct_share(found.keys.ravel()),
                neighbour_distance=diversity.nearest_neighbour_distance(
                    rows[chosen], (scale > 0).astype(np.float64)
                ),
                correlation=_correlation(found, max(_SMALL_BATCH, most_envs)),
                batch_size=steps * num_envs,
                gradient_variance=variance,
                gradient_error=error,
            )
        )
    return results


def _correlation(found: Trajectories, size: int) -> float | None:
    """Return how much alike states are in batches of about `size` consecutive ones."""
    batches = diversity.batched(found.states, max(1, round(size / found.rewards.shape[1])))
    if len(batches) < _FEWEST_BATCHES or batches.shape[1] < 2:
        return None
    return diversity.intraclass_correlation(batches)


def _gradient_variance(
    found: Trajectories, action_space: Space, steps: int, fragment: int
) -> tuple[float | None, float | None]:
    """Return variance and error of the policy gradient over batches of `steps` steps."""
    num_steps, num_envs = found.rewards.shape
    flat = found.actions.reshape(num_steps * num_envs, *found.actions.shape[2:])
    scores = diversity.action_scores(flat, action_space)
    if scores is None or num_steps // steps < _FEWEST_BATCHES:
        return None, None
    returns = diversity.reward_to_go(found.rewards, found.is_over, fragment)
    returns = (returns - returns.mean()) / max(float(returns.std()), 1e-12)
    gradients = diversity.policy_gradients(
        diversity.batched(found.states, steps),
        diversity.batched(scores.reshape(num_steps, num_envs, -1), steps),
        diversity.batched(returns, steps),
    )
    return diversity.gradient_variance(gradients)
