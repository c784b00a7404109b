"""Steps per second of the compiled CartPole against EnvPool's, Gymnasium's, and the bare equations.

    python benchmarks/cartpole.py

Every case gets the same random actions, a new row each step. All do autoreset on the next step and
limit episodes to 500, except the bare loop: it is the equations of motion alone, over arrays in one
thread, with actions in and state out. The steps on which autoreset resets are not counted; under
random actions they are one in 23 or so. Compilation is not inside.

EnvPool (`pip install envpool`) takes part if it can be imported; it is given as many threads as
there are processors, or one for few envs, whichever of the two is faster.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv as GymnasiumCartPole
from measure import Rates, alternate, machine, markdown_table, median_ratio
from numba import njit
from work import make_slot

from vecenv.jit.cartpole import CartPoleVectorEnv

NUM_ROWS = 64  # rows of actions, used in turn
COUNTS = (1, 64, 1024, 16_384)
OURS, OURS_OUT, OURS_ALONE = "vecenv", "vecenv, out=", "vecenv, 1 thread"
GYMNASIUM, BARE = "gymnasium", "bare loop"
ENVPOOL, ENVPOOL_ALONE = "envpool", "envpool, 1 thread"


@njit(error_model="numpy")
def bare_loop(state, action_rows, num_steps):
    """Advance state float64 (4, N) by the equations; who falls is put upright again."""
    for step in range(num_steps):
        actions = action_rows[step % action_rows.shape[0]]
        for i in range(state.shape[1]):
            x, x_dot, theta, theta_dot = state[0, i], state[1, i], state[2, i], state[3, i]
            force = 10.0 if actions[i] == 1 else -10.0
            cos, sin = math.cos(theta), math.sin(theta)
            push = (force + 0.05 * (theta_dot * theta_dot) * sin) / 1.1
            theta_acc = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * (cos * cos) / 1.1))
            x_acc = push - 0.05 * theta_acc * cos / 1.1
            x, theta = x + 0.02 * x_dot, theta + 0.02 * theta_dot
            fell = abs(x) > 2.4 or abs(theta) > 0.20943951
            state[0, i] = 0.0 if fell else x
            state[1, i] = 0.0 if fell else x_dot + 0.02 * x_acc
            state[2, i] = 0.0 if fell else theta
            state[3, i] = 0.0 if fell else theta_dot + 0.02 * theta_acc


def stepper(envs: Any, actions: np.ndarray, num_steps: int, **options: Any) -> Callable[[], None]:
    """Return a function that steps a vector env."""
    rows = [actions[k % NUM_ROWS] for k in range(num_steps)]

    def run() -> None:
        for row in rows:
            envs.step(row, **options)

    return run


def share_of_live_steps(num_envs: int, num_steps: int) -> float:
    """Return the share of env steps that are steps, and no resets, under random actions."""
    envs = CartPoleVectorEnv(num_envs)
    envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, (NUM_ROWS, num_envs))
    num_resets = sum(
        int(np.logical_or(*envs.step(actions[k % NUM_ROWS])[2:4]).sum()) for k in range(num_steps)
    )
    return 1.0 - num_resets / (num_envs * num_steps)


def envpool_cases(actions: np.ndarray, num_steps: int) -> dict[str, Callable[[], None]]:
    """Return EnvPool's cases, none if it is not installed."""
    if find_spec("envpool") is None:
        return {}
    import envpool  # type: ignore[import-not-found]  # not among the extras

    cases, num_envs = {}, actions.shape[1]
    threads = {ENVPOOL_ALONE: 1} if num_envs == 1 else {ENVPOOL: os.cpu_count(), ENVPOOL_ALONE: 1}
    for name, num_threads in threads.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the bounds of its spaces
            envs = envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, num_threads=num_threads)
        envs.reset()
        cases[name] = stepper(envs, actions.astype(np.int32), num_steps)
    return cases


def measure(num_envs: int, env_steps: int, repetitions: int) -> Rates:
    """Return the rates of all ways to step `num_envs` CartPoles."""
    num_steps = max(4, env_steps // (num_envs + 300))  # a call costs about what 300 steps do
    actions = np.random.default_rng(0).integers(0, 2, (NUM_ROWS, num_envs))
    ours, ours_out, alone = (CartPoleVectorEnv(num_envs, num_threads=n) for n in (None, None, 1))
    theirs = GymnasiumCartPole(num_envs)
    for envs in (ours, ours_out, alone, theirs):
        envs.reset(seed=0)
    state = np.zeros((4, num_envs))
    cases = {
        OURS: stepper(ours, actions, num_steps),
        OURS_OUT: stepper(ours_out, actions, num_steps, out=make_slot(ours_out)),
        OURS_ALONE: stepper(alone, actions, num_steps),
        GYMNASIUM: stepper(theirs, actions, num_steps),
        **envpool_cases(actions, num_steps),
        BARE: lambda: bare_loop(state, actions, num_steps),
    }
    live_steps = round(num_steps * num_envs * share_of_live_steps(num_envs, num_steps))
    units = {name: num_steps * num_envs if name == BARE else live_steps for name in cases}
    for run in cases.values():
        run()  # also lets helpers start
    return alternate(cases, units, repetitions)


def report(num_envs: int, rates: Rates) -> list[str]:
    """Lay out one row of the table."""
    row = [f"{num_envs:,}"]
    for name in (OURS, OURS_OUT, OURS_ALONE, GYMNASIUM, ENVPOOL, ENVPOOL_ALONE, BARE):
        per_second = rates.get(name)
        if per_second is None:
            row.append("")
            continue
        middle = statistics.median(per_second)
        spread = (max(per_second) - min(per_second)) / middle
        row.append(f"{middle / 1e6:.2f} ± {spread / 2:.0%}")
    row.append(f"{median_ratio(rates, OURS, GYMNASIUM):.1f}")
    pools = [median_ratio(rates, OURS, name) for name in (ENVPOOL, ENVPOOL_ALONE) if name in rates]
    row.append(f"{min(pools):.1f}" if pools else "")
    row.append(f"{median_ratio(rates, OURS, OURS_ALONE):.2f}")
    row.append(f"{num_envs * 1e6 / statistics.median(rates[OURS]):.1f}")
    return row


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Steps per second of compiled CartPoles.")
    parser.add_argument("--env-steps", type=int, default=1_000_000, help="about so many per case")
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    has_envpool = find_spec("envpool") is not None
    print(machine("gymnasium", "numpy", "numba", *(["envpool"] if has_envpool else [])))
    if not has_envpool:
        print("EnvPool is not installed; its columns stay empty.")
    print(f"Million steps per second; median, half the spread, {options.repetitions} rounds.\n")
    header = ["envs", OURS, OURS_OUT, OURS_ALONE, GYMNASIUM, ENVPOOL, ENVPOOL_ALONE, BARE]
    header += ["x gymnasium", "x envpool", "x 1 thread", "µs per step"]
    rows = [
        report(num_envs, measure(num_envs, options.env_steps, options.repetitions))
        for num_envs in COUNTS
    ]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
