"""Play both sides in lockstep, under the same draws, and find the first difference."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box

from vecenv.core.masks import mask_sizes
from vecenv.port.coverage import Coverage, Goal
from vecenv.port.deadline import StuckError, within
from vecenv.port.sides import RESET, KernelSide, PythonSide, Seen
from vecenv.port.tape import UnsupportedDraw

__all__ = ["Actions", "Difference", "Lockstep", "ask", "compare", "pick", "width_of"]

_LENGTHS = (20, 60, 200, 600)  # steps of a run, in turn
# Ways to choose actions or first states, and their shares of all steps.
STYLES = {
    **dict.fromkeys(("random", "held", "rare", "short", "masked"), 1),
    **{"rare states": 2, "best states": 3, "near states": 3},
}
_CONTINUED = 60  # most steps from a state that was kept
_MOST_KEPT = 400  # rare states
_NUM_LEVELS, _MOST_ALIKE = 4, 24  # highest returns, and most states of one return or distance
_ALIKE = 0.2  # chance that a state is kept which is no better than others
_COPIED = 8  # steps between copies of a run
_TWIN_SHARE = 0.4  # of the time of all calls
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
        if not self.actions:
            return self.python or self.kernels
        step = next(k for k, action in enumerate(self.actions[::-1]) if action is RESET)
        when = f"step {step} of an episode" if step else "a reset"
        verb = {"draws": "draws differ", "deadline": "a call did not return"}
        told = verb.get(self.what, f"{self.what} differs")
        told += f" in {when}, call {len(self.actions)} after seed {self.seed}"
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


def ask(policy: Any, obs: Any, masks: Any, is_new: bool) -> Any:
    """Return a user's policy's action; one of `load_policy` takes many rows, and sees masks.

    Args:
        policy: The policy.
        obs: An observation, or those of many envs.
        masks: Their masks, or None.
        is_new: Whether all episodes begin here.
    """
    if not hasattr(policy, "has_action_masks"):
        return policy(obs)
    return policy(obs, masks if policy.has_action_masks else None, is_new)


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
            with within("a policy"):
                action = ask(self._policy, obs, seen.get("mask"), "reward" not in seen)
            flat = np.concatenate([np.reshape(one, -1) for one in _parts(action)])
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
        is_float = "f" in (value.dtype.kind, other.dtype.kind)
        if is_float:
            errors.setdefault(name, 0.0)
        if (value == other).all():
            continue
        if is_float:
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
    if isinstance(own, StuckError) or isinstance(other, StuckError):
        told = [str(one) if isinstance(one, StuckError) else "returned" for one in (own, other)]
        return Difference("deadline", told[0], told[1]), {}
    if isinstance(own, Exception) or isinstance(other, Exception):
        told = [repr(one) if isinstance(one, Exception) else "no exception" for one in (own, other)]
        return Difference("exception", told[0], told[1]), {}
    if (words := python.tape.num_words) != kernels.num_words:
        return Difference("draws", f"{words} words of 64 bits", f"{kernels.num_words}"), own
    found = compare(own, other, *compared)
    return found, {"mask": other["mask"], **own} if "mask" in other else own


class Start(NamedTuple):
    """A state that a run has reached, from which others continue.

    Attributes:
        seed, actions: The run so far; both sides repeat it exactly.
        seen: Results of its last call.
        total: Return of its current episode.
        python, kernels: Copies of the sides, see `PythonSide.save`; or None: repeat the run.
    """

    seed: int
    actions: list[Any]
    seen: Seen
    total: float
    python: Any
    kernels: Any


@dataclass
class _Near:
    """States near a missing outcome of a comparison, and how often they were continued in vain."""

    distance: float
    starts: list[Start]
    tries: int = 0


class Lockstep:
    """Plays runs of many kinds until the sides differ or time is up.

        new run --------------------------------+
        a state kept: rare, of a high return,   +--> actions of one style --> compare, keep states
        or near a branch that has not been taken

    States are kept as copies of both sides. A copy may behave otherwise than the env (a function
    that holds the original, for one): so a difference counts only if it also appears when the run
    is repeated from its seed, and copies that fail this are given up.

    Args:
        python: The Python env.
        kernels: The kernels.
        tolerance: See `compare`.
        seed: Seed of all draws here.
        policies: The user's policies.
        make_twin: Makes the kernels as plain Python, with or without observations, if `kernels` are
            compiled. It takes some of their steps, for the coverage.

    Attributes:
        counts: Numbers of equal steps, resets, draws and values.
        styles: Number of steps by style.
        errors: Largest distances of floats, by name.
        coverage: Lines of the kernels that have run.
    """

    def __init__(
        self,
        python: PythonSide,
        kernels: KernelSide,
        *,
        tolerance: float,
        seed: int,
        policies: Sequence[Callable[[Any], Any]] = (),
        make_twin: Callable[[bool], KernelSide] | None = None,
    ) -> None:
        self._python, self._kernels, self._tolerance = python, kernels, tolerance
        self._make_twin = make_twin
        self._twin = None if make_twin is None else make_twin(True)
        self._twin_seconds = self._call_seconds = 0.0
        self._rng = np.random.default_rng(seed)
        self._actions = Actions(kernels.envs.single_action_space, self._rng, policies)
        self._has_policies = bool(policies)
        self._shares = STYLES | ({"policy": 2} if policies else {})
        self.coverage = Coverage(kernels.envs.kernels)
        self.counts = Counter(steps=0, resets=0, draws=0, numbers=0)
        self.styles: Counter[str] = Counter()
        self.errors: dict[str, float] = {}
        self._visits: Counter[Any] = Counter()
        self._rare: dict[Any, Start] = {}  # by what was new
        self._best: dict[float, list[Start]] = {}  # by return
        self._near: dict[Goal, _Near] = {}

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

    def _choose(self, style: str) -> Start | None:
        """Return the state from which a run continues; None for a run of its own."""
        rng, pool = self._rng, list[Start]()
        if style == "rare states" and self._rare:
            keys = sorted(self._rare, key=self._visits.__getitem__)[:40]
            key = keys[rng.integers(len(keys))]
            self._visits[key] += 1
            pool = [self._rare[key]]
        elif style == "best states" and self._best:
            levels = sorted(self._best)
            pool = self._best[levels[-min(int(rng.geometric(0.7)), len(levels))]]
        elif style == "near states" and self._near:
            found = list(self._near.values())
            weights = np.array([1.0 / (1 + one.tries) for one in found])
            near = found[rng.choice(len(found), p=weights / weights.sum())]
            near.tries += 1
            pool = near.starts
        return pool[rng.integers(len(pool))] if pool else None

    def _begin_run(self, style: str) -> Start:
        """Begin a run, or bring both sides to a state that was kept."""
        start = self._choose(style)
        if start is None:
            self._actions.begin(style)
            start = Start(int(self._rng.integers(2**62)), [], {}, 0.0, None, None)
        else:
            after = "policy" if self._has_policies and self._rng.random() < 0.6 else "random"
            self._actions.begin("held" if self._rng.random() < 0.4 else after)
        self._python.load(start.python)
        if start.python is not None:
            self._kernels.load(start.kernels)
        return start

    def _play_run(self, style: str, length: int, end: float) -> Difference | None:
        """Play one run of a style; return the difference that ends it."""
        python, start = self._python, self._begin_run(style)
        seen, total, actions, prefix = start.seen, start.total, list(start.actions), []
        if start.python is None:  # at the very end it may be too late for something new
            cut = max(1, len(actions) - int(self._rng.geometric(0.2)) + 1)
            seen, total, actions, prefix = {}, 0.0, [], actions[:cut]
        most = len(prefix) + (min(length, _CONTINUED) if start.actions else length)
        short = int(self._rng.integers(1, 12)) if style == "short" else most + 1
        latest = start if start.python is not None else None
        for step in range(most):
            if step < len(prefix):
                actions.append(prefix[step])
            elif not actions or step % short == short - 1 or python.is_over(seen):
                actions.append(RESET)
            else:
                actions.append(self._actions(seen, python.obs))
            found, seen = self._call(actions[-1], start.seed if len(actions) == 1 else None)
            if found is not None:
                return self._repeat(found, start, actions)
            total = 0.0 if actions[-1] is RESET else total + _reward(seen)
            now = Start(start.seed, actions, seen, total, None, None)
            latest = self._note(style, now, latest)
            if time.perf_counter() > end + 1.0 or (style == "best states" and python.is_over(seen)):
                break
        return None

    def _call(self, action: Any, seed: int | None) -> tuple[Difference | None, Seen]:
        """Call both sides; run the step in plain Python, too, if it is its turn."""
        begin, twin, coverage = time.perf_counter(), self._twin, self.coverage
        is_turn = twin is not None and self._twin_seconds <= _TWIN_SHARE * self._call_seconds
        is_turn = is_turn and not coverage.is_complete
        before = self._kernels.save() if is_turn and seed is None else None
        result = call_both(
            *(self._python, self._kernels, action, seed, self._tolerance, self.errors),
            through=(_call, coverage.run if twin is None else _call),
        )
        if twin is not None:
            coverage.is_new, coverage.near = False, {}
        if twin is not None and is_turn:
            if self._make_twin is not None and coverage.has_seen_observations:
                twin = self._twin = self._make_twin(False)  # most of the time of many envs
                twin(RESET, 0)
                self._make_twin = None
            middle = time.perf_counter()
            try:
                if before is not None:
                    twin.load(before)
                coverage.run(twin, action, seed)
            except Exception as error:  # an index out of range, which compiled code does not notice
                what = "deadline" if isinstance(error, StuckError) else "exception"
                result = Difference(what, "", repr(error)), {}
            self._twin_seconds += time.perf_counter() - middle
        self._call_seconds += time.perf_counter() - begin
        return result

    def _repeat(self, found: Difference, start: Start, actions: list[Any]) -> Difference | None:
        """Repeat a run that began at a copy from its seed; return the difference, if there is."""
        found.seed, found.actions = start.seed, actions
        if start.python is None:
            return found
        self._python.load(None)
        for k, action in enumerate(actions):
            again, _ = self._call(action, None if k else start.seed)
            if again is not None:
                again.seed, again.actions = start.seed, actions[: k + 1]
                return again
        self._python.can_copy = False
        for kept in (self._rare, self._best, self._near):
            kept.clear()
        return None

    def _note(self, style: str, now: Start, latest: Start | None) -> Start | None:
        """Count equal values; keep the state if it is new, good, or near a missing outcome.

        Args:
            style: The run's style.
            now: The state, not copied yet.
            latest: The latest copy of the run: kept instead of a state that has ended.

        Returns:
            The latest copy.
        """
        draws, is_step, seen = self._python.tape.draws, now.actions[-1] is not RESET, now.seen
        self.styles[style] += is_step
        self.counts["steps" if is_step else "resets"] += 1
        self.counts["draws"] += len(draws)
        self.counts["numbers"] += sum(np.size(value) for value in seen.values())
        features = list(_features(draws, seen))
        if self.coverage.is_new:
            features.append(("lines", self.counts["steps"], self.counts["resets"]))
            met = [goal for goal in self._near if goal.outcome not in goal.comparison.missing]
            for goal in met:
                del self._near[goal]
        self._visits.update(features)
        fresh = [one for one in features if self._visits[one] == 1][: _MOST_KEPT - len(self._rare)]
        is_over = self._python.is_over(seen)
        pools = [] if is_over else [*self._pools(now.total), *self._near_pools()]
        if latest is not None and not is_over and len(now.actions) - len(latest.actions) >= _COPIED:
            self._add(self._best.get(round(latest.total, 6)), latest)  # the run has gone on since
        if not is_over and (pools or fresh or len(now.actions) % _COPIED == 0):
            latest = self._kept(now) or latest
        if latest is not None:
            self._rare |= dict.fromkeys(fresh, latest)
            for pool in pools:
                self._add(pool, latest)
        return latest

    def _add(self, pool: list[Start] | None, start: Start) -> None:
        """Add a state to a list, or replace another one."""
        if pool is not None and len(pool) < _MOST_ALIKE:
            pool.append(start)
        elif pool:
            pool[self._rng.integers(len(pool))] = start

    def _kept(self, now: Start) -> Start | None:
        """Return a state to continue from; None if too much time went into copies."""
        python = self._python.save()
        if python is None and self._python.can_copy:
            return None
        kernels = None if python is None else self._kernels.save()
        return now._replace(actions=list(now.actions), python=python, kernels=kernels)

    def _pools(self, total: float) -> Iterator[list[Start]]:
        """Yield the new list of states with this return, if it is among the highest."""
        level, is_full = round(total, 6), len(self._best) == _NUM_LEVELS
        if level in self._best or level <= 0.0 or (is_full and level < min(self._best)):
            return
        if is_full:
            del self._best[min(self._best)]
        yield self._best.setdefault(level, [])

    def _near_pools(self) -> Iterator[list[Start]]:
        """Yield the lists of states that are as near to a missing outcome as this one."""
        for goal, distance in self.coverage.near.items():
            near = self._near.get(goal)
            if near is None or distance < 0.98 * near.distance:
                self._near[goal] = near = _Near(distance, [])
                yield near.starts
            elif distance <= near.distance and self._rng.random() < _ALIKE:
                yield near.starts


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
