"""Speed and memory of CAGE Challenge 4: whole episodes with random actions that the mask allows.

    python benchmarks/cage4.py --games 1024 --threads 1

One step is one step of one game: five blue agents, all green users, six red agents, the reward and
the 578 values that the agents see. Actions are drawn before the clock runs; the step in which games
begin anew is timed, but not counted. The first episode, which compiles, is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from vecenv.cage.challenge4.env import Cage4VectorEnv, overflows
from vecenv.cage.challenge4.rules.codes import NUM_BLUE, SLEEPS
from vecenv.jit.episodes import RUN_DTYPE

_ORIGINAL = {"untouched": 30.2, "unread work left out": 79.7}  # steps/s of its reference runs
_NUM_BATCHES = 50


def draw_actions(games: Cage4VectorEnv, rng: np.random.Generator, policy: str) -> np.ndarray:
    """Draw batches of actions int64 (B, G, 5), uniformly over the mask."""
    actions = np.zeros((_NUM_BATCHES, games.num_envs, NUM_BLUE), np.int64)
    actions[:, :, :NUM_BLUE] = SLEEPS
    if policy == "random":
        for agent, mask in enumerate(games.agent_masks()):
            order = np.argsort(~mask, axis=1, kind="stable")
            ranks = rng.integers(0, mask.sum(axis=1), (_NUM_BATCHES, games.num_envs))
            actions[:, :, agent] = np.take_along_axis(order[None], ranks[..., None], 2)[..., 0]
    return actions


def time_episode(games: Cage4VectorEnv, actions: np.ndarray, num_steps: int) -> float:
    """Play an episode of all games; return the seconds that its steps took."""
    begin = time.perf_counter()
    for step in range(num_steps):
        games.step(actions[step % _NUM_BATCHES])
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and memory of CAGE Challenge 4")
    parser.add_argument("--games", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=7)
    parser.add_argument("--policy", choices=("random", "sleep"), default="random")
    parser.add_argument(
        "--one-by-one", action="store_true", help="draw every green user for itself"
    )
    parser.add_argument("--observation", default="flat", help="flat, graph or graph_with_red")
    args = parser.parse_args()
    begin = time.perf_counter()
    games = Cage4VectorEnv(
        args.games,
        greens_one_by_one=args.one_by_one,
        num_threads=args.threads,
        observation=args.observation,
    )
    games.reset(seed=0)
    games.step(draw_actions(games, np.random.default_rng(0), "sleep")[0])
    print(f"first reset and step: {time.perf_counter() - begin:.1f} s")
    rng, rates, num_steps = np.random.default_rng(1), [], games.options.steps - 1
    reset_seconds = []
    for episode in range(args.episodes + 1):
        begin = time.perf_counter()
        games.reset(seed=episode)
        reset_seconds.append((time.perf_counter() - begin) / args.games)
        seconds = time_episode(games, draw_actions(games, rng, args.policy), num_steps)
        rates.append(num_steps * args.games / seconds)
    rates = sorted(rates[1:])
    median = statistics.median(rates)
    num_bytes = games.states.dtype.itemsize + RUN_DTYPE.itemsize
    print(
        f"{args.games} games, {args.threads} threads, {args.policy}: {median:,.0f} game steps/s "
        f"({rates[0]:,.0f} to {rates[-1]:,.0f}, {args.episodes} episodes of all games), "
        f"{median / args.threads:,.0f} per thread"
    )
    print(f"a reset takes {1e6 * statistics.median(reset_seconds):.1f} us per game")
    num_values = len(games.observe()[0])
    print(f"a game takes {num_bytes:,} bytes, and {num_values} of observations")
    for name, rate in _ORIGINAL.items():
        print(f"the original, {name}: {rate} steps/s on another machine")
    if outgrown := overflows(games.states):
        print(f"capacities outgrown: {outgrown}")


if __name__ == "__main__":
    main()
