"""The nine-cell table of the challenge: how well a blue policy does, and how sure that is."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vecenv.cage.challenge2.env import Cage2VectorEnv
from vecenv.cage.challenge2.network.scenario import RULES_VERSION, Scenario
from vecenv.cage.challenge2.options import (
    RED_AGENTS,
    RedAgent,
    read_episode_lengths,
    read_red_agents,
    read_scenario,
    red_agent_name,
)
from vecenv.cage.challenge2.play.playing import BatchedPolicy, Player, Policy, find_policy
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
        scenario: Name of the scenario.
        rules: Name of the rules: scores under different rules are not comparable.
        rules_version: Version of the simulator, `RULES_VERSION`; nor are those of different ones.
            None if it was not kept, in files written before it was.
        tables: Hash of the scenario's tables, which tells networks of one name apart; or None.
        observation: What the policy saw.
        green: Whether the green agent was there.
        seed: The seed.
        cells: See `Cell`.
        total: Sum of the means of all cells, the score of the challenge.
        total_ci95: Half of the width of its 95 % confidence interval; cells are independent.
    """

    policy: str
    scenario: str
    rules: str
    rules_version: int | None
    tables: str | None
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

    @classmethod
    def from_json(cls, path: str | Path) -> Evaluation:
        """Read what `to_json` has written.

        Warns if it was made with another version of the simulator than this one.

        Raises:
            ValueError: The file holds something else.
            OSError: The file can't be read.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            cells = tuple(Cell(**cell) for cell in fields.pop("cells"))
            unknown = {"scenario": "unknown", "rules_version": None, "tables": None}
            result = cls(**{**unknown, **fields, "cells": cells})
            _check_plain(result, *cells)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is no evaluation that `to_json` wrote: {error}") from error
        if result.rules_version not in (None, RULES_VERSION):
            warnings.warn(
                f"{path} was made with version {result.rules_version} of the rules, this is "
                f"version {RULES_VERSION}: scores under the two are not comparable",
                stacklevel=2,
            )
        return result

    def table(self) -> Table:
        """Return a table for `rich` to print: mean ± half of the 95 % confidence interval.

        It fits 80 columns, for scores down to four digits.
        """
        lengths = sorted({cell.episode_length for cell in self.cells})
        agents = list(dict.fromkeys(cell.red_agent for cell in self.cells))
        title = f"{self.policy}: {self.rules} rules, {self.cells[0].episodes} episodes per cell"
        title += ", green agent" if self.green else ""
        table = Table(title=Text(title), box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("red agent", no_wrap=True, overflow="ellipsis")
        for length in lengths:
            table.add_column(f"{length} steps", justify="right", no_wrap=True)
        table.add_column("sum", justify="right", style="bold", no_wrap=True)
        for agent in agents:
            row = [self.cell(agent, length) for length in lengths]
            shown = [_interval(cell.mean, cell.ci95) for cell in row]
            name = Text(_AGENT_TITLES.get(agent, agent))  # no markup, as names are the user's
            table.add_row(name, *shown, _interval(*_sum(row)))
        table.add_section()
        blank = [""] * len(lengths)
        table.add_row("total", *blank, _interval(self.total, self.total_ci95), style="bold")
        return table

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        from vecenv.cage.challenge2.view.text import to_text

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
    red_agents: RedAgent = EVALUATED_AGENTS,
    episode_lengths: Sequence[int] = EPISODE_LENGTHS,
    num_threads: int | None = None,
    name: str | None = None,
    on_cell: Callable[[Cell], Any] | None = None,
) -> Evaluation:
    """Let a policy play the challenge's nine cells: three lengths against three red agents.

    All episodes of a cell are played side by side, in one batch. Every cell has random numbers of
    its own, which depend on the seed, the red agent and the length only.

    Args:
        policy: See `vecenv.cage.find_policy`: a name, a file, an object with `act` and
            `reset`, or a function from observations (N, ...) to actions (N,).
        episodes: Per cell.
        seed: The same one gives the same numbers, if the policy does not draw by itself.
        rules: "faithful" (the default) or "debugged".
        scenario: Other tables instead.
        observation: What the policy gets; None for what it says it needs, or "bits".
        green: Whether the green agent is there.
        red_agents: Rows of the table: names, and red agents of your own (see `Cage2VectorEnv`),
            also as "module:function"; a row is called what its function is.
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
    _check_count("episodes", episodes, 2)
    _check_count("seed", seed, 0)
    agents, lengths = _read_table(red_agents, episode_lengths)
    scenario = read_scenario(scenario, rules)
    player = find_policy(policy, scenario, seed=seed)
    wanted = observation or getattr(player, "observation", "bits")
    options = {"scenario": scenario, "observation": wanted, "green": green}
    cells = []
    for (agent, red_agent), length in product(agents.items(), lengths):
        options |= {"red_agent": red_agent, "episode_length": length, "num_threads": num_threads}
        totals = _play_cell(player, episodes, cell_seed(seed, agent, length), **options)
        cells.append(_cell(agent, length, totals))
        if on_cell is not None:
            on_cell(cells[-1])
    total, total_ci95 = _sum(cells)
    return Evaluation(
        policy=name or _name_of(policy),
        **scenario.identity(),
        observation=wanted,
        green=green,
        seed=seed,
        cells=tuple(cells),
        total=total,
        total_ci95=total_ci95,
    )


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}, expected an integer of at least {least}")


