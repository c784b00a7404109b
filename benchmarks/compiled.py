"""Steps per second of compiled envs through the interface, against a bare loop over their kernels.

    python benchmarks/compiled.py                        # all bundled ones
    python benchmarks/compiled.py JitPendulum-v1 mine:Own-v0

The bare loop is compiled as one function and calls `step`, `observe` and, where an episode ends,
`reset`, in one thread; it checks nothing, counts nothing and keeps no rewards but their sum. All
get the same random actions, a new row each step. Steps on which autoreset resets are not counted.
Compilation is not inside. EnvPool (`pip install envpool`) takes part where it has the env.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
from measure import alternate, machine, markdown_table, median_ratio
from numba import njit

from vecenv import make_vec
from vecenv.jit import JitVectorEnv
from vecenv.jit.random import RNG_DTYPE, open_block, seed_streams

NUM_ROWS = 64  # rows of actions, used in turn
OURS, ALONE, BARE, ENVPOOL = "vecenv", "vecenv, 1 thread", "bare loop, 1 thread", "envpool"


def bare_loop(envs: JitVectorEnv) -> Callable[..., float]:
    """Return a compiled loop over the kernels of these envs."""
    kernels, has_params = envs.kernels, envs._params is not None
    reset, step, observe = (
        one if hasattr(one, "py_func") else njit(error_model="numpy")(one)
        for one in (kernels.reset, kernels.step, kernels.observe)
    )
    if not has_params:
        plain_reset, plain_step, plain_observe = reset, step, observe
        reset = njit(lambda state, rng, params: plain_reset(state, rng))
        step = njit(lambda state, action, rng, params: plain_step(state, action, rng))
        observe = njit(lambda state, out, params: plain_observe(state, out))

    @njit(error_model="numpy")
    def run(envs, params, limit, action_rows, num_steps):
        states, streams, lengths, obs = envs
        total = 0.0
        for t in range(num_steps):
            actions = action_rows[t % action_rows.shape[0]]
            for i in range(states.shape[0]):
                open_block(streams[i])
                reward, is_end, is_cut = step(states[i], actions[i], streams[i], params[0])
                total += reward
                lengths[i] += 1
                if is_end or is_cut or lengths[i] >= limit:
                    lengths[i] = 0
                    reset(states[i], streams[i], params[0])
                observe(states[i], obs[i], params[0])
        return total

    return run


def bare_case(envs: JitVectorEnv, actions: np.ndarray, num_steps: int) -> Callable[[], object]:
    """Return the bare loop with memory of its own, after a reset."""
    run, num_envs = bare_loop(envs), envs.num_envs
    states = envs.states.copy()
    streams = np.zeros(num_envs, RNG_DTYPE).view(np.recarray)
    seed_streams(streams, np.arange(num_envs), np.arange(num_envs, dtype=np.uint64))
    params = np.zeros(1, [("none", np.int8)]) if envs._params is None else envs._params
    obs_space, lengths = envs.single_observation_space, np.zeros(num_envs, np.int64)
    obs = np.zeros((num_envs, *(obs_space.shape or (1,))), obs_space.dtype)
    limit = envs.max_episode_steps or 2**62
    rows, record = (states, streams, lengths, obs), params.view(np.recarray)
    return lambda: run(rows, record, limit, actions, num_steps)


def stepper(envs: Any, actions: np.ndarray, num_steps: int) -> Callable[[], None]:
    """Return a function that steps a vector env."""
    rows = [actions[k % NUM_ROWS] for k in range(num_steps)]

    def run() -> None:
        for row in rows:
            envs.step(row)

    return run


def envpool_case(name: str, actions: np.ndarray, num_steps: int) -> dict[str, Callable[[], None]]:
    """Return EnvPool's case, none if it has no such env or is not installed."""
    if find_spec("envpool") is None:
        return {}
    import envpool  # type: ignore[import-not-found]  # not among the extras

    known = [
        one
        for one in envpool.list_all_envs()
        if one.rpartition("-v")[0] == name.rpartition("-v")[0]
    ]
    if not known:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the bounds of its spaces
        envs = envpool.make_gymnasium(
            known[-1], num_envs=actions.shape[1], num_threads=os.cpu_count()
        )
    envs.reset()
    dtype = envs.action_space.dtype
    return {ENVPOOL: stepper(envs, actions.astype(dtype), num_steps)}


def measure(name: str, num_envs: int, seconds: float, repetitions: int) -> list[str]:
    """Return a row of the table."""
    ours = make_vec(name, num_envs)
    alone = make_vec(name, num_envs, vector_kwargs={"num_threads": 1})
    ours.action_space.seed(0)
    actions = np.stack([ours.action_space.sample() for _ in range(NUM_ROWS)])
    for envs in (ours, alone):
        envs.reset(seed=0)
    assert isinstance(alone, JitVectorEnv)
    bare = bare_case(alone, actions, NUM_ROWS)
    bare()  # compiles
    rates = alternate({BARE: bare}, num_envs * NUM_ROWS, 3)
    num_steps = max(NUM_ROWS, int(seconds * statistics.median(rates[BARE]) / num_envs))
    pool_name = name.rpartition(":")[2].removeprefix("Jit")
    cases = {
        OURS: stepper(ours, actions, num_steps),
        ALONE: stepper(alone, actions, num_steps),
        BARE: bare_case(alone, actions, num_steps),
        **envpool_case(pool_name, actions, num_steps),
    }
    for run in cases.values():
        run()
    before = alone.num_episodes.sum()
    cases[ALONE]()
    num_resets = int(alone.num_episodes.sum() - before)
    live = num_steps * num_envs - num_resets
    units = {case: num_steps * num_envs if case == BARE else live for case in cases}
    rates = alternate(cases, units, repetitions)
    row = [name]
    for case in (OURS, ALONE, BARE, ENVPOOL):
        row.append(f"{statistics.median(rates[case]) / 1e6:.2f}" if case in rates else "")
    row.append(f"{median_ratio(rates, ALONE, BARE):.2f}")
    row.append(f"{median_ratio(rates, OURS, BARE):.2f}")
    return [*row, f"{median_ratio(rates, OURS, ENVPOOL):.1f}" if ENVPOOL in rates else ""]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Steps per second of compiled envs.")
    parser.add_argument("ids", nargs="*", help="of envs; without, all bundled ones")
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=0.15, help="per case and round, about")
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    names = options.ids or sorted(name for name in gym.registry if name.startswith("Jit"))
    has_envpool = find_spec("envpool") is not None
    print(machine("gymnasium", "numpy", "numba", *(["envpool"] if has_envpool else [])))
    print(f"{options.num_envs} envs. Million steps per second, {options.repetitions} rounds.\n")
    header = ["env", OURS, ALONE, BARE, ENVPOOL]
    header += ["1 thread / bare", "vecenv / bare", "vecenv / envpool"]
    rows = []
    for name in names:
        rows.append(measure(name, options.num_envs, options.seconds, options.repetitions))
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)  # compiling the next takes seconds
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
