"""Play both sides in lockstep, under the same draws, and find the first difference."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box

from vecenv.core.masks import mask_sizes
from vecenv.port.sides import RESET, KernelSide, PythonSide, Seen
from vecenv.port.tape import UnsupportedDraw

__all__ = ["Actions", "Difference", "Lockstep", "compare", "pick", "width_of"]

_LENGTHS = (20, 60, 200, 600)  # steps of a run, in turn
# Ways to choose actions, and their shares of all steps.
STYLES = {"random": 1, "held": 1, "rare": 1, "short": 1, "masked": 1, "return": 2, "best": 4}
_MOST_KEPT = 400  # runs from which others continue
_NUM_BEST = 12  # runs with the highest returns so far
_FAR = 1e3  # replaces infinite action bounds


@dataclass
class Difference:
    """The first difference between the sides.

    Attributes:
        what: "observation[3]", "reward", "draws", "field paddle[0]", "mask[1]", ...
        python, kernels: The two values, as text.
        seed: Seed of the run.
        actions: The run's actions; the first is `RESET`, the last one shows the difference.
        python_line, kernel_line: Source lines that set the values, "" if not found.
        notes: Draws of this step side by side; the first difference is marked.
    """

    what: str
    python: str
    kernels: str
    seed: int = 0
    actions: list[Any] = field(default_factory=list)
    python_line: str = ""
    kernel_line: str = ""
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        step = self.actions[::-1].index(RESET)
        when = f"step {step} of an episode" if step else "a reset"
        told = f"{self.what} differs in {when}, {len(self.actions)} calls after seed {self.seed}"
        own = f"Python:  {self.python}   {self.python_line}"
        other = f"kernels: {self.kernels}   {self.kernel_line}"
        return "\n  ".join([told, own, other, *self.notes])


def width_of(space: Space) -> int:
    """Return the number of scores that `pick` takes."""
    return int(np.prod(space.shape or ()) if isinstance(space, Box) else mask_sizes(space).sum())


def pick(space: Any, scores: np.ndarray, masks: np.ndarray | None = None) -> np.ndarray:
    """Turn scores into actions: each part gets the value with the highest score.

    Args:
        space: Discrete, MultiDiscrete or MultiBinary; or Box, with bounds at scores 0 and 1.
        scores: Float (B, `width_of(space)`), from 0 to 1.
        masks: Bool (B, width) or None.

    Returns:
        (B, *shape) of the space's dtype.
    """
    shape = (len(scores), *(space.shape or ()))
    if isinstance(space, Box):
        low, high = (
            np.clip(one.astype(np.float64), -_FAR, _FAR) for one in (space.low, space.high)
        )
        actions = low + (high - low) * scores.reshape(shape)
        whole = space.dtype is not None and np.dtype(space.dtype).kind != "f"
        return (np.rint(np.clip(actions, low, high)) if whole else actions).astype(space.dtype)
    keys = scores if masks is None else scores + 2.0 * masks
    parts = np.split(keys, np.cumsum(mask_sizes(space))[:-1], axis=1)
    best = np.stack([part.argmax(axis=1) for part in parts], axis=1).reshape(shape)
    return (best + getattr(space, "start", 0)).astype(space.dtype)


class Actions:
    """Draws actions, in a different way in each run.

    Args:
        space: Action space of the kernels.
        rng: Generator for the draws.
        policies: The user's functions from an observation of the Python env to its action.
    """

    def __init__(
        self, space: Space, rng: np.random.Generator, policies: Sequence[Any] = ()
    ) -> None:
        self._space, self._rng, self._policies = space, rng, policies
        self._width = width_of(space)

    def begin(self, style: str) -> None:
        """Begin a run."""
        self._style, self._left = style, 0
        # Powers for the scores: a great power makes its action rare.
        self._powers = np.exp(self._rng.normal(0.0, 3.0, self._width)) if style == "rare" else 1.0
        self._policy = None
        if style == "policy":
            self._policy = self._policies[int(self._rng.integers(len(self._policies)))]

    def __call__(self, seen: Seen, obs: Any) -> np.ndarray:
        """Return the next action, given the last results and the Python env's observation."""
        if self._policy is not None and self._rng.random() < 0.95:
            flat = np.concatenate([np.reshape(one, -1) for one in _parts(self._policy(obs))])
            return flat.reshape(self._space.shape or ()).astype(self._space.dtype)
        if self._style == "held" and self._left > 0:
            self._left -= 1
            return self._held
        self._left = int(self._rng.geometric(0.15))
        scores = self._rng.random((1, self._width)) ** self._powers
        if self._style == "rare" and isinstance(self._space, Box):  # bounds, the middle, beyond
            scores = self._rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0], (1, self._width))
        is_masked = self._style in ("masked", "held") and "mask" in seen
        self._held = pick(self._space, scores, seen["mask"][None] if is_masked else None)[0]
        return self._held


