"""The CAGE simulator as a kind of compiled environment, for `vecenv.jit.JitVectorEnv`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from vecenv.cage.challenge2.network.scenario import Scenario, blue_actions
from vecenv.cage.challenge2.network.state import STATE_DTYPE
from vecenv.cage.challenge2.options import MAX_LENGTHS
from vecenv.cage.challenge2.own_red import red_problem
from vecenv.cage.challenge2.remembering import memory_space, with_memory
from vecenv.cage.challenge2.rules import dynamics
from vecenv.cage.challenge2.rules.codes import BITS_PER_HOST, LENGTH_SLOT, MAX_DECOYS
from vecenv.cage.challenge2.rules.observation import observe, observe_extended
from vecenv.jit.interpreted import checked_in_trials
from vecenv.jit.kernels import EnvKernels
from vecenv.jit.random import integers_at

__all__ = [
    "LENGTH_FIELD",
    "OBSERVATIONS",
    "add_lengths",
    "cage_kernels",
    "observation_space",
    "with_drawn_lengths",
]

OBSERVATIONS = ("bits", "extended", "memory")
LENGTH_FIELD = "length_index"  # the field of the state that says which length an episode has drawn
_SCANNED_LAST = 2
# Equal envs share their code: steps by custom red policy, kernels that draw lengths by step.
_steps: dict[Any, Any] = {}
_drawing: dict[Any, tuple[Any, Any]] = {}


def observation_space(
    scenario: Scenario, observation: str = "bits", dtype: Any = np.float32
) -> Box:
    """Return the space of one observation.

    Args:
        scenario: With H hosts.
        observation: "bits", the original's 4 * H values 0 and 1; "extended": these, the scan
            memory (0, 1 scanned, 2 scanned last) and number of decoys of each host, and whether
            B_line, Meander and no red fit what was seen, 6 * H + 3 values; or "memory": a row of
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

    Those that show the "memory" take the numbers of `blue_choices` for actions, and need the tables
    that `add_choices` returns.

    Args:
        scenario: The tables that `compile_tables` is given too.
        observation: See `observation_space`. "extended" and "memory" need tables with
            `tracks_scans`.
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
        observe_extended if observation == "extended" else observe,
        dynamics.action_mask,
        name=scenario.name,
    )
    return with_memory(kernels, scenario) if observation == "memory" else kernels


def add_lengths(tables: Any, lengths: Sequence[int]) -> np.record:
    """Return the tables with the lengths that episodes draw from, uniformly."""
    # The new fields come first: Numba takes a record that another one begins with for its subtype,
    # and would run code compiled for the one with the other.
    dtype = [
        ("num_lengths", np.int64),
        ("lengths", np.uint16, (MAX_LENGTHS,)),
        *((name, tables.dtype[name]) for name in tables.dtype.names),
    ]
    array = np.zeros(1, np.dtype(dtype, align=True)).view(np.recarray)
    for name in tables.dtype.names:
        array[name][0] = tables[name]
    array["num_lengths"] = len(lengths)
    array["lengths"][0, : len(lengths)] = lengths
    array.flags.writeable = False
    return array[0]


def with_drawn_lengths(kernels: EnvKernels) -> EnvKernels:
    """Return kernels that truncate each episode at a length drawn at its reset.

    Args:
        kernels: Those of the simulator; the new ones need what `add_lengths` returns as params.
    """
    if kernels.step not in _drawing:
        _drawing[kernels.step] = _make(kernels.reset, kernels.step)
    reset, step = _drawing[kernels.step]
    # Not `dataclasses.replace`: what else a kind of env may have does not know of these lengths.
    return EnvKernels(
        kernels.state_dtype,
        kernels.observation_space,
        kernels.action_space,
        reset,
        step,
        kernels.observe,
        kernels.action_mask,
        name=kernels.name,
    )


def _make(core_reset: Any, core_step: Any) -> tuple[Any, Any]:
    def reset(state, rng, tables):
        core_reset(state, rng, tables)
        state.length_index = np.uint64(integers_at(rng, LENGTH_SLOT, tables.num_lengths))

    def step(state, action, rng, tables):
        reward, terminated, _ = core_step(state, action, rng, tables)
        length = tables.lengths[np.uint64(state.length_index)]
        return reward, terminated, np.uint64(state.step) >= np.uint64(length)

    return reset, step
