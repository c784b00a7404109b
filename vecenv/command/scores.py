"""Scores of a policy in any env, and tables of scores as files of other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vecenv.command.playing import play
from vecenv.files import write_json, write_text
from vecenv.timing.report import as_number, new_table

__all__ = ["Scores", "score", "table_format", "write_table"]


@dataclass(frozen=True)
class Scores:
    """What a policy got in an env.

    Attributes:
        env, policy, trainer: Which; the last is what trained it.
        episodes, seed: Played, and of the first one.
        rows: Of each way of acting, and group of agents: "actions", "mean", "ci95", "std".
    """

    env: str
    policy: str
    trainer: str
    episodes: int
    seed: int
    rows: list[dict[str, Any]]

    def table(self) -> Table:
        """Return the table, for `rich` to print."""
        title = f"{self.env}, {self.trainer} of {self.policy}: {self.episodes} episodes"
        made = new_table(title, ["actions", "return", "deviation"], box=SIMPLE_HEAD)
        for row in self.rows:
            mean, half, deviation = (as_number(row[key]) for key in ("mean", "ci95", "std"))
            made.add_row(Text(row["actions"]), f"{mean} ± {half}", deviation)
        return made

    def to_json(self, path: str | Path | None = None) -> str:
        """Return all of it as JSON, and write it to a file if a path is given."""
        return write_json(asdict(self), path)


def score(
    env: str, policy: Path, episodes: int, *, seed: int, env_kwargs: Mapping[str, Any]
) -> Scores:
    """Play by the likeliest actions, then by drawn ones; see `play` for the arguments."""
    given: Any = {"seed": seed, "env_kwargs": env_kwargs}
    found, name = play(env, policy, episodes, **given)
    rows = []
    for group, results in found.items():
        for how, result in zip(("likeliest", "drawn as in the training"), results, strict=True):
            if result is not None:
                numbers = {key: getattr(result, key) for key in ("mean", "ci95", "std")}
                rows.append({"actions": f"{group}: {how}" if group else how, **numbers})
    return Scores(env, str(policy), name, episodes, seed, rows)


def table_format(path: Path) -> str:
    """Return ".csv" or ".md", the ending of a file for a table; ValueError for another one."""
    if path.suffix not in (".csv", ".md"):
        raise ValueError(f"table is {str(path)!r}, expected an ending of .csv or .md")
    return path.suffix


def write_table(table: Table, path: Path) -> None:
    """Write the cells of a table: in .csv the two numbers of `mean ± half` are columns each."""
    columns = [[str(column.header), *map(_plain, column.cells)] for column in table.columns]
    if table_format(path) == ".md":
        lines = [f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)]
        rule = "|".join(":--" if column.justify == "left" else "--:" for column in table.columns)
        return write_text(path, "\n".join([lines[0], f"|{rule}|", *lines[1:], ""]))
    parts = list[list[str]]()
    for header, *cells in columns:
        halves = [cell.partition("±")[::2] for cell in cells]
        parts.append([header, *(mean.strip() for mean, _ in halves)])
        if any(half for _, half in halves):
            parts.append([f"{header} ±".strip(), *(half.strip() for _, half in halves)])
    csv.writer(file := io.StringIO(), lineterminator="\n").writerows(zip(*parts, strict=True))
    return write_text(path, file.getvalue())


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain
