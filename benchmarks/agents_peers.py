"""Vector envs of other libraries for PettingZoo's games, each in an environment of its own.

    python -m venv agilerl; agilerl/bin/pip install agilerl 'pettingzoo[butterfly]' mpe2
    python -m venv rllib; rllib/bin/pip install 'ray[rllib]' torch 'pettingzoo[butterfly]' mpe2
    python benchmarks/agents_peers.py agilerl=agilerl/bin/python rllib=rllib/bin/python

Their versions exclude one another, so that all that is measured, ours too, are programs of their
own, told in turn when to run a round. AgileRL's `AsyncPettingZooVecEnv` has a process per game;
RLlib's `SyncVectorMultiAgentEnv` is in one process, so that there are two of them with half of the
games, which know nothing of each other, as two bare loops do; PufferLib's `Multiprocessing` has two
workers. "per processor-second" counts the processor time of all processes of a program: two cores
can't do more than twice as many steps per second. Of a machine that other programs use it is what
to look at, as a program of many processes gets a larger part of such a machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NUM_PROCESSES = {"bare": 2, "vecenv": 1, "agilerl": 1, "rllib": 2, "pufferlib": 1}
NUM_DRAWS = 32
Run = Callable[[int], None]


def bare_games(make_game: Callable[[], Any], num_games: int) -> Run:
    """Return a function that steps games by dicts."""
    from agents import bare_loop

    return bare_loop(make_game, num_games)


def vecenv_loop(make_game: Callable[[], Any], num_games: int) -> Run:
    """Return a function that steps our vector env so many times."""
    from vecenv import make_vec_agents

    options = {"num_workers": 2}
    made: Any = make_vec_agents(make_game, num_games, backend="async", vector_kwargs=options)
    envs = getattr(made, "agents", made)
    envs.reset(seed=0)
    draws = [
        {name: group.action_space.sample() for name, group in envs.groups.items()}
        for _ in range(NUM_DRAWS)
    ]

    def run(num_steps: int) -> None:
        for t in range(num_steps):
            envs.step(draws[t % NUM_DRAWS])

    return run


def agilerl_loop(make_game: Callable[[], Any], num_games: int) -> Run:
    """Return a function that steps AgileRL's vector env so many times."""
    from agilerl.vector.pz_async_vec_env import (  # pyright: ignore[reportMissingImports]
        AsyncPettingZooVecEnv,
    )

    envs = AsyncPettingZooVecEnv([make_game] * num_games)
    envs.reset(seed=0)
    game = make_game()
    spaces = {agent: game.action_space(agent) for agent in game.possible_agents}
    draws = [
        {agent: np.stack([space.sample() for _ in range(num_games)]) for agent, space in all_of}
        for all_of in [list(spaces.items())] * NUM_DRAWS
    ]

    def run(num_steps: int) -> None:
        for t in range(num_steps):
            envs.step(draws[t % NUM_DRAWS])

    return run


def rllib_loop(make_game: Callable[[], Any], num_games: int) -> Run:
    """Return a function that steps RLlib's vector env so many times."""
    from ray.rllib.env.vector.sync_vector_multi_agent_env import (  # pyright: ignore[reportMissingImports]
        SyncVectorMultiAgentEnv,
    )
    from ray.rllib.env.wrappers.pettingzoo_env import (  # pyright: ignore[reportMissingImports]
        ParallelPettingZooEnv,
    )

    envs = SyncVectorMultiAgentEnv([lambda: ParallelPettingZooEnv(make_game())] * num_games)
    envs.reset(seed=0)
    games = [env.unwrapped.par_env for env in envs.envs]
    spaces = {agent: games[0].action_space(agent) for agent in games[0].possible_agents}
    draws = [{agent: space.sample() for agent, space in spaces.items()} for _ in range(NUM_DRAWS)]

    def run(num_steps: int) -> None:
        for t in range(num_steps):
            actions = draws[t % NUM_DRAWS]
            envs.step([{agent: actions[agent] for agent in game.agents} for game in games])

    return run


def pufferlib_loop(make_game: Callable[[], Any], num_games: int) -> Run:
    """Return a function that steps PufferLib's vector env so many times."""
    import pufferlib.emulation  # pyright: ignore[reportMissingImports]
    import pufferlib.vector  # pyright: ignore[reportMissingImports]

    def make(buf: Any = None, seed: int = 0) -> Any:
        return pufferlib.emulation.PettingZooPufferEnv(env=make_game(), buf=buf, seed=seed)

    envs = pufferlib.vector.make(
        make, num_envs=num_games, num_workers=2, backend=pufferlib.vector.Multiprocessing
    )
    envs.reset()
    draws = [envs.action_space.sample() for _ in range(NUM_DRAWS)]

    def run(num_steps: int) -> None:
        for t in range(num_steps):
            envs.step(draws[t % NUM_DRAWS])

    return run