def _parts(action: Any) -> Sequence[Any]:
    """Return the parts of an action: one per agent of a game, else a single one."""
    if isinstance(action, dict):
        return list(action.values())
    return action if isinstance(action, tuple) else [action]


def compare(
    python: Seen, kernels: Seen, tolerance: float, errors: dict[str, float]
) -> Difference | None:
    """Return the first difference between the results of both sides.

    Args:
        python: Results of the Python env; missing fields, and masks, are not compared.
        kernels: Results of the kernels.
        tolerance: Allowed distance of floats, relative to the larger of 1 and their size.
        errors: The largest distances so far by name; updated.
    """
    absent = "nothing: this agent takes no part"
    for name, value in python.items():
        if name not in kernels:
            if name == "mask":
                continue
            return Difference(name, str(value), absent)
        other = kernels[name]
        if np.shape(value) != np.shape(other):
            return Difference(name, f"shape {np.shape(value)}", f"shape {np.shape(other)}")
        if value.dtype.kind == "f" or other.dtype.kind == "f":
            a, b = value.astype(np.float64), other.astype(np.float64)
            with np.errstate(invalid="ignore"):
                apart = np.abs(a - b) / np.maximum(1.0, np.abs(a))
            apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, apart)
            wrong = ~(apart <= tolerance)
            errors[name] = max(errors.get(name, 0.0), float(np.max(np.where(wrong, 0.0, apart))))
        else:
            wrong = value != other
        if np.any(wrong):
            index = np.argwhere(wrong)[0].tolist()
            where = str(index) if index else ""
            at = tuple(index)
            return Difference(name + where, repr(value[at].item()), repr(other[at].item()))
    extra = [name for name in kernels if name not in python and name.startswith("observation")]
    return Difference(extra[0], absent, str(kernels[extra[0]])) if extra else None


def _call(side: Any, action: Any, seed: int | None) -> Seen:
    """Reset or step a side."""
    return side(action, seed)


def call_both(
    python: PythonSide,
    kernels: KernelSide,
    action: Any,
    seed: int | None,
    *compared: Any,
    through: Sequence[Callable[..., Any]] = (_call, _call),
) -> tuple[Difference | None, Seen]:
    """Reset or step both sides; return the difference and the results.

    Args:
        python: The Python env.
        kernels: The kernels.
        action: The action for both sides, or `RESET`.
        seed: Seed of the random streams, if they begin anew.
        *compared: The last arguments of `compare`.
        through: Functions that call the two sides.
    """
    seen: list[Any] = []
    for call, side in zip(through, (python, kernels), strict=True):
        try:
            seen.append(call(side, action, seed))
        except UnsupportedDraw:
            raise
        except Exception as error:  # of the users' code: reported as a difference
            seen.append(error)
    own, other = seen
    if isinstance(own, Exception) or isinstance(other, Exception):
        told = [repr(one) if isinstance(one, Exception) else "no exception" for one in (own, other)]
        return Difference("exception", told[0], told[1]), {}
    if (words := python.tape.num_words) != kernels.num_words:
        return Difference("draws", f"{words} words of 64 bits", f"{kernels.num_words}"), own
    found = compare(own, other, *compared)
    return found, {"mask": other["mask"], **own} if "mask" in other else own


