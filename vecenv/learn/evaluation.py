"""evaluate, evaluate_games: the mean return of policies, and how sure it is."""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.agents import AgentRowsVecEnv, AgentsVecEnv
from vecenv.core.arguments import read_autoreset_mode
from vecenv.core.batches import leaf_by_leaf
from vecenv.make import make_vec

__all__ = ["EvaluationResult", "ask", "evaluate", "evaluate_games", "evaluating"]

_LONG = 100_000  # steps of an episode, after which the log says how long it is
_logger = logging.getLogger("vecenv")
_Z975 = 1.959964  # point of the normal distribution that 97.5 % lie below


@dataclass(frozen=True)
class EvaluationResult:
    """What `evaluate` found; prints as one line.

    Attributes:
        mean: Mean return of the episodes.
        std: Standard deviation of the returns (ddof 1); NaN of a single episode.
        ci95: Half of the width of the 95 % confidence interval of the mean, from Student's
            distribution; NaN of a single episode.
        returns: Return of each episode: of env 0 the first ones in order, then of env 1, ...
        lengths: Steps of each episode, in the same order.
    """

    mean: float
    std: float
    ci95: float
    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        if len(self.returns) == 1:
            return f"return {self.mean:.1f} of 1 episode"
        return f"return {self.mean:.1f} ± {self.ci95:.1f} (95 %) over {len(self.returns)} episodes"

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(asdict(self))


@contextmanager
def evaluating(what: str, log: Callable[[str], Any] | None = None) -> Iterator[None]:
    """Say that an evaluation begins; Ctrl-C inside of ``with`` ends the program with a sentence.

    For the end of a program that has saved everything: its exit status is 130 then.

    Args:
        what: Such as "100 episodes".
        log: Takes the sentences; None prints them.

    Example:
        >>> with evaluating("2 episodes"):
        ...     pass
        evaluating 2 episodes; Ctrl-C leaves that out
    """
    log = log or partial(print, flush=True)
    log(f"evaluating {what}; Ctrl-C leaves that out")
    try:
        yield
    except KeyboardInterrupt:
        log("the evaluation is left out")
        raise SystemExit(130) from None


def evaluate(
    act: Callable[..., Any],
    envs: Any,
    episodes: int = 100,
    *,
    seed: int = 1_000_000,
    num_envs: int | None = None,
    backend: str | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], Any] | None = None,
    **make_kwargs: Any,
) -> EvaluationResult:
    """Play whole episodes with a policy, and return their mean return with its uncertainty.

    Every env plays its first episodes, the same number of them (the first envs one more, where it
    does not divide), however long they take. To stop at so many finished episodes instead would
    favour short ones.

    Args:
        act: Returns actions for observations: `act(obs)`, with obs as tensors (N, *obs_shape),
            nested as the observation space is, the policy's to keep. Actions are a tensor or an
            array, as `envs.step` takes them. It is called in inference mode. If it has a parameter
            `starts`, it is given bool (N,), True where obs begins an episode, for policies with a
            memory; if it has one `action_masks`, what `envs.action_masks()` returns, as a tensor.
        envs: A vector env, which is reset and not closed; or what `make_vec` takes: an id, a
            factory.
        episodes: How many.
        seed: Of the first env; env i is seeded with `seed + i`. Give others than in the training.
        num_envs: Of envs that are made here: how many play side by side; as many as episodes, but
            at most 100, if None. The result depends on it, as the envs' seeds do.
        backend: Of envs that are made here, see `make_vec`.
        device: Where observations are brought to.
        progress: Called with the episodes finished and `episodes`, whenever that has changed.
        **make_kwargs: Further arguments of `make_vec`.

    Raises:
        ValueError: `episodes` or `num_envs` is below 1, or arguments for making envs were given
            beside a vector env.
    """
    if episodes < 1 or (num_envs is not None and num_envs < 1):
        raise ValueError(f"episodes is {episodes} and num_envs {num_envs}, expected at least 1")
    if isinstance(envs, VectorEnv):
        if num_envs is not None or make_kwargs or backend is not None:
            raise ValueError("num_envs, backend, ... are for envs that are made here; leave them")
        return _play(act, envs, episodes, seed, device, progress)[""]
    count = min(num_envs or 100, episodes)
    made = make_vec(envs, count, backend=backend, **make_kwargs)
    try:
        return _play(act, made, episodes, seed, device, progress)[""]
    finally:
        made.close()


