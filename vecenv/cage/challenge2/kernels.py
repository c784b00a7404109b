"""The kernels of the CAGE simulator, for `vecenv.jit.JitVectorEnv`."""

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
# Step kernels by custom red policy: equal envs share their compiled code.
_steps: dict[Any, Any] = {}


def observation_space(
    scenario: Scenario, observation: str = "bits", dtype: Any = np.float32
) -> Box:
    """Return the space of one observation.

    Args:
        scenario: Tables with H hosts.
        observation: "bits", the original's 4 * H values 0 and 1; or "memory": a row of
            `BlueMemory.features`.
        dtype: Dtype of the arrays.

    Raises:
        ValueError: Unknown observation, or a dtype that can't represent it.
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
    """Return the kernels of the simulator; their `params` come from `compile_tables`.

    With observation "memory", actions are indices of `blue_choices`.

    Args:
        scenario: The tables, the ones that `compile_tables` is called with.
        observation: See `observation_space`.
        dtype: Dtype of the observations.
        red_policy: Policy of red in envs whose agent is CUSTOM: an `njit` function `(state, rng,
            tables) -> (kind of red action, target)`. It should read only the fields that red knows:
            `known_*`, `scanned`, `red_ports`, `red_success`, and its own memory `custom`.

    Raises:
        ValueError: Unknown observation.
        TypeError: `red_policy` is not a function.
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
