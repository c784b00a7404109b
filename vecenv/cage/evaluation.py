"""The result of an evaluation: mean total rewards of episodes, with confidence intervals."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from vecenv.core.moments import mean_of
from vecenv.files import write_json

__all__ = [
    "Cell", "Estimate", "Evaluation", "Tabular", "as_text", "cell_of", "estimate", "interval",
    "new_table", "sum_of",
]  # fmt: skip

_CHALLENGE = "CAGE Challenge 2"  # the title of a table leaves out this name
_AGENT_TITLES = {"b_line": "B_line", "meander": "Meander", "sleep": "Sleep", "mixed": "mixed"}


def as_text(shown: RenderableType, colors: Literal["standard"] | None = None) -> str:
    """Return a table as text of 100 columns, with colour codes if `colors` is "standard"."""
    console = Console(
        file=io.StringIO(),
        width=100,
        force_terminal=colors is not None,
        color_system=colors,
        legacy_windows=False,
    )
    with console.capture() as capture:  # a notebook would show what is printed
        console.print(shown)
    return capture.get()


def new_table(title: str, first: str, *columns: str) -> Table:
    """Return an empty table of results; all columns but the first are of numbers."""
    # No markup, as names are the user's.
    table = Table(title=Text(title), box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first, no_wrap=True, overflow="ellipsis")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


class Tabular:
    """Base of results that print as a table."""

    __slots__ = ()

    def table(self) -> Table:
        """Return the table, for `rich` to print."""
        raise NotImplementedError

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        return as_text(self.table()).rstrip()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over episodes.

    Attributes:
        mean: Mean of the episodes.
        sd: Their standard deviation (ddof 1).
        ci95: Half of the width of the 95 % confidence interval of the mean (Student's t).
    """

    mean: float
    sd: float
    ci95: float


def estimate(totals: np.ndarray) -> Estimate:
    """Return the estimate of a mean from one number per episode, at least two."""
    return Estimate(*mean_of(totals))


@dataclass(frozen=True, slots=True)
class Cell:
    """Total rewards of the episodes of one length against one red agent.

    Attributes:
        red_agent: Name of the red agent.
        episode_length: Steps per episode.
        episodes: Number of episodes.
        mean: Mean of the total rewards.
        sd: Their standard deviation (ddof 1).
        ci95: Half of the width of the 95 % confidence interval of the mean (Student's t).
        impossible_turns: Turns in which a custom red agent returned an action that does not exist;
            Sleep was played instead.
    """

    red_agent: str
    episode_length: int
    episodes: int
    mean: float
    sd: float
    ci95: float
    impossible_turns: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation(Tabular):
    """The result of `evaluate`; prints as a table.

    Attributes:
        policy: Name of the policy.
        scenario: Name of the scenario.
        rules: Name of the rules: scores under different rules are not comparable.
        rules_version: `RULES_VERSION`; scores of different versions are not comparable.
        tables: Hash of the scenario's tables; it distinguishes networks of the same name.
        observation: Kind of observation that the policy received.
        green: Whether the green agent took part.
        seed: Seed of the evaluation.
        cells: See `Cell`.
        total: Sum of the means of all cells: the score of the challenge.
        total_ci95: Half of the width of its 95 % confidence interval; cells are independent.
    """

    policy: str
    scenario: str
    rules: str
    rules_version: int
    tables: str
    observation: str
    green: bool
    seed: int
    cells: tuple[Cell, ...]
    total: float
    total_ci95: float

    def cell(self, red_agent: str, episode_length: int) -> Cell:
        """Return one cell.

        Raises:
            KeyError: The evaluation has no such cell.
        """
        for cell in self.cells:
            if (cell.red_agent, cell.episode_length) == (red_agent, episode_length):
                return cell
        raise KeyError(f"no cell for {red_agent!r} and {episode_length} steps")

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the evaluation as JSON, and write it to a file if a path is given."""
        return write_json(asdict(self), path)

    def table(self) -> Table:
        """Return a table for `rich` to print: mean ± half of the 95 % confidence interval.

        The table fits 80 columns for scores of up to four digits.
        """
        lengths = sorted({cell.episode_length for cell in self.cells})
        agents = list(dict.fromkeys(cell.red_agent for cell in self.cells))
        where = "" if self.scenario == _CHALLENGE else f" in {self.scenario}"
        title = (
            f"{self.policy}{where}: {self.rules} rules, {self.cells[0].episodes} episodes per cell"
        )
        title += ", green agent" if self.green else ""
        table = new_table(title, "red agent", *(f"{n} steps" for n in lengths), "sum")
        table.columns[-1].style = "bold"
        for agent in agents:
            row = [self.cell(agent, length) for length in lengths]
            shown = [interval(cell.mean, cell.ci95) for cell in row]
            name = Text(_AGENT_TITLES.get(agent, agent))
            table.add_row(name, *shown, interval(*sum_of(row)))
        table.add_section()
        blank = [""] * len(lengths)
        table.add_row("total", *blank, interval(self.total, self.total_ci95), style="bold")
        table.caption = Text("\n".join(self._warnings(agents)), justify="left") or None
        return table

    def _warnings(self, agents: list[str]) -> Iterator[str]:
        """Yield a line for each red agent that returned actions that do not exist."""
        for agent in agents:
            cells = [cell for cell in self.cells if cell.red_agent == agent]
            impossible = sum(cell.impossible_turns for cell in cells)
            turns = sum(cell.episodes * cell.episode_length for cell in cells)
            if impossible:
                yield (
                    f"red agent {agent} returned an action that does not exist in "
                    f"{impossible:_} of {turns:_} turns; these were played as Sleep"
                ).replace("_", " ")


def cell_of(agent: str, length: int, totals: np.ndarray, impossible_turns: int = 0) -> Cell:
    """Return the cell for the total rewards of its episodes, float64 (episodes,)."""
    found = estimate(totals)
    return Cell(agent, length, len(totals), found.mean, found.sd, found.ci95, impossible_turns)


def sum_of(cells: Sequence[Cell]) -> tuple[float, float]:
    """Return the sum of independent cells' means, and half of its confidence interval."""
    return sum(cell.mean for cell in cells), math.hypot(*(cell.ci95 for cell in cells))


def interval(mean: float, ci95: float) -> str:
    """Return the text of a mean and half of its confidence interval, as in tables."""
    digits = 2 if abs(mean) < 100 else 1
    return f"{mean:.{digits}f} ± {ci95:.{digits}f}"