def evaluate_games(
    act: Callable[..., Any],
    envs: AgentsVecEnv | AgentRowsVecEnv,
    games: int = 100,
    *,
    seed: int = 1_000_000,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], Any] | None = None,
) -> dict[str, EvaluationResult]:
    """Play whole games of several agents, and return the mean return per game of each group.

    The return of a group is the sum of the rewards of all its agents in a game, its length the
    number of steps in which any agent of the game acted. Which games count is as in `evaluate`.

    Args:
        act: As for `evaluate`, but of dicts by group: observations (B, *obs_shape) of the group's
            rows, actions for all of them (those of agents that are not alive are ignored), and
            `action_masks` of the groups that have some. `starts` is of games.
        envs: What `vecenv.make_vec_agents` returns. It is reset and not closed.
        games: How many.
        seed: Of the first game; game g is seeded with `seed + g`.
        device: Where observations are brought to.
        progress: Called with the games finished and `games`, whenever that has changed.

    Returns:
        By group; `returns` of all groups are of the same games in the same order.

    Raises:
        TypeError: `envs` is something else.
        ValueError: `games` is below 1.
    """
    if not isinstance(envs, AgentsVecEnv | AgentRowsVecEnv):
        raise TypeError(f"envs is {type(envs).__name__}, expected what make_vec_agents returns")
    if games < 1:
        raise ValueError(f"games is {games}, expected at least 1")
    agents = envs.agents if isinstance(envs, AgentRowsVecEnv) else envs
    return _play(act, agents, games, seed, device, progress)


class _Tally:
    """Returns and lengths of the first episodes of each env: the same number of each.

    Args:
        num_envs: Number of envs, N.
        episodes: How many; where it does not divide, the first envs play one more.
        names: Of the returns that an episode has.
        progress: As for `evaluate`.
    """

    def __init__(
        self,
        num_envs: int,
        episodes: int,
        names: Collection[str],
        progress: Callable[[int, int], Any] | None,
    ) -> None:
        self._names, self._progress, self._episodes = list(names), progress, episodes
        share, rest = divmod(episodes, num_envs)
        self._left = np.full(num_envs, share) + (np.arange(num_envs) < rest)
        self._num_finished = self._longest = 0
        self._totals = np.zeros((len(self._names), num_envs))
        self._steps = np.zeros(num_envs, np.int64)
        self._found: list[list[tuple[np.ndarray, int]]] = [[] for _ in range(num_envs)]

    @property
    def is_complete(self) -> bool:
        return not self._left.any()

    def add(self, rewards: list[np.ndarray], is_step: np.ndarray, is_over: np.ndarray) -> None:
        """Add a step: rewards (N,) for each name, where it was one, and where an episode ended."""
        self._totals += np.where(is_step, rewards, 0.0)
        self._steps += is_step
        if self._longest < _LONG and (longest := int(self._steps.max())) > self._longest:
            self._longest = longest
            if longest == _LONG:
                _logger.warning(
                    "evaluation: an episode has lasted %d steps so far, and all are waited for; if "
                    "episodes may never end, give the env a limit (gymnasium.wrappers.TimeLimit)",
                    longest,
                )
        ended = np.flatnonzero(is_over)
        counted = ended[self._left[ended] > 0]
        for index in counted.tolist():
            self._found[index].append((self._totals[:, index].copy(), int(self._steps[index])))
        self._left[counted] -= 1
        self._totals[:, ended], self._steps[ended] = 0.0, 0
        if self._progress is not None and len(counted):
            self._num_finished += len(counted)
            self._progress(self._num_finished, self._episodes)

    def results(self) -> dict[str, EvaluationResult]:
        """Return what was found, by name."""
        flat = [episode for of_env in self._found for episode in of_env]
        lengths = tuple(steps for _, steps in flat)
        results = {}
        for k, name in enumerate(self._names):
            returns = [float(totals[k]) for totals, _ in flat]
            interval = _interval(np.array(returns))
            results[name] = EvaluationResult(*interval, tuple(returns), lengths)
        return results


