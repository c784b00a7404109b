"""Game-steps per second of PettingZoo's games: bare, in our vector envs, and in SuperSuit's.

    pip install 'vecenv[agents]' supersuit
    python benchmarks/agents.py

"two bare loops" are two processes that step half of the games each, by dicts, and know nothing of
each other: more than any vector env with two processes can do, since these wait for each other.
"out=" writes into memory that is allocated once, as a rollout does; elsewhere each step returns new
arrays. "caller and a worker" is `caller_steps=True`: this process steps half of the games itself.
"first ready" receives and sends a quarter of the games at a time, and ends with none under way.
Actions are drawn beforehand; games that end are reset at once, which is timed and not counted.
SuperSuit's are
`pettingzoo_env_to_vec_env_v1` and `concat_vec_envs_v1` with 0 and 2 CPUs; agents that die need
`black_death_v3` there.

    python benchmarks/agents.py --overhead

is the processor time that a game-step takes besides the game's own, in this process, of a game of
three agents that does nothing; the least of several rounds, so that it needs no idle cores.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from async_envs import LooseProcesses
from gymnasium.spaces import Box, Discrete
from measure import Rates, alternate, machine, markdown_table, median_ratio

from vecenv import make_vec_agents
from vecenv.agents import AgentSlot

GAMES = {  # module, arguments, steps per round
    "spread": ("mpe2.simple_spread_v3", {}, 60),
    "knights": ("pettingzoo.butterfly.knights_archers_zombies_v11", {}, 30),
    "pistonball": ("pettingzoo.butterfly.pistonball_v6", {}, 3),
}
NUM_DRAWS = 32
NUM_SLOTS = 4
BARE = "two bare loops"


def bare_loop(make_game: Callable[[], Any], num_games: int) -> Callable[[int], None]:
    """Return a function that steps each of the games so many times."""
    games = [make_game() for _ in range(num_games)]
    draws = []
    for number, game in enumerate(games):
        game.reset(seed=number)
        for agent in game.possible_agents:
            game.action_space(agent).seed(number)
    for _ in range(NUM_DRAWS):
        draws.append({a: games[0].action_space(a).sample() for a in games[0].possible_agents})

    def run(num_steps: int) -> None:
        for t in range(num_steps):
            actions = draws[t % NUM_DRAWS]
            for game in games:
                game.step({agent: actions[agent] for agent in game.agents})
                if not game.agents:
                    game.reset()

    return run


def slots_of(agents: Any) -> dict[str, AgentSlot]:
    """Return memory for one step of all groups; their observations are arrays."""
    found = {}
    for name, group in agents.groups.items():
        rows, space = group.num_envs, group.single_observation_space
        flags = [np.zeros(rows, np.bool_) for _ in range(3)]
        obs = agents.allocate((rows, *space.shape), space.dtype)
        found[name] = AgentSlot(obs, np.zeros(rows, np.float32), *flags)
    return found


def our_loop(envs: Any, num_steps: int, *, into_slots: bool = False) -> Callable[[], None]:
    """Return a function that steps our vector env so many times."""
    agents = getattr(envs, "agents", envs)
    slots = [slots_of(agents) for _ in range(NUM_SLOTS)] if into_slots else [None]
    draws = [
        {name: group.action_space.sample() for name, group in agents.groups.items()}
        for _ in range(NUM_DRAWS)
    ]
    agents.reset(seed=0)

    def run() -> None:
        for t in range(num_steps):
            agents.step(draws[t % NUM_DRAWS], out=slots[t % len(slots)])

    return run


def first_ready_loop(envs: Any, num_steps: int) -> Callable[[], None]:
    """Return a function that steps as often, a quarter of the games at a time, as they finish."""
    agents = getattr(envs, "agents", envs)
    quarter = max(1, agents.num_games // 4)
    draws = [
        {name: group.action_space.sample() for name, group in agents.groups.items()}
        for _ in range(NUM_DRAWS)
    ]
    agents.reset(seed=0)

    def run() -> None:
        agents.send(draws[0])
        for t in range((num_steps - 1) * agents.num_games // quarter):
            batch = agents.recv(quarter, max_games=quarter)
            actions = draws[t % NUM_DRAWS]
            chosen = {name: actions[name][rows] for name, rows in batch.env_ids.items()}
            agents.send(chosen, batch.game_ids)
        for _ in range(agents.num_games // quarter):
            agents.recv(quarter, max_games=quarter)

    return run


def supersuit_loop(envs: Any, num_steps: int) -> Callable[[], None]:
    """Return a function that steps SuperSuit's vector env so many times."""
    rows = [
        np.stack([envs.action_space.sample() for _ in range(envs.num_envs)])
        for _ in range(NUM_DRAWS)
    ]
    envs.reset(seed=0)

    def run() -> None:
        for t in range(num_steps):
            envs.step(rows[t % NUM_DRAWS])

    return run


