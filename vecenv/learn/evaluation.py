"""evaluate: the mean return of a policy, and how sure it is."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.core.autoreset import read_autoreset_mode
from vecenv.make import make_vec

__all__ = ["EvaluationResult", "ask", "evaluate"]

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
        return f"return {self.mean:.1f} ± {self.ci95:.1f} (95 %) over {len(self.returns)} episodes"

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(asdict(self))


def evaluate(
    act: Callable[..., Any],
    envs: Any,
    episodes: int = 100,
    *,
    seed: int = 1_000_000,
    num_envs: int | None = None,
    backend: str = "auto",
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
            nested as the observation space is, valid until the next call. Actions are a tensor or
            an array, as `envs.step` takes them. It is called in inference mode. If it has a
            parameter `starts`, it is given bool (N,), True where obs begins an episode, for
            policies with a memory; if it has one `action_masks`, what `envs.action_masks()`
            returns, as a tensor.
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
        if num_envs is not None or make_kwargs or backend != "auto":
            raise ValueError("num_envs, backend, ... are for envs that are made here; leave them")
        return _play(act, envs, episodes, seed, device, progress)
    count = min(num_envs or 100, episodes)
    made = make_vec(envs, count, backend=backend, **make_kwargs)
    try:
        return _play(act, made, episodes, seed, device, progress)
    finally:
        made.close()


@torch.inference_mode()
def _play(
    act: Callable[..., Any],
    envs: Any,
    episodes: int,
    seed: int,
    device: torch.device | str,
    progress: Callable[[int, int], Any] | None,
) -> EvaluationResult:
    num_envs = envs.num_envs
    mode = read_autoreset_mode(envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
    quotas = np.full(num_envs, episodes // num_envs) + (np.arange(num_envs) < episodes % num_envs)
    returns: list[list[float]] = [[] for _ in range(num_envs)]
    lengths: list[list[int]] = [[] for _ in range(num_envs)]
    totals, steps = np.zeros(num_envs), np.zeros(num_envs, np.int64)
    left, num_finished = quotas.copy(), 0
    starts = np.ones(num_envs, np.bool_)  # obs is the first of an episode
    resets_next = np.zeros(num_envs, np.bool_)  # the next step only resets, as NEXT_STEP has it
    obs, _ = envs.reset(seed=seed)
    while left.any():
        actions = ask(act, envs, obs, starts, device)
        obs, rewards, terminations, truncations, _ = envs.step(actions)
        is_over = np.logical_or(terminations, truncations)
        totals += np.where(resets_next, 0.0, rewards)
        steps += ~resets_next
        ended = np.flatnonzero(is_over)
        counted = ended[left[ended] > 0]
        for index in counted.tolist():
            returns[index].append(float(totals[index]))
            lengths[index].append(int(steps[index]))
        left[counted] -= 1
        totals[ended], steps[ended] = 0.0, 0
        if mode is AutoresetMode.DISABLED and len(ended):
            obs, _ = envs.reset(options={"reset_mask": is_over})
        starts = resets_next if mode is AutoresetMode.NEXT_STEP else is_over
        resets_next = is_over if mode is AutoresetMode.NEXT_STEP else resets_next
        if progress is not None and len(counted):
            num_finished += len(counted)
            progress(num_finished, episodes)
    flat = [value for values in returns for value in values]
    mean, std, ci95 = _interval(np.array(flat))
    return EvaluationResult(mean, std, ci95, tuple(flat), tuple(n for ns in lengths for n in ns))


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
        more["action_masks"] = _as_tensors(envs.action_masks(), device)
    if "report" in wanted and report is not None:
        more["report"] = report
    return _as_arrays(act(_as_tensors(obs, device), **more))


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
    """Return a nest of arrays as one of tensors, over the same memory on the CPU."""
    if isinstance(batch, dict):
        return {key: _as_tensors(part, device) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_as_tensors(part, device) for part in batch)
    return torch.as_tensor(batch, device=device) if isinstance(batch, np.ndarray) else batch


def _as_arrays(actions: Any) -> Any:
    """Return a nest of tensors as one of arrays."""
    if isinstance(actions, dict):
        return {key: _as_arrays(part) for key, part in actions.items()}
    if isinstance(actions, tuple):
        return tuple(_as_arrays(part) for part in actions)
    return actions.detach().cpu().numpy() if isinstance(actions, torch.Tensor) else actions