LOOPS = {
    "bare": bare_games,
    "vecenv": vecenv_loop,
    "agilerl": agilerl_loop,
    "rllib": rllib_loop,
    "pufferlib": pufferlib_loop,
}


def processor_s(pid: int) -> float:
    """Return the processor time of a process and those that descend from it."""
    ticks = 0
    parents: dict[int, list[tuple[int, int]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            own = int(path.parent.name), int(fields[11]) + int(fields[12])
            parents.setdefault(int(fields[1]), []).append(own)
            if own[0] == pid:
                ticks = own[1]
    waiting = [pid]
    while waiting:
        for child, own in parents.get(waiting.pop(), []):
            waiting.append(child)
            ticks += own
    return ticks / os.sysconf("SC_CLK_TCK")


def serve(peer: str, module: str, num_games: int) -> None:
    """Be a peer: run as many steps as a line of the standard input says, and answer."""
    answers, sys.stdout = sys.stdout, sys.stderr
    warnings.filterwarnings("ignore")
    make_game = importlib.import_module(module).parallel_env
    run = LOOPS[peer](make_game, num_games)
    for line in sys.stdin:
        run(int(line))
        answers.write("done\n")
        answers.flush()
    os._exit(0)  # with the processes of the peer


class Peer:
    """Programs of a peer that share the games."""

    def __init__(self, peer: str, python: str, module: str, num_games: int) -> None:
        count = NUM_PROCESSES[peer]
        call = [python, __file__, "--serve", peer, module, str(num_games // count)]
        self.programs = [
            subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]

    def run(self, num_steps: int) -> None:
        for program in self.programs:
            assert program.stdin is not None
            program.stdin.write(f"{num_steps}\n")
            program.stdin.flush()
        for program in self.programs:
            assert program.stdout is not None
            if program.stdout.readline() != "done\n":
                raise RuntimeError(f"{program.args} ended; what it printed says why")

    def processor_s(self) -> float:
        return sum(processor_s(program.pid) for program in self.programs)

    def close(self) -> None:
        for program in self.programs:
            assert program.stdin is not None
            program.stdin.close()
            program.wait(60)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("peers", nargs="+", metavar="PEER=PYTHON", help=", ".join(NUM_PROCESSES))
    parser.add_argument("--games", nargs="+", default=["spread"])
    parser.add_argument("--num-games", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    chosen = [choice.partition("=")[::2] for choice in options.peers]
    if wrong := [peer for peer, python in chosen if peer not in NUM_PROCESSES or not python]:
        parser.error(f"{', '.join(wrong)}: expected PEER=PYTHON of {', '.join(NUM_PROCESSES)}")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    warnings.filterwarnings("ignore")
    from agents import GAMES
    from measure import machine, markdown_table

    print(machine("numpy", "gymnasium", "pettingzoo"))
    rows = []
    for name in options.games:
        module, _, num_steps = GAMES[name]
        peers = {
            peer: Peer(peer, python, module, options.num_games)
            for peer, python in [("bare", sys.executable), ("vecenv", sys.executable), *chosen]
        }
        rates: dict[str, list[tuple[float, float]]] = {peer: [] for peer in peers}
        for repetition in range(options.repetitions + 1):
            for peer, program in peers.items():
                used, begin = program.processor_s(), time.perf_counter()
                program.run(num_steps)
                wall, used = time.perf_counter() - begin, program.processor_s() - used
                if repetition:
                    steps = options.num_games * num_steps
                    rates[peer].append((steps / wall, steps / used))
        for peer, found in rates.items():
            medians = [statistics.median(part) for part in zip(*found, strict=True)]
            ratios = [
                statistics.median(a[k] / b[k] for a, b in zip(found, rates["bare"], strict=True))
                for k in range(2)
            ]
            cells = [f"{medians[0]:,.0f}", f"{ratios[0]:.2f}"]
            rows.append([name, peer, *cells, f"{medians[1]:,.0f}", f"{ratios[1]:.2f}"])
        for program in peers.values():
            program.close()
    header = ["game", "by", "game-steps/s", "of bare", "per processor-second", "of bare"]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
