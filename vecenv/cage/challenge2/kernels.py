"""The CAGE simulator as a kind of compiled environment, for `vecenv.jit.JitVectorEnv`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from vecenv.cage.challenge2.network.actions import blue_actions
from vecenv.cage.challenge2.network.scenario import Scenario
from vecenv.cage.challenge2.network.state import STATE_DTYPE
from vecenv.cage.challenge2.rules import free, memory, observation
from vecenv.cage.challenge2.rules.codes import BITS_PER_HOST, MAX_DECOYS
from vecenv.cage.challenge2.rules.custom import make_step
from vecenv.jit.kernels import EnvKernels

__all__ = ["OBSERVATIONS", "cage_kernels", "observation_space"]

OBSERVATIONS = ("bits", "extended")
_SCANNED_LAST = 2
_steps: dict[Any, Any] = {}  # by custom red policy, so that equal envs share their code


def observation_space(
    scenario: Scenario, observation: str = "bits", dtype: Any = np.float32
) -> Box:
    """Return the space of one observation.

    Args:
        scenario: With H hosts.
        observation: "bits", the original's 4 * H values 0 and 1; or "extended": these, the scan
            memory (0, 1 scanned, 2 scanned last) and number of decoys of each host, and whether
            B_line, Meander and no red fit what was seen; 6 * H + 3 values.
        dtype: Of the arrays.

    Raises:
        ValueError: Unknown observation.
    """
    if observation not in OBSERVATIONS:
        raise ValueError(
            f"observation must be one of {', '.join(OBSERVATIONS)}; got {observation!r}"
        )
    num_hosts = len(scenario.hosts)
    high = np.ones(BITS_PER_HOST * num_hosts, dtype)
    if observation == "extended":
        rest = [_SCANNED_LAST] * num_hosts + [MAX_DECOYS] * num_hosts + [1, 1, 1]
        high = np.concatenate([high, np.array(rest, dtype)])
    return Box(np.zeros_like(high), high, dtype=dtype)


def cage_kernels(
    scenario: Scenario,
    *,
    observation: str = "bits",
    dtype: Any = np.float32,
    red_policy: Callable[..., Any] | None = None,
) -> EnvKernels:
    """Return the kernels of the simulator; its `params` are what `compile_tables` makes.

    Args:
        scenario: The tables that `compile_tables` is given too.
        observation: See `observation_space`. "extended" needs tables with `tracks_scans`.
        dtype: Of the observations.
        red_policy: What red does in envs whose agent is CUSTOM: an `njit` function `(state, rng,
            tables) -> (kind of red action, target)`. It should look only at what red knows:
            `known_*`, `scanned`, `red_ports`, `red_success`, and its own memory `custom`.

    Raises:
        ValueError: Unknown observation.
        TypeError: `red_policy` is no function.
    """
    if red_policy is not None and not callable(red_policy):
        raise TypeError(f"red_policy must be an njit function or None, got {red_policy!r}")
    if red_policy not in _steps:
        _steps[red_policy] = free.step if red_policy is None else make_step(red_policy)
    space = observation_space(scenario, observation, dtype)
    return EnvKernels(
        STATE_DTYPE,
        space,
        Discrete(len(blue_actions(scenario))),
        free.reset,
        _steps[red_policy],
        observation_kernel(observation),
        free.action_mask,
        name=scenario.name,
    )


def observation_kernel(name: str) -> Callable[..., Any]:
    """Return the kernel that writes an observation, by its name in OBSERVATIONS."""
    return memory.observe_extended if name == "extended" else observation.observe
