"""Compare returns of free runs, each side with its own random numbers, by two one-sided tests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Discrete

from vecenv.jit.env import JitVectorEnv
from vecenv.port.deadline import within
from vecenv.port.lockstep import ask, pick, width_of
from vecenv.port.sides import RESET, PythonSide, inputs_of

__all__ = ["Equivalence", "compare_means", "free_runs", "speeds"]

_Z_EQUAL = 1.645  # one-sided, 5 %
_Z_APART = 4.0  # two-sided, 1 in 16 000, as several pairs are compared
_FEWEST = 20  # fewest episodes that can show a difference
_MOST_EPISODES = 2_000  # of the Python env
_NUM_ENVS = 1_024  # envs in the speed measurement
_NUM_EPISODES = 512  # of the kernels, side by side
_NUM_POLICIES = 8
_LEAST_SECONDS = 5.0  # for the kernels' episodes, which usually take much less

# From observations (B, ...), masks, and whether all episodes begin here, to actions.
Policy = Callable[[np.ndarray, Any, bool], np.ndarray]


class Equivalence(NamedTuple):
    """Whether two means are equal within a margin.

    Attributes:
        what: What was compared.
        python, kernels: The two means; None for the kernels if their episodes were not all over
            in time.
        episodes: Number of episodes on each side.
        margin: Allowed distance between the means.
        low, high: The 90 % interval of kernels - Python, or None. If it lies within the margin, two
            one-sided tests at 5 % show that the means are no further apart.
        verdict: "same"; "not shown" (too few episodes); or "different" (more than chance explains).
    """

    what: str
    python: float
    kernels: float | None
    episodes: tuple[int, int]
    margin: float
    low: float | None
    high: float | None
    verdict: str

    def __str__(self) -> str:
        if self.kernels is None:
            told = f"Python {self.python:.4g} in {self.episodes[0]} episodes"
            return f"{self.what}: {self.verdict} ({told}; the kernels' did not end in time)"
        verdict = (
            f"{self.verdict}, play more minutes" if self.verdict == "not shown" else self.verdict
        )
        return (
            f"{self.what}: {verdict} (Python {self.python:.4g}, kernels {self.kernels:.4g}; "
            f"difference {self.low:+.3g} to {self.high:+.3g}, margin {self.margin:.3g}; "
            f"{self.episodes[0]} and {self.episodes[1]} episodes)"
        )


def compare_means(what: str, python: np.ndarray, kernels: np.ndarray, margin: float) -> Equivalence:
    """Test whether two samples have equal means within a margin.

    Args:
        what: What the means are of.
        python: Float (N,), N > 1.
        kernels: Float (M,); if empty, nothing can be shown.
        margin: Allowed distance, in standard deviations of both samples together.
    """
    if len(kernels) < 2:
        counts, mean = (len(python), len(kernels)), float(python.mean())
        return Equivalence(what, mean, None, counts, margin, None, None, "not shown")
    spread = math.sqrt((python.var() + kernels.var()) / 2.0)
    means = float(python.mean()), float(kernels.mean())
    width = max(margin * spread, 1e-6 * max(1.0, abs(means[0])))
    counts = len(python), len(kernels)
    error = math.sqrt(python.var(ddof=1) / counts[0] + kernels.var(ddof=1) / counts[1])
    apart = means[1] - means[0]
    low, high = apart - _Z_EQUAL * error, apart + _Z_EQUAL * error
    verdict = "same" if -width <= low and high <= width else "not shown"
    # If both are the same, all are one sample: few episodes may lack the rare ones altogether.
    pooled = float(np.concatenate([python, kernels]).std()) * math.sqrt(sum(1 / n for n in counts))
    if min(counts) >= _FEWEST and abs(apart) > max(_Z_APART * max(error, pooled), width / 10.0):
        verdict = "different"
    return Equivalence(what, *means, counts, width, low, high, verdict)


def _random_policy(space: Any, rng: np.random.Generator) -> Policy:
    """Return a policy that draws random actions which the masks allow."""
    return lambda obs, masks, _: pick(space, rng.random((len(obs), width_of(space))), masks)


def _linear_policy(obs_space: Any, space: Any, rng: np.random.Generator) -> Policy:
    """Return a policy with random weights; its actions depend only on observations and masks."""
    is_number = isinstance(obs_space, Discrete)
    size = int(obs_space.n) if is_number else int(np.prod(obs_space.shape))
    weights = rng.normal(size=(size, width_of(space)))

    def act(obs: np.ndarray, masks: Any, _: bool) -> np.ndarray:
        if is_number:
            scores = weights[np.asarray(obs).reshape(-1) - obs_space.start]
        else:
            rows = np.asarray(obs, np.float64).reshape(len(obs), -1)
            scores = (rows / (1.0 + np.abs(rows))).round(5) @ weights
        return pick(space, 0.5 + 0.5 * np.tanh(scores.round(5)), masks)

    return act


def _of_rows(policy: Callable[[Any], Any], space: Any) -> Policy:
    """Return a policy for observations (B, ...); a function of the user is asked row by row."""
    is_loaded = hasattr(policy, "has_action_masks")  # by `load_policy`

    def act(obs: np.ndarray, masks: Any, is_new: bool) -> np.ndarray:
        with within("a policy", len(obs)):
            actions = ask(policy, obs, masks, is_new) if is_loaded else list(map(policy, obs))
            return np.array(actions).astype(space.dtype)

    return act


def _kernel_episodes(
    envs: JitVectorEnv, policy: Policy, seed: int, limit: int, seconds: float
) -> np.ndarray:
    """Return returns and lengths, float (B, 2), of each env's first episode; none if time is up.

    The episodes that ended in time would be the short ones.
    """
    with within("reset of the kernels", inputs=lambda: inputs_of(envs, RESET, seed)):
        obs, _ = envs.reset(seed=seed)
    totals = np.zeros((envs.num_envs, 2))
    is_running = np.ones(envs.num_envs, np.bool_)
    end = time.perf_counter() + seconds
    for step in range(limit):
        masks = None
        if envs.has_action_masks:
            masks = envs.action_masks()
            masks[~is_running] = 1  # after its end, an env may allow nothing
        actions = policy(obs, masks, step == 0)
        with within("step of the kernels in free runs", inputs=partial(inputs_of, envs, actions)):
            obs, rewards, terminations, truncations, _ = envs.step(actions)
        totals[is_running] += np.stack([rewards, np.ones_like(rewards)], axis=1)[is_running]
        is_running &= ~(terminations | truncations)
        if not is_running.any():
            break
        if time.perf_counter() > end:
            return totals[:0]
    return totals


def _python_episodes(
    side: PythonSide,
    policy: Policy,
    seed: int,
    *,
    limit: int,
    seconds: float,
    most: int = _MOST_EPISODES,
) -> np.ndarray:
    """Play episodes for this long, at least two; return returns and lengths, float (N, 2)."""
    found: list[tuple[float, int]] = []
    end = time.perf_counter() + seconds
    while len(found) < most and (len(found) < 2 or time.perf_counter() < end):
        seen, total, length = side(RESET, seed + len(found)), 0.0, 0
        while length < limit and (length == 0 or not side.is_over(seen)):
            masks = seen["mask"][None] if "mask" in seen else None
            seen = side(policy(side.row(seen)[None], masks, length == 0)[0])
            total += float(sum(value for name, value in seen.items() if name.startswith("reward")))
            length += 1
        found.append((total, length))
    return np.array(found)


def free_runs(
    make_python: Callable[[], Any],
    make_envs: Callable[..., JitVectorEnv],
    *,
    limit: int,
    debug: bool,
    seconds: float,
    margin: float,
    seed: int,
    policies: Sequence[Callable[[Any], Any]] = (),
) -> list[Equivalence]:
    """Compare returns and lengths of random actions, then of policies.

    Each policy is the best of several with random weights, by episodes of one side. Both play it.

    Args:
        make_python: Makes the Python env.
        make_envs: Makes a vector env.
        limit: Longest episode in steps.
        debug: Whether kernels run as plain Python.
        seconds: Time limit for everything.
        margin: See `compare_means`.
        seed: Seed of all draws.
        policies: The user's policies, also played, but not in games.
    """
    rng, part = np.random.default_rng(seed), seconds / 10.0
    side = PythonSide(make_python, is_taped=False)
    with within("making the kernels", 20.0):
        envs = make_envs(32 if debug else _NUM_EPISODES, debug=debug, max_episode_steps=limit)
    space = envs.single_action_space
    found: list[Equivalence] = []

    def ours(policy: Policy, seconds: float, limit: int = limit) -> np.ndarray:
        return _kernel_episodes(envs, policy, seed, limit, seconds)

    def theirs(
        policy: Policy, seconds: float, limit: int = limit, most: int = _MOST_EPISODES
    ) -> Any:
        return _python_episodes(side, policy, seed, limit=limit, seconds=seconds, most=most)

    def both(name: str, policy: Policy) -> None:
        pairs = theirs(policy, 2.0 * part).T, ours(policy, max(2.0 * part, _LEAST_SECONDS)).T
        for what, one, other in zip(("return", "length"), *pairs, strict=True):
            found.append(compare_means(f"{what}, {name}", one, other, margin))

    try:
        both("random actions", _random_policy(space, rng))
        for number, policy in enumerate(policies if "" in side.spaces else (), 1):
            both(f"policy {number} of the user", _of_rows(policy, space))
        drawn = [
            _linear_policy(envs.single_observation_space, space, rng) for _ in range(_NUM_POLICIES)
        ]
        for name, play in (
            ("kernels", lambda one: ours(one, part / 8.0, min(limit, 200))),
            ("Python env", lambda one: theirs(one, part / 8.0, min(limit, 200), 20)),
        ):
            means = [played[:, 0].mean() if len(played) else -np.inf for played in map(play, drawn)]
            both(f"policy chosen by the {name}", drawn[int(np.argmax(means))])
    finally:
        envs.close()
        side.env.close()
    return found


def speeds(
    make_python: Callable[[], Any], make_envs: Callable[..., JitVectorEnv]
) -> tuple[float, float]:
    """Return steps per second of one Python env and of 1 024 compiled ones, by random actions.

    Nothing but resets and steps is timed.
    """
    envs, side = make_envs(_NUM_ENVS), PythonSide(make_python, is_taped=False)
    policy = _random_policy(envs.single_action_space, np.random.default_rng(0))
    obs, _ = envs.reset(seed=0)
    actions = [policy(obs, None, False) for _ in range(16)]
    rates: list[list[float]] = [[], []]
    for _ in range(3):  # the sides in turn
        count, seconds, is_over = 0, 0.0, True
        with within("steps of the Python env"):
            while seconds < 0.3:
                action = None if is_over else side.own(actions[count % 16][count % _NUM_ENVS])
                begin = time.perf_counter()
                found = side.env.reset() if is_over else side.env.step(action)
                seconds += time.perf_counter() - begin
                is_over = not is_over and side.has_ended(*found[2:4])
                count += 1
        rates[0].append(count / seconds)
        count, begin = 0, time.perf_counter()
        with within("steps of the kernels"):
            while time.perf_counter() < begin + 0.3:
                envs.step(actions[count % 16])
                count += 1
        rates[1].append(_NUM_ENVS * count / (time.perf_counter() - begin))
    envs.close()
    side.env.close()
    return float(np.median(rates[0])), float(np.median(rates[1]))