@torch.inference_mode()
def _play(
    act: Callable[..., Any],
    envs: Any,
    episodes: int,
    seed: int,
    device: torch.device | str,
    progress: Callable[[int, int], Any] | None,
) -> dict[str, EvaluationResult]:
    """Play the first episodes of vector envs, or games; return what was found, by group or ""."""
    are_games = isinstance(envs, AgentsVecEnv)
    count, names = (envs.num_games, envs.groups) if are_games else (envs.num_envs, [""])
    mode = read_autoreset_mode(envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
    tally = _Tally(count, episodes, names, progress)
    starts = np.ones(count, np.bool_)  # obs is the first of an episode
    is_over = np.zeros(count, np.bool_)
    obs, _ = envs.reset(seed=seed)
    while not tally.is_complete:
        actions = ask(act, envs, obs, starts, device)
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        if are_games:
            earned, is_step, is_over = _read_games(envs, rewards, infos, mode)
        else:  # the step after an end only resets, as NEXT_STEP has it
            earned, is_step = [rewards], ~(is_over & (mode is AutoresetMode.NEXT_STEP))
            is_over = np.logical_or(terminations, truncations)
        tally.add(earned, is_step, is_over)
        if mode is AutoresetMode.DISABLED and is_over.any():
            obs, _ = envs.reset(options={"reset_mask": is_over})
        starts = ~is_step if mode is AutoresetMode.NEXT_STEP else is_over
    return tally.results()


def _read_games(
    envs: AgentsVecEnv, rewards: dict[str, np.ndarray], infos: dict[str, Any], mode: AutoresetMode
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Return each group's rewards, where the step was one, and where a game ended, all (games,)."""
    count = envs.num_games

    def by_game(rows: dict[str, np.ndarray]) -> np.ndarray:
        """Return in which games a row of any group is True."""
        parts = [part.reshape(count, -1).any(axis=1) for part in rows.values()]
        return np.logical_or.reduce([np.zeros(count, np.bool_), *parts])

    is_step = by_game(envs.valid)
    if mode is AutoresetMode.SAME_STEP:
        own = {name: infos.get(name, {}) for name in envs.groups}
        is_over = by_game({k: v["_final_obs"] for k, v in own.items() if "_final_obs" in v})
    else:
        is_over = is_step & ~by_game(envs.alive)
    return [rewards[k].reshape(count, -1).sum(axis=1) for k in envs.groups], is_step, is_over


@torch.inference_mode()
def ask(
    act: Callable[..., Any],
    envs: Any,
    obs: Any,
    starts: np.ndarray,
    device: torch.device | str = "cpu",
    report: dict[str, Any] | None = None,
) -> Any:
    """Return a policy's actions as arrays, giving it what it has parameters for.

    Args:
        act: As for `evaluate`; one with a parameter `report` is given the dict.
        envs: For its action masks.
        obs: The observations.
        starts: bool (N,), where they begin an episode.
        device: As for `evaluate`.
        report: What policies report into, as docs/watch.md says; None for nothing.
    """
    wanted, more = _parameters(act), {}
    if "starts" in wanted:
        more["starts"] = torch.from_numpy(starts).to(device)
    if "action_masks" in wanted:
        more["action_masks"] = _as_tensors(_masks_of(envs), device)
    if "report" in wanted and report is not None:
        more["report"] = report
    return _as_arrays(act(_as_tensors(obs, device), **more))


def _masks_of(envs: Any) -> Any:
    """Return the action masks of a vector env, of several agents a dict by group."""
    if not isinstance(envs, AgentsVecEnv):
        return envs.action_masks()
    groups = envs.groups.items()
    return {name: group.action_masks() for name, group in groups if group.has_action_masks}


def _parameters(act: Callable[..., Any]) -> Collection[str]:
    try:
        return inspect.signature(act).parameters.keys()
    except (TypeError, ValueError):  # functions written in C need not tell
        return ()


def _interval(returns: np.ndarray) -> tuple[float, float, float]:
    """Mean, standard deviation and half of the width of the confidence interval."""
    mean, count = float(returns.mean()), len(returns)
    if count < 2:
        return mean, math.nan, math.nan
    std = float(returns.std(ddof=1))
    return mean, std, _t975(count - 1) * std / math.sqrt(count)


def _t975(freedom: int) -> float:
    """The point that 97.5 % of Student's distribution lie below.

    Exact for one and two degrees of freedom, else the expansion 26.7.5 of Abramowitz and Stegun's
    handbook, within 0.3 % for three and 0.05 % from four on.
    """
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, n = _Z975, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


def _as_tensors(batch: Any, device: torch.device | str) -> Any:
    """Return a nest of arrays as one of tensors, copies that the policy may keep."""
    return leaf_by_leaf(
        lambda x: torch.tensor(x, device=device) if isinstance(x, np.ndarray) else x, batch
    )


def _as_arrays(actions: Any) -> Any:
    """Return a nest of tensors as one of arrays."""
    return leaf_by_leaf(
        lambda x: x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x, actions
    )
