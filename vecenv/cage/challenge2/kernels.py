"""The CAGE simulator as a kind of compiled environment, for `vecenv.jit.JitVectorEnv`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from vecenv.cage.challenge2.network.scenario import Scenario, blue_actions
from vecenv.cage.challenge2.network.state import STATE_DTYPE
from vecenv.cage.challenge2.options import red_problem
from vecenv.cage.challenge2.remembering import memory_space, with_memory
from vecenv.cage.challenge2.rules import codes, dynamics
from vecenv.cage.challenge2.rules.observation import observe
from vecenv.jit import EnvKernels, checked_in_trials

__all__ = ["OBSERVATIONS", "cage_kernels", "observation_space"]

OBSERVATIONS = ("bits", "memory")
# Equal envs share their code: steps by custom red policy.
_steps: dict[Any, Any] = {}


def observation_space(
    scenario: Scenario, observation: str = "bits", dtype: Any = np.float32
) -> Box:
    """Return the space of one observation.

    Args:
        scenario: With H hosts.
        observation: "bits", the original's 4 * H values 0 and 1; or "memory": a row of
            `BlueMemory.features`.
        dtype: Of the arrays.

    Raises:
        ValueError: Unknown observation, or a dtype that can't show it.
    """
    if observation not in OBSERVATIONS:
        raise ValueError(
            f"observation must be one of {', '.join(OBSERVATIONS)}; got {observation!r}"
        )
    if observation == "memory":
        return memory_space(scenario, dtype)
    high = np.ones(codes.BITS_PER_HOST * len(scenario.hosts), dtype)
    return Box(np.zeros_like(high), high, dtype=dtype)


def cage_kernels(
    scenario: Scenario,
    *,
    observation: str = "bits",
    dtype: Any = np.float32,
    red_policy: Callable[..., Any] | None = None,
) -> EnvKernels:
    """Return the kernels of the simulator; its `params` are what `compile_tables` makes.

    Those that show the "memory" take the numbers of `blue_choices` for actions.

    Args:
        scenario: The tables that `compile_tables` is given too.
        observation: See `observation_space`.
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
        _steps[red_policy] = (
            dynamics.step
            if red_policy is None
            else dynamics.step_with(checked_in_trials(red_policy, red_problem))
        )
    kernels = EnvKernels(
        STATE_DTYPE,
        observation_space(scenario, observation, dtype),
        Discrete(len(blue_actions(scenario))),
        dynamics.reset,
        _steps[red_policy],
        observe,
        dynamics.action_mask,
        name=scenario.name,
    )
    return with_memory(kernels, scenario) if observation == "memory" else kernels
