"""Scores of two policies on equal seeds, in any env."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vecenv.command.playing import load_policy
from vecenv.files import write_json
from vecenv.timing.report import as_number, new_table

__all__ = ["Scores", "compare_policies", "returns_of"]


@dataclass(frozen=True)
class Scores:
    """Mean returns with their uncertainty.

    Attributes:
        rows: Name, mean, and half the width of its 95 % confidence interval.
        facts: Further values for JSON.
        note: Text below the table.
    """

    rows: list[tuple[str, float, float]]
    facts: dict[str, Any]
    note: str

    def table(self) -> Table:
        """Return the table, for `rich` to print."""
        made = new_table("", ["", "return"], box=SIMPLE_HEAD, caption=self.note)
        made.min_width = len(self.note)
        for name, mean, half in self.rows:
            made.add_row(Text(name), f"{as_number(mean)} ± {as_number(half)}")
        return made

    def to_json(self, path: str | Path | None = None) -> str:
        """Return all of it as JSON, and write it to a file if a path is given."""
        rows = [dict(zip(("name", "mean", "ci95"), row, strict=True)) for row in self.rows]
        return write_json({**self.facts, "scores": rows}, path)


def compare_policies(policies: tuple[str, str], episodes: int, seed: int, **options: Any) -> Scores:
    """Let two policies play the same episodes, once each; `options` are those of `returns_of`.

    Rows: both policies, then the first minus the second, episode by episode.

    Raises:
        ValueError: There are fewer than two episodes, or `returns_of` raises it.
    """
    if episodes < 2:
        raise ValueError(f"episodes is {episodes}, expected at least 2")
    first, second = (returns_of(policy, episodes, seed, **options) for policy in policies)
    columns = np.stack([first, second, first - second])
    means, halves = columns.mean(1).tolist(), 1.96 * columns.std(1, ddof=1) / episodes**0.5
    rows = [*zip([*policies, "difference"], means, halves.tolist(), strict=True)]
    unpaired = float(np.hypot(*halves[:2]))  # as if the episodes were independent
    note = f"{episodes} episodes under equal luck; ±: 95 %; unpaired it would be ± "
    facts = {"episodes": episodes, "seed": seed, "unpaired_ci95": unpaired}
    return Scores(rows, facts, note + as_number(unpaired))


def returns_of(
    policy: str, episodes: int, seed: int, *, env: str, env_kwargs: Mapping[str, Any]
) -> np.ndarray:
    """Return the returns float64 (episodes,) of a policy; episode i has the seed `seed + i`.

    Args:
        policy: As in `vecenv evaluate` for CAGE; otherwise as in `vecenv play`.
        episodes: Number of episodes, side by side, each the first of its env.
        seed: Seed of the first episode.
        env: "Cage2-v0", "Cage4-v0", or an env of `vecenv play`.
        env_kwargs: For the env, such as red_agent="meander" for CAGE 2.
    """
    if env == "Cage2-v0":
        from vecenv.cage.challenge2.play.playing import play_cell

        return play_cell(policy, episodes, seed, **env_kwargs)[0]
    if env == "Cage4-v0":
        from vecenv.cage.challenge4.play.playing import play_episodes

        return play_episodes(policy, episodes, seed=seed, **env_kwargs).rewards[:-1].sum(axis=0)
    envs, act, _ = load_policy(env, Path(policy), num_envs=episodes, env_kwargs=env_kwargs)
    from vecenv.learn import evaluate  # imports torch, only after the policy was found

    try:
        return np.array(evaluate(act, envs, episodes, seed=seed).returns)
    finally:
        envs.close()
