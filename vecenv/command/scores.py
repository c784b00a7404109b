"""Scores of two policies on equal seeds, in any env."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vecenv.command.playing import load_policy
from vecenv.core.moments import mean_of
from vecenv.files import write_json
from vecenv.timing.report import as_number, new_table

__all__ = ["Scores", "compare_policies", "returns_of"]


@dataclass(frozen=True)
class Scores:
    """Mean returns with their uncertainty.

    Attributes:
        rows: Name, mean, and half the width of its 95 % confidence interval.
        facts: Further values for JSON.
        title, note: Texts above and below the table.
    """

    rows: list[tuple[str, float, float]]
    facts: dict[str, Any]
    title: str
    note: str

    def table(self) -> Table:
        """Return the table, for `rich` to print."""
        made = new_table(self.title, ["", "return"], box=SIMPLE_HEAD, caption=self.note)
        made.min_width = len(self.note)
        for name, mean, half in self.rows:
            made.add_row(Text(name), f"{as_number(mean)} ± {as_number(half)}")
        return made

    def to_json(self, path: str | Path | None = None) -> str:
        """Return all of it as JSON, and write it to a file if a path is given."""
        rows = [dict(zip(("name", "mean", "ci95"), row, strict=True)) for row in self.rows]
        return write_json({**self.facts, "scores": rows}, path)


def compare_policies(
    policies: tuple[str, str], episodes: int, seed: int, *, env: str, env_kwargs: Mapping[str, Any]
) -> Scores:
    """Let two policies play the same episodes, once each; the rest is as in `returns_of`.

    Rows: both policies, then the first minus the second, episode by episode.

    Raises:
        ValueError: There are fewer than two episodes, or `returns_of` raises it.
    """
    if episodes < 2:
        raise ValueError(f"episodes is {episodes}, expected at least 2")
    first, second = (
        returns_of(policy, episodes, seed, env=env, env_kwargs=env_kwargs) for policy in policies
    )
    names = *policies, " - ".join(policies)
    rows = []
    for name, returns in zip(names, (first, second, first - second), strict=True):
        mean, _, half = mean_of(returns)
        rows.append((name, mean, half))
    unpaired = math.hypot(rows[0][2], rows[1][2])  # as if the episodes were independent
    note = f"{episodes} episodes under equal luck; ±: 95 %; unpaired it would be ± "
    facts = {"env": env, "env_kwargs": {**env_kwargs}, "episodes": episodes, "seed": seed}
    usual = {"red_agent": "b_line", "episode_length": 100} if env == "Cage2-v0" else {}
    title = " ".join([env, *(f"{key}={value}" for key, value in {**usual, **env_kwargs}.items())])
    return Scores(rows, facts | {"unpaired_ci95": unpaired}, title, note + as_number(unpaired))


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
        from vecenv.cage.challenge2.playing import play_cell

        return play_cell(policy, episodes, seed, **env_kwargs)[0]
    if env == "Cage4-v0":
        from vecenv.cage.challenge4.playing import play_episodes

        return play_episodes(policy, episodes, seed=seed, **env_kwargs).rewards[:-1].sum(axis=0)
    envs, act, _ = load_policy(env, Path(policy), num_envs=episodes, env_kwargs=env_kwargs)
    from vecenv.learn import evaluate  # imports torch, only after the policy was found

    try:
        return np.array(evaluate(act, envs, episodes, seed=seed).returns)
    finally:
        envs.close()