class Lockstep:
    """Plays runs of many kinds until the sides differ or time is up.

    A run is a seed and the actions after it: both sides repeat it exactly. Runs with something new
    (a reward, an end, another sequence of draws) are kept, and so are the runs with the highest
    returns. Some new runs begin as one of these and continue in another way, so states that need
    luck or skill are reached often.

    Args:
        python: The Python env.
        kernels: The kernels.
        tolerance: See `compare`.
        seed: Seed of all draws here.
        policies: The user's policies.

    Attributes:
        counts: Numbers of equal steps, resets, draws and values.
        styles: Number of steps by style.
        errors: Largest distances of floats, by name.
    """

    def __init__(
        self,
        python: PythonSide,
        kernels: KernelSide,
        *,
        tolerance: float,
        seed: int,
        policies: Sequence[Callable[[Any], Any]] = (),
    ) -> None:
        self._python, self._kernels, self._tolerance = python, kernels, tolerance
        self._rng = np.random.default_rng(seed)
        self._actions = Actions(kernels.envs.single_action_space, self._rng, policies)
        self._shares = STYLES | ({"policy": 2} if policies else {})
        self.counts = Counter(steps=0, resets=0, draws=0, numbers=0)
        self.styles: Counter[str] = Counter()
        self.errors: dict[str, float] = {}
        self._visits: Counter[Any] = Counter()
        self._kept: dict[Any, tuple[int, list[Any]]] = {}  # (seed, actions) by what was new
        self._best = deque[tuple[int, list[Any]]](maxlen=_NUM_BEST)  # (seed, actions)
        self._best_return = 0.0

    def play(self, seconds: float) -> Difference | None:
        """Play runs for this long, at least one of each kind; return the first difference."""
        end = time.perf_counter() + seconds
        num_runs, calls = Counter[str](), Counter[str]()
        found = None
        while found is None and (time.perf_counter() < end or len(num_runs) < len(self._shares)):
            style = min(self._shares, key=lambda one: calls[one] / self._shares[one])
            before = self.counts["steps"] + self.counts["resets"]
            length = _LENGTHS[num_runs[style] % len(_LENGTHS)]
            found = self._play_run(style, length, end)
            num_runs[style] += 1
            calls[style] += self.counts["steps"] + self.counts["resets"] - before
        return found

    def _begin_run(self, style: str) -> tuple[int, list[Any]]:
        """Return a run's seed and first actions: those of an earlier run, or none."""
        rng = self._rng
        seed, prefix = int(rng.integers(2**62)), []
        if style == "return" and self._kept:
            rarest = sorted(self._kept, key=self._visits.__getitem__)[:40]
            seed, prefix = self._kept[rarest[rng.integers(len(rarest))]]
        elif style == "best" and self._best:
            seed, prefix = self._best[-min(int(rng.geometric(0.4)), len(self._best))]
        if not prefix:
            self._actions.begin(style)
            return seed, []
        after = "policy" if "policy" in self._shares else "random"
        self._actions.begin("held" if rng.random() < 0.3 else after)
        # Leave out the last few steps: at the very end it may be too late for something new.
        return seed, prefix[: max(1, len(prefix) - int(rng.geometric(0.2)) + 1)]

    def _play_run(self, style: str, length: int, end: float) -> Difference | None:
        """Play one run of a style; return the difference that ends it."""
        python, actions, seen = self._python, list[Any](), Seen()
        run_seed, prefix = self._begin_run(style)
        total, most = 0.0, len(prefix) + (min(length, 60) if prefix else length)
        short = int(self._rng.integers(1, 12)) if style == "short" else most
        for step in range(most):
            if step < len(prefix):
                actions.append(prefix[step])
            elif step % short == 0 or python.is_over(seen):
                actions.append(RESET)
            else:
                actions.append(self._actions(seen, python.obs))
            seed = None if step else run_seed
            found, seen = call_both(
                python, self._kernels, actions[-1], seed, self._tolerance, self.errors
            )
            if found is not None:
                found.seed, found.actions = run_seed, actions
                return found
            total = 0.0 if actions[-1] is RESET else total + _reward(seen)
            self._note(style, seen, total, run_seed, actions)
            if time.perf_counter() > end + 1.0 or (style == "best" and python.is_over(seen)):
                break
        return None

    def _note(self, style: str, seen: Seen, total: float, seed: int, actions: list[Any]) -> None:
        """Count equal values; keep the run if it had something new, or a high return."""
        draws, is_step = self._python.tape.draws, actions[-1] is not RESET
        self.styles[style] += is_step
        self.counts["steps" if is_step else "resets"] += 1
        self.counts["draws"] += len(draws)
        self.counts["numbers"] += sum(np.size(value) for value in seen.values())
        if total > self._best_return + 1e-9 and not self._python.is_over(seen):
            self._best_return = total
            self._best.append((seed, list(actions)))
        for feature in _features(draws, seen):
            self._visits[feature] += 1
            if self._visits[feature] == 1 and len(self._kept) < _MOST_KEPT:
                self._kept[feature] = seed, list(actions)


def _reward(seen: Seen) -> float:
    """Return the reward of a step; for a game, the sum over all agents."""
    return float(sum(value for name, value in seen.items() if name.startswith("reward")))


def _features(draws: Sequence[Any], seen: Seen) -> Iterator[Any]:
    """Yield features of a step; equal features mean that a step shows nothing new."""
    yield tuple((draw.kind, draw.line) for draw in draws[:20])
    for name, value in seen.items():
        if name.startswith(("reward", "terminated", "truncated")):
            yield name, round(float(value), 2)
        elif name.startswith("observation") and value.dtype.kind != "f":
            yield name, hash(value.tobytes()) % 1024
