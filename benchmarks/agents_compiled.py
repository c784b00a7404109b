"""Speed of the compiled games of several agents, and of PettingZoo's in a bare loop.

    python benchmarks/agents_compiled.py                          # pursuit, then spread
    python benchmarks/agents_compiled.py --games 64 1024 --threads 1 --env pursuit

One agent-step is the step of one agent: its observation, reward and flags. Compiled games are
stepped as users do, through the rows of `make_vec_agents`, into memory of their own. Actions are
random, drawn before the clock runs, and the same in each round; all games are reset where their
rules say. The bare loop is one `ParallelEnv`, reset when its agents are gone. "memory" is how fast
NumPy fills the observations with ones, a bound for whatever writes them with one thread.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from measure import alternate, machine

from vecenv import make_vec_agents
from vecenv.agents import AgentSlot

IDS = {"pursuit": "Pursuit-v0", "spread": "Spread-v0"}
NUM_BATCHES = 32
BARE_STEPS = {"pursuit": 60, "spread": 300}
AGENT_STEPS = 400_000  # of a compiled round


def compiled(env_id: str, num_games: int, num_threads: int) -> tuple[Any, Callable[[], None], int]:
    """Return the rows, a function that does a round, and its agent-steps."""
    envs: Any = make_vec_agents(env_id, num_games, vector_kwargs={"num_threads": num_threads})
    space, rows = envs.single_observation_space, envs.num_envs
    flags = [np.zeros(rows, np.bool_) for _ in range(3)]
    slot = AgentSlot(
        envs.allocate((rows, *space.shape), space.dtype), np.zeros(rows, np.float32), *flags
    )
    actions = np.random.default_rng(0).integers(0, envs.single_action_space.n, (NUM_BATCHES, rows))
    envs.reset(seed=0)
    num_steps = max(10, AGENT_STEPS // rows)

    def run() -> None:
        for step in range(num_steps):
            envs.step(actions[step % NUM_BATCHES], out=slot)

    return envs, run, num_steps * rows


def filling(rows: int, shape: tuple[int, ...]) -> tuple[Callable[[], None], int]:
    """Return a function that fills observations of so many rows, and how many it fills."""
    obs = np.zeros((rows, *shape), np.float32)
    num_steps = max(10, AGENT_STEPS // rows)

    def run() -> None:
        for _ in range(num_steps):
            obs.fill(1.0)

    return run, num_steps * rows


def bare(name: str) -> tuple[Callable[[], None], int] | None:
    """Return a function that plays a round of PettingZoo's game, and its agent-steps."""
    try:
        module = importlib.import_module(
            "pettingzoo.sisl.pursuit_v5" if name == "pursuit" else "mpe2.simple_spread_v3"
        )
    except ImportError:
        return None
    env: Any = module.parallel_env()
    num_agents = len(env.possible_agents)
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 5, (BARE_STEPS[name], num_agents)).tolist()
    env.reset(seed=0)

    def run() -> None:
        for batch in actions:
            if not env.agents:
                env.reset()
            env.step(dict(zip(env.agents, batch, strict=True)))

    return run, len(actions) * num_agents


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of compiled games of several agents")
    parser.add_argument("--env", choices=tuple(IDS), nargs="+", default=list(IDS))
    parser.add_argument("--games", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    print(machine())
    for name in args.env:
        cases, units, kept = {}, {}, []
        if (found := bare(name)) is not None:
            cases["bare"], units["bare"] = found
        for num_games in args.games:
            for num_threads in args.threads:
                case = f"{num_games} games, {num_threads} threads"
                envs, cases[case], units[case] = compiled(IDS[name], num_games, num_threads)
                kept.append(envs)
            case = f"{num_games} games, memory"
            cases[case], units[case] = filling(
                kept[-1].num_envs, kept[-1].single_observation_space.shape
            )
        rates = alternate(cases, units, args.repetitions)
        slowest = statistics.median(rates["bare"]) if "bare" in rates else None
        print(f"\n{name}: agent-steps/s, median (least to most of {args.repetitions} rounds)")
        for case, found in rates.items():
            ratio = f", {statistics.median(found) / slowest:,.0f} x bare" if slowest else ""
            print(
                f"  {case:24} {statistics.median(found):14,.0f} "
                f"({min(found):,.0f} to {max(found):,.0f}){ratio}"
            )
        for envs in kept:
            envs.close()


if __name__ == "__main__":
    main()