def _read_table(red_agents: Any, episode_lengths: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the red agents by name, and the lengths."""
    if isinstance(red_agents, str) or callable(red_agents):
        red_agents = [red_agents]
    agents: dict[str, Any] = {}
    for agent in red_agents:
        if not isinstance(agent, str) and not callable(agent):
            raise TypeError(f"red_agents has {agent!r}, expected names and compiled policies")
        try:
            read_red_agents(agent)
        except (TypeError, ValueError) as error:
            raise type(error)(f"red_agents has {agent!r}: {error}") from error
        name = red_agent_name(agent)
        if agents.setdefault(name, agent) != agent:
            raise ValueError(f"red_agents has two that are called {name!r}; rename one")
    if not agents:
        raise ValueError("red_agents is empty, expected at least one")
    return agents, tuple(sorted(set(read_episode_lengths(episode_lengths))))


def cell_seed(seed: int, red_agent: str, episode_length: int) -> int:
    """Return the seed of env 0 of a cell; the episodes of other cells are far away from it.

    Args:
        seed: Of the evaluation.
        red_agent: Name of the row.
        episode_length: Of the column.
    """
    names = list(RED_AGENTS)
    own = zlib.crc32(red_agent.encode()) + len(names)
    number = names.index(red_agent) if red_agent in names else own
    entropy = [seed, number, episode_length]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 2


def _play_cell(
    policy: BatchedPolicy, episodes: int, seed: int, *, episode_length: int, **options: Any
) -> np.ndarray:
    """Play the episodes of one cell and return their total rewards, float64 (episodes,)."""
    mode = AutoresetMode.DISABLED
    envs = Cage2VectorEnv(episodes, episode_length=episode_length, autoreset_mode=mode, **options)
    try:
        blue = Player(policy, envs)
        obs, _ = envs.reset(seed=seed)
        blue.begin()
        totals = np.zeros(episodes)
        for _ in range(episode_length):
            # Without `out`: every observation is an array of its own, which the policy may keep.
            obs, rewards, *_ = envs.step(blue.act(obs))
            totals += rewards
    finally:
        envs.close()
    return totals.round(1)  # sums of tenths


def _cell(agent: str, length: int, totals: np.ndarray) -> Cell:
    sd = float(totals.std(ddof=1))
    ci95 = _Z95 * sd / math.sqrt(len(totals))
    return Cell(agent, length, len(totals), float(totals.mean()), sd, ci95)


def _check_plain(result: Evaluation, *cells: Cell) -> None:
    """Raise ValueError if a value is of another type than it should be, or a cell is missing."""
    kinds = {"str": str, "bool": bool, "int": int, "float": float, "int | None": int | None}
    kinds["str | None"] = str | None
    for owner in (result, *cells):
        for field in dataclasses.fields(owner):
            value, kind = getattr(owner, field.name), kinds.get(str(field.type))
            if kind is None:
                continue
            if kind is float and type(value) is int and abs(value) < 2**53:
                continue
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ValueError(f"{field.name} is {value!r:.99}, expected {field.type}")
            if type(value) is int and abs(value) >= 2**64:
                raise ValueError(f"{field.name} is out of range")
    found = {(cell.red_agent, cell.episode_length) for cell in cells}
    agents, lengths = {agent for agent, _ in found}, {length for _, length in found}
    if not found or len(found) != len(agents) * len(lengths):
        raise ValueError("some of its cells are missing")


def _sum(cells: Sequence[Cell]) -> tuple[float, float]:
    """Sum of the means of independent cells, and half of the width of its confidence interval."""
    return sum(cell.mean for cell in cells), math.hypot(*(cell.ci95 for cell in cells))


def _interval(mean: float, ci95: float) -> str:
    digits = 2 if abs(mean) < 100 else 1
    return f"{mean:.{digits}f} ± {ci95:.{digits}f}"


def _name_of(policy: Any) -> str:
    if isinstance(policy, str | Path):
        return str(policy)
    return getattr(policy, "__name__", type(policy).__name__)
