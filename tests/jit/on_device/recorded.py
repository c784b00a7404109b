"""Recorded CAGE 2 episodes, replayed by the driver for devices: nothing is left to chance."""

import functools

import numpy as np
from cage.golden import RULES_OF_TRACE, load_trace
from gymnasium.spaces import Box

from vecenv.cage.challenge2.replay import RecordedStep
from vecenv.cage.challenge2.rules.actions import observe
from vecenv.cage.challenge2.rules.codes import B_LINE, BITS_PER_HOST, MEANDER
from vecenv.cage.challenge2.rules.dynamics import apply, begin_episode, red_commit, red_options
from vecenv.cage.challenge2.scenario import cage2_scenario
from vecenv.cage.challenge2.tables import STATE_DTYPE, compile_tables, decode, host_bits
from vecenv.jit import EnvKernels
from vecenv.jit.cuda.env import CudaVectorEnv

__all__ = ["RULES_OF_TRACE", "count_differences", "load_trace"]

_FIELDS = [(name, STATE_DTYPE[name]) for name in STATE_DTYPE.names or ()]
_NUM_INPUTS = len(RecordedStep._fields)


def _reset(state, rng, tables):
    begin_episode(state, tables)


def _step(state, given, rng, tables):
    red_type, targets = red_options(state, tables)
    state.options_type = red_type
    state.options = targets
    red_commit(state, np.uint64(given[1]), np.uint64(given[2]), tables)
    outcomes = (given[3], given[4], given[5], given[6])
    _, error = apply(state, given[0], given[1], given[2], outcomes, tables)
    state.error = error
    return 0.0, False, False


@functools.cache
def _kernels(rules):
    """The kernels of the simulator with an action that says all that happens; and their tables."""
    scenario = cage2_scenario(rules)
    kernels = EnvKernels(
        [*_FIELDS, ("options", np.uint64), ("options_type", np.uint64), ("error", np.int64)],
        Box(0, 255, (BITS_PER_HOST * len(scenario.hosts),), np.uint8),
        Box(-(2**40), 2**40, (_NUM_INPUTS,), np.int64),
        _reset,
        _step,
        observe,
        name="recorded CAGE 2",
    )
    return kernels, compile_tables(scenario, red_agents=()), scenario


def count_differences(name, episodes=slice(None), num_steps=100, **options):
    """Replay episodes of a recording; count fields that differ, errors, and other moves of red.

    Args:
        name: Of the recording.
        episodes: Which of it.
        num_steps: Of each.
        options: Of the `CudaVectorEnv`.

    Returns:
        The count, and that of the fields that were compared.
    """
    trace = {key: array[episodes] for key, array in load_trace(name).items()}
    agents = trace["red_agent"].astype(np.int64)
    is_built_in = (agents == B_LINE) | (agents == MEANDER)
    kernels, tables, scenario = _kernels(RULES_OF_TRACE[name])
    envs = CudaVectorEnv(kernels, len(agents), params=tables, autoreset_mode="Disabled", **options)
    envs.reset(seed=0)
    state = envs.state_dict()
    state["states"]["red_agent"] = np.where(is_built_in, agents, 0)
    envs.load_state_dict(state)
    envs.reset(seed=0)
    differences = compared = 0
    columns = RecordedStep(*[trace.get(key) for key in RecordedStep._fields])
    for t in range(num_steps):
        given = np.full((len(agents), _NUM_INPUTS), -1)
        for k, column in enumerate(columns):
            if column is not None:
                given[:, k] = column[:, t]
        obs = envs.step(given)[0].cpu().numpy()
        states = envs.state_dict()["states"]
        found = {"obs": obs, **decode(_bare(states), scenario)}
        found |= {key: states[key] for key in ("reward10", "blue_success", "red_success")}
        for key, values in found.items():
            assert values.dtype == trace[key].dtype, key
            differences += int((values != trace[key][:, t]).sum())
            compared += values.size
        targets = host_bits(states["options"], 16).astype(bool)
        is_option = targets[np.arange(len(agents)), given[:, 2] & 15] & (given[:, 2] >= 0)
        agrees = ~is_built_in | ((states["options_type"] == given[:, 1]) & is_option)
        differences += int((states["error"] != 0).sum() + (~agrees).sum())
    envs.check()
    envs.close()
    return differences, compared


def _bare(states):
    """The states without what was added to them."""
    found = np.zeros(len(states), STATE_DTYPE)
    for field in STATE_DTYPE.names or ():
        found[field] = states[field]
    return found
