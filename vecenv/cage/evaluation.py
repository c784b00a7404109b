"""The nine-cell table of the challenge: how well a blue policy does, and how sure that is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from rich.table import Table

from vecenv.base import StepSlot
from vecenv.cage.env import Cage2VectorEnv
from vecenv.cage.options import RED_AGENTS, read_episode_lengths, read_scenario
from vecenv.cage.playing import BatchedPolicy, Player, Policy, find_policy
from vecenv.cage.scenario import Scenario
from vecenv.files import write_text

__all__ = ["Cell", "Evaluation", "cell_seed", "evaluate"]

EPISODE_LENGTHS = (30, 50, 100)
EVALUATED_AGENTS = ("b_line", "meander", "sleep")
_Z95 = 1.959964  # two-sided 95 % point of the normal distribution
_AGENT_TITLES = {"b_line": "B_line", "meander": "Meander", "sleep": "Sleep", "mixed": "mixed"}


@dataclass(frozen=True, slots=True)
class Cell:
    """Total rewards of the episodes of one length against one red agent.

    Attributes:
        red_agent: Its name.
        episode_length: Steps.
        episodes: How many.
        mean: Of the total rewards.
        sd: Their standard deviation (ddof 1).
        ci95: Half of the width of the 95 % confidence interval of the mean, from the normal
            distribution.
    """

    red_agent: str
    episode_length: int
    episodes: int
    mean: float
    sd: float
    ci95: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `evaluate` found; prints as a table.

    Attributes:
        policy: What the policy is called.
        rules: Name of the rules: scores under different rules are not comparable.
        observation: What the policy saw.
        green: Whether the green agent was there.
        seed: The seed.
        cells: See `Cell`.
        total: Sum of the means of all cells, the score of the challenge.
        total_ci95: Half of the width of its 95 % confidence interval; cells are independent.
    """

    policy: str
    rules: str
    observation: str
    green: bool
    seed: int
    cells: tuple[Cell, ...]
    total: float
    total_ci95: float

    def cell(self, red_agent: str, episode_length: int) -> Cell:
        """Return one cell.

        Raises:
            KeyError: There is none.
        """
        for cell in self.cells:
            if (cell.red_agent, cell.episode_length) == (red_agent, episode_length):
                return cell
        raise KeyError(f"no cell for {red_agent!r} and {episode_length} steps")

    def to_json(self, path: str | Path | None = None) -> str:
        """Return all of it as JSON, and write it to a file if a path is given."""
        text = json.dumps(asdict(self), indent=2)
        if path is not None:
            write_text(path, text + "\n")
        return text

    def table(self) -> Table:
        """Return a table for `rich` to print: mean ± half of the 95 % confidence interval."""
        lengths = sorted({cell.episode_length for cell in self.cells})
        agents = list(dict.fromkeys(cell.red_agent for cell in self.cells))
        title = f"{self.policy}: {self.rules} rules, {self.cells[0].episodes} episodes per cell"
        table = Table(title=title + (", green agent" if self.green else ""))
        table.add_column("red agent")
        for length in lengths:
            table.add_column(f"{length} steps", justify="right")
        table.add_column("sum", justify="right", style="bold")
        for agent in agents:
            row = [self.cell(agent, length) for length in lengths]
            shown = [_interval(cell.mean, cell.ci95) for cell in row]
            table.add_row(_AGENT_TITLES.get(agent, agent), *shown, _interval(*_sum(row)))
        table.add_section()
        blank = [""] * len(lengths)
        table.add_row("total", *blank, _interval(self.total, self.total_ci95), style="bold")
        return table

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        from vecenv.cage.text import to_text

        return to_text(self.table(), has_color=False).rstrip()