def supersuit_envs(make_game: Callable[[], Any], num_games: int, num_cpus: int) -> Any:
    """Make SuperSuit's vector env."""
    supersuit = importlib.import_module("supersuit")
    one = supersuit.pettingzoo_env_to_vec_env_v1(supersuit.black_death_v3(make_game()))
    return supersuit.concat_vec_envs_v1(one, num_games, num_cpus=num_cpus, base_class="gymnasium")


def measure(name: str, num_games: int, repetitions: int) -> Rates:
    """Measure all cases of a game in turn."""
    module, kwargs, num_steps = GAMES[name]
    make_game = functools.partial(importlib.import_module(module).parallel_env, **kwargs)
    loose = LooseProcesses(functools.partial(bare_loop, make_game), num_games)
    workers = {"num_workers": 2}, {"num_workers": 1, "caller_steps": True}
    into_slots = functools.partial(our_loop, into_slots=True)
    ours: dict[str, tuple[Any, dict[str, Any] | None]] = {
        "2 workers": (our_loop, workers[0]),
        "2 workers, out=": (into_slots, workers[0]),
        "caller and a worker": (our_loop, workers[1]),
        "caller and a worker, out=": (into_slots, workers[1]),
        "2 workers, first ready": (first_ready_loop, workers[0]),
        "sync": (our_loop, None),
    }
    made: list[Any] = [loose]
    cases: dict[str, Callable[[], object]] = {BARE: lambda: loose.run(num_steps)}
    for case, (loop, options) in ours.items():
        how: dict[str, Any] = {"backend": "sync"}
        if options is not None:
            how = {"backend": "async", "vector_kwargs": options}
        envs = make_vec_agents(make_game, num_games, autoreset_mode="SameStep", **how)
        made.append(envs)
        cases[f"vecenv, {case}"] = loop(envs, num_steps)
    for num_cpus in (0, 2):
        envs = supersuit_envs(make_game, num_games, num_cpus)
        made.append(envs)
        cases[f"SuperSuit, {num_cpus} CPUs"] = supersuit_loop(envs, num_steps)
    rates = alternate(cases, num_games * num_steps, repetitions)
    for one in made:
        one.close()
    return rates


def rows_of(name: str, rates: Rates) -> list[list[str]]:
    """Return a table's rows."""
    rows = []
    for case, found in rates.items():
        low, high = min(found), max(found)
        rows.append([
            name,
            case,
            f"{statistics.median(found):,.0f}",
            f"{low:,.0f} – {high:,.0f}",
            f"{median_ratio(rates, case, BARE):.2f}",
        ])  # fmt: skip
    return rows


class Idle:
    """A game of three agents that returns the same things in each of 25 steps."""

    metadata: dict[str, Any] = {}
    possible_agents = ("agent_0", "agent_1", "agent_2")
    seen, acted = Box(-np.inf, np.inf, (18,), np.float32), Discrete(5)

    def observation_space(self, agent: str) -> Box:
        return self.seen

    def action_space(self, agent: str) -> Discrete:
        return self.acted

    def reset(self, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        self.agents, self.time = list(self.possible_agents), 0
        self.obs = {agent: np.zeros(18, np.float32) for agent in self.agents}
        return self.obs, {}

    def step(self, actions: Any) -> tuple[Any, ...]:
        self.time += 1
        acted, is_over = self.agents, self.time == 25
        if is_over:
            self.agents = []
        no, ends = dict.fromkeys(acted, False), dict.fromkeys(acted, is_over)
        return self.obs, dict.fromkeys(acted, -1.0), no, ends, {agent: {} for agent in acted}

    def close(self) -> None:
        pass


def least_us(run: Callable[[], object], num_steps: int, rounds: int) -> float:
    """Return the least processor time of a step, in microseconds."""
    times = []
    for _ in range(rounds):
        begin = time.process_time_ns()
        run()
        times.append(time.process_time_ns() - begin)
    return min(times) / num_steps / 1e3


def overhead(num_games: int, repetitions: int) -> None:
    """Print what a game-step takes besides the game's own step."""
    num_steps = 500
    bare = bare_loop(Idle, num_games)
    own_us = least_us(lambda: bare(num_steps), num_steps * num_games, repetitions)
    for mode in ("NextStep", "SameStep"):
        envs = make_vec_agents(Idle, num_games, backend="sync", autoreset_mode=mode)
        loop = our_loop(envs, num_steps)
        all_us = least_us(loop, num_steps * num_games, repetitions)
        print(f"{mode}: {all_us - own_us:.1f} us per game-step besides a bare loop's {own_us:.1f}")
        envs.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--games", nargs="+", default=list(GAMES), choices=list(GAMES))
    parser.add_argument("--num-games", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--overhead", action="store_true")
    options = parser.parse_args()
    if options.overhead:
        print(machine("numpy", "gymnasium"))
        overhead(options.num_games, options.repetitions)
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # no window opens
    warnings.filterwarnings("ignore")
    print(machine("numpy", "gymnasium", "pettingzoo", "supersuit"))
    rows = []
    for name in options.games:
        rows += rows_of(name, measure(name, options.num_games, options.repetitions))
    header = ["game", "stepped by", "game-steps/s", "from – to", f"of {BARE}"]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
