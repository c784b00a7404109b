"""evaluate: the mean return of policies, and its uncertainty."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.agents import AgentRowsVecEnv, AgentsVecEnv
from vecenv.core.arguments import read_autoreset_mode
from vecenv.core.moments import mean_of
from vecenv.core.spaces import leaf_by_leaf
from vecenv.make import make_vec
from vecenv.timing.report import as_number

__all__ = ["EvaluationResult", "ask", "evaluate", "evaluating"]


@dataclass(frozen=True)
class EvaluationResult:
    """The result of `evaluate`; prints as one line.

    `mean` and `std` (ddof 1) describe the returns; `ci95` is half the width of the 95 % confidence
    interval of the mean (Student's t). `std` and `ci95` are NaN for a single episode. `returns` and
    `lengths` list env 0's first episodes in order, then env 1's, ...
    """

    mean: float
    std: float
    ci95: float
    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        mean, half = as_number(self.mean), as_number(self.ci95)
        if len(self.returns) == 1:
            return f"return {mean} of 1 episode"
        return f"return {mean} ± {half} (95 %) over {len(self.returns)} episodes"


@contextmanager
def evaluating(what: str, log: Callable[[str], Any] = print) -> Iterator[None]:
    """Announce an evaluation of `what`; turn Ctrl-C inside it into SystemExit(130)."""
    log(f"evaluating {what}; Ctrl-C leaves that out")
    try:
        yield
    except KeyboardInterrupt:
        log("the evaluation is left out")
        raise SystemExit(130) from None


@torch.inference_mode()
def evaluate(
    act: Callable[..., Any], envs: Any, episodes: int = 100, *, seed: int = 1_000_000,
    device: torch.device | str = "cpu", sample: bool = False, **make_kwargs: Any,
) -> Any:  # fmt: skip
    """Play whole episodes with a policy; return their mean return with its uncertainty.

    Every env plays its first episodes, the same number of them (if `episodes` does not divide, the
    first envs play one more). Taking the first episodes to finish would favour short ones.

    Args:
        act: `act(obs)` returns actions, a tensor or an array as `envs.step` takes them. obs are
            tensors (N, *obs_shape), nested as the observation space is; the policy may keep them. A
            parameter `starts` gets bool (N,), True where obs begins an episode; `action_masks`, or
            `masks` of a `load_policy`, gets the result of `envs.action_masks()`. For games with
            several agents these are dicts by group; `starts` is per game.
        envs: A vector env, or the result of `make_vec_agents`: it is reset and not closed. Or the
            argument of `make_vec`; at most 100 envs are made.
        episodes: Number of episodes, or of games. Endless episodes are waited for.
        seed: Seed of env 0; env i gets `seed + i`. Choose other seeds than in training.
        device: Device of the observations.
        sample: Let a policy with a parameter `sample` draw actions, as in training, from `seed`.
        **make_kwargs: For `make_vec`.

    Returns:
        An `EvaluationResult`. For several agents, a dict of them by group: returns are the sums of
        the agents' rewards in a game, lengths are the steps in which any agent of the group acted.

    Raises:
        ValueError: `episodes` is below 1, arguments of `make_vec` came with a vector env, or
            `sample` is set and the policy can't draw.
    """
    is_vector = isinstance(envs, VectorEnv | AgentsVecEnv)
    if episodes < 1 or (is_vector and make_kwargs):
        told = f"{sorted(make_kwargs)} are for envs that are made here"
        raise ValueError(told if episodes > 0 else f"episodes is {episodes}, expected at least 1")
    if sample:
        if "sample" not in inspect.signature(act).parameters:
            raise ValueError("the policy has no probabilities to draw from: leave sample out")
        with torch.random.fork_rng([]):  # leaves the caller's stream untouched
            torch.default_generator.manual_seed(seed)
            return evaluate(
                partial(act, sample=True), envs, episodes, seed=seed, device=device, **make_kwargs
            )
    if not is_vector:
        with closing(make_vec(envs, **{"num_envs": min(100, episodes), **make_kwargs})) as made:
            return evaluate(act, made, episodes, seed=seed, device=device)
    envs = envs.agents if isinstance(envs, AgentRowsVecEnv) else envs
    are_games = isinstance(envs, AgentsVecEnv)
    count, names = (envs.num_games, list(envs.groups)) if are_games else (envs.num_envs, [""])
    mode = read_autoreset_mode(envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
    left = episodes // count + (np.arange(count) < episodes % count)  # episodes left for each env
    totals, lengths = np.zeros((len(names), count)), np.zeros(count, np.int64)
    found: list[list[Any]] = [[] for _ in range(count)]  # return and length of each episode
    starts, is_over = np.ones(count, np.bool_), np.zeros(count, np.bool_)
    obs, _ = envs.reset(seed=seed)
    while left.any():
        actions = ask(act, envs, obs, starts, device)
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        if are_games:
            earned, is_step, is_over = _read_games(envs, rewards, infos, mode)
        else:  # NEXT_STEP mode: the step after an end only resets
            earned, is_step = [rewards], ~(is_over & (mode is AutoresetMode.NEXT_STEP))
            is_over = np.logical_or(terminations, truncations)
        totals += np.where(is_step, earned, 0.0)
        lengths += is_step
        for index in np.flatnonzero(is_over & (left > 0)).tolist():
            found[index].append((totals[:, index].tolist(), int(lengths[index])))
            left[index] -= 1
        totals[:, is_over], lengths[is_over] = 0.0, 0
        if mode is AutoresetMode.DISABLED and is_over.any():
            obs, _ = envs.reset(options={"reset_mask": is_over})
        starts = ~is_step if mode is AutoresetMode.NEXT_STEP else is_over
    returns, steps = zip(*(episode for of_env in found for episode in of_env), strict=True)
    columns = zip(names, zip(*returns, strict=True), strict=True)
    results = {name: EvaluationResult(*mean_of(of), of, steps) for name, of in columns}
    return results if are_games else results[""]


def _read_games(
    envs: AgentsVecEnv, rewards: dict[str, np.ndarray], infos: dict[str, Any], mode: AutoresetMode
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Return each group's rewards, which games made a step and which ended, all (games,)."""

    def any_of(rows: dict[str, np.ndarray]) -> np.ndarray:
        parts = [x.reshape(envs.num_games, -1).any(1) for x in rows.values()]
        return np.any([np.zeros(envs.num_games, np.bool_), *parts], axis=0)

    is_step = any_of(envs.valid)
    if mode is AutoresetMode.SAME_STEP:
        ends = {k: x["_final_obs"] for k in envs.groups if "_final_obs" in (x := infos.get(k, {}))}
        is_over = any_of(ends)
    else:
        is_over = is_step & ~any_of(envs.alive)
    by_game = [rewards[name].reshape(envs.num_games, -1).sum(1) for name in envs.groups]
    return by_game, is_step, is_over


@torch.inference_mode()
def ask(
    act: Callable[..., Any],
    envs: Any,
    obs: Any,
    starts: np.ndarray,
    device: torch.device | str = "cpu",
    report: dict[str, Any] | None = None,
) -> Any:
    """Return a policy's actions as arrays; pass it the parameters that it has, see `evaluate`.

    `report` is for a parameter of that name, see docs/watch.md.
    """

    def copied(x: Any) -> Any:  # the policy may keep it, so it gets a copy
        return torch.tensor(x, device=device) if isinstance(x, np.ndarray) else x

    def masks() -> Any:
        if not isinstance(envs, AgentsVecEnv):
            return leaf_by_leaf(copied, envs.action_masks())
        groups = [(name, group) for name, group in envs.groups.items() if group.has_action_masks]
        return {name: leaf_by_leaf(copied, group.action_masks()) for name, group in groups}

    wanted = inspect.signature(act).parameters
    given: dict[str, Any] = {"report": report} if report is not None and "report" in wanted else {}
    if "starts" in wanted:
        given["starts"] = torch.from_numpy(starts).to(device)
    if "action_masks" in wanted:
        given["action_masks"] = masks()
    elif "masks" in wanted and getattr(envs, "has_action_masks", False):  # a `Policy`
        given["masks"] = masks()
    actions = act(leaf_by_leaf(copied, obs), **given)
    return leaf_by_leaf(lambda x: x.cpu().numpy() if isinstance(x, torch.Tensor) else x, actions)