def evaluate(
    policy: Policy,
    *,
    episodes: int = 1000,
    seed: int = 0,
    rules: str | None = None,
    scenario: Scenario | None = None,
    observation: str | None = None,
    green: bool = False,
    red_agents: Sequence[str] = EVALUATED_AGENTS,
    episode_lengths: Sequence[int] = EPISODE_LENGTHS,
    num_threads: int | None = None,
    name: str | None = None,
    on_cell: Callable[[Cell], Any] | None = None,
) -> Evaluation:
    """Let a policy play the challenge's nine cells: three lengths against three red agents.

    All episodes of a cell are played side by side, in one batch. Every cell has random numbers of
    its own, which depend on the seed, the red agent and the length only.

    Args:
        policy: See `vecenv.cage.playing.find_policy`: a name, a file, an object with `act` and
            `reset`, or a function from observations (N, ...) to actions (N,).
        episodes: Per cell.
        seed: The same one gives the same numbers, if the policy does not draw by itself.
        rules: "faithful" (the default) or "debugged".
        scenario: Other tables instead.
        observation: What the policy gets; None for what it says it needs, or "bits".
        green: Whether the green agent is there.
        red_agents: Rows of the table.
        episode_lengths: Columns of the table.
        num_threads: At most so many threads.
        name: What to call the policy.
        on_cell: Called after each cell, to show progress.

    Raises:
        TypeError, ValueError: An argument is not what it should be; the message names it.
        ActionError: The policy returned something that is not one action per env.

    Example:
        >>> print(evaluate("sleep", episodes=20, red_agents=["sleep"]).total)
        0.0
    """
    if isinstance(episodes, bool) or not isinstance(episodes, int) or episodes < 2:
        raise ValueError(f"episodes is {episodes!r}, expected an integer of at least 2")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed is {seed!r}, expected an integer of at least 0")
    agents, lengths = _read_table(red_agents, episode_lengths)
    scenario = read_scenario(scenario, rules)
    player = find_policy(policy, scenario, seed=seed)
    wanted = observation or getattr(player, "observation", "bits")
    options = {
        "scenario": scenario,
        "observation": wanted,
        "green": green,
        "num_threads": num_threads,
    }
    cells = []
    for agent, length in product(agents, lengths):
        totals = _play_cell(player, agent, length, episodes, seed, **options)
        cells.append(_cell(agent, length, totals))
        if on_cell is not None:
            on_cell(cells[-1])
    name = name or _name_of(policy)
    rules = scenario.rules.name
    return Evaluation(name, rules, wanted, green, seed, tuple(cells), *_sum(cells))


def _read_table(red_agents: Any, episode_lengths: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    agents = (red_agents,) if isinstance(red_agents, str) else tuple(red_agents)
    for agent in agents:
        if agent not in RED_AGENTS:
            raise ValueError(f"red_agents has {agent!r}, expected names of {', '.join(RED_AGENTS)}")
    if not agents:
        raise ValueError("red_agents is empty, expected at least one name")
    return tuple(dict.fromkeys(agents)), tuple(sorted(set(read_episode_lengths(episode_lengths))))


def cell_seed(seed: int, red_agent: str, episode_length: int) -> int:
    """Return the seed of env 0 of a cell; the episodes of other cells are far away from it."""
    entropy = [seed, list(RED_AGENTS).index(red_agent), episode_length]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 2


def _play_cell(
    policy: BatchedPolicy, agent: str, length: int, episodes: int, seed: int, **options: Any
) -> np.ndarray:
    """Play the episodes of one cell and return their total rewards, float64 (episodes,)."""
    mode = AutoresetMode.DISABLED
    envs = Cage2VectorEnv(
        episodes, red_agent=agent, episode_length=length, autoreset_mode=mode, **options
    )
    shape, dtype = envs.observation_space.shape, envs.observation_space.dtype
    assert shape is not None
    slot = StepSlot(
        envs.allocate(shape, dtype),
        envs.allocate((episodes,), np.float64),
        envs.allocate((episodes,), np.bool_),
        envs.allocate((episodes,), np.bool_),
    )
    try:
        blue = Player(policy, envs)
        obs, _ = envs.reset(seed=cell_seed(seed, agent, length))
        blue.begin()
        totals = np.zeros(episodes)
        for _ in range(length):
            envs.step(blue.act(obs), out=slot)
            obs = slot.obs
            totals += slot.rewards
    finally:
        envs.close()
    return totals.round(1)  # sums of tenths


def _cell(agent: str, length: int, totals: np.ndarray) -> Cell:
    sd = float(totals.std(ddof=1))
    ci95 = _Z95 * sd / math.sqrt(len(totals))
    return Cell(agent, length, len(totals), float(totals.mean()), sd, ci95)


def _sum(cells: Sequence[Cell]) -> tuple[float, float]:
    """Sum of the means of independent cells, and half of the width of its confidence interval."""
    return sum(cell.mean for cell in cells), math.hypot(*(cell.ci95 for cell in cells))


def _interval(mean: float, ci95: float) -> str:
    return f"{mean:.2f} ± {ci95:.2f}"


def _name_of(policy: Any) -> str:
    if isinstance(policy, str | Path):
        return str(policy)
    return getattr(policy, "__name__", type(policy).__name__)
