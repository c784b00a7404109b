"""Two policies under equal luck: the same seeds for both, and the differences between episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vecenv.files import write_json
from vecenv.timing.report import as_number, new_table

__all__ = ["Comparison", "compare_policies", "returns_of"]


@dataclass(frozen=True)
class Comparison:
    """What two policies got in the same episodes.

    Attributes:
        names: Of both policies.
        episodes: How many.
        means: Mean returns.
        ci95: Half widths of their 95 % confidence intervals.
        difference: Mean of the first less the second, episode by episode.
        difference_ci95: Of that.
        unpaired_ci95: What it would be if the episodes had nothing to do with each other.
    """

    names: tuple[str, str]
    episodes: int
    means: tuple[float, float]
    ci95: tuple[float, float]
    difference: float
    difference_ci95: float
    unpaired_ci95: float

    def table(self) -> Table:
        """Return the table, for `rich` to print."""
        told = f"{self.episodes} episodes under equal luck; ±: 95 %; unpaired it would be ± "
        told += as_number(self.unpaired_ci95)
        made = new_table("", ["policy", "return"], box=SIMPLE_HEAD, caption=told)
        made.min_width = len(told)
        rows = [*zip(self.names, self.means, self.ci95, strict=True)]
        for name, mean, half in [*rows, ("difference", self.difference, self.difference_ci95)]:
            made.add_row(Text(name), f"{as_number(mean)} ± {as_number(half)}")
        return made

    def to_json(self, path: str | Path | None = None) -> str:
        """Return all of it as JSON, and write it to a file if a path is given."""
        return write_json(asdict(self), path)


def compare_policies(
    policies: tuple[str, str], episodes: int, seed: int, **options: Any
) -> Comparison:
    """Let two policies play the same episodes, each once; `options` are those of `returns_of`.

    Raises:
        ValueError: Fewer than two episodes, or what `returns_of` raises.
    """
    if episodes < 2:
        raise ValueError(f"episodes is {episodes}, expected at least 2")
    first, second = (returns_of(policy, episodes, seed, **options) for policy in policies)
    both = np.stack([first, second])
    half = 1.96 * both.std(1, ddof=1) / episodes**0.5
    gains = first - second
    return Comparison(
        policies,
        episodes,
        (float(first.mean()), float(second.mean())),
        (float(half[0]), float(half[1])),
        float(gains.mean()),
        float(1.96 * gains.std(ddof=1) / episodes**0.5),
        float(np.hypot(*half)),
    )


def returns_of(
    policy: str, episodes: int, seed: int, *, env: str, env_kwargs: Mapping[str, Any]
) -> np.ndarray:
    """Return the returns float64 (episodes,) of a policy; episode i has the seed `seed + i`.

    Args:
        policy: As `vecenv evaluate` takes it of CAGE, else as `vecenv play` does.
        episodes: How many, side by side, each the first of its env.
        seed: Of the first.
        env: "Cage2-v0", "Cage4-v0", or what `vecenv play` takes.
        env_kwargs: Of the env, such as red_agent="meander" of CAGE 2.
    """
    if env == "Cage2-v0":
        from vecenv.cage.challenge2.play.playing import play_cell

        return play_cell(policy, episodes, seed, **env_kwargs)
    if env == "Cage4-v0":
        from vecenv.cage.challenge4.play.playing import play_episodes

        return play_episodes(policy, episodes, seed=seed, **env_kwargs).rewards[:-1].sum(axis=0)
    from vecenv.command.playing import load_policy
    from vecenv.learn import evaluate

    envs, act, _ = load_policy(env, Path(policy), num_envs=episodes, env_kwargs=env_kwargs)
    try:
        return np.array(evaluate(act, envs, episodes, seed=seed).returns)
    finally:
        envs.close()
