"""The learning curve: returns of episodes over env steps, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vecenv.files import whole_file
from vecenv.timing.report import new_figure

__all__ = ["draw_curve"]


def draw_curve(
    steps: Any,
    returns: Any,
    path: str | Path,
    *,
    title: str = "",
    baselines: Mapping[str, float] | None = None,
) -> None:
    """Draw the returns of episodes over env steps, with their moving average, into a picture.

    The average is over the last 20 episodes, or the last hundredth of them. Returns of one sign
    that cover more than one order of magnitude are drawn on a logarithmic axis.

    Args:
        steps: (E,), env steps made when each episode ended, ascending.
        returns: (E,), the return of each.
        path: The file, .png, .svg or .pdf.
        title: Above the picture.
        baselines: Returns of other policies by their names, drawn as lines.

    Raises:
        ImportError: matplotlib is missing (`pip install vecenv[plots]`).
        ValueError: There are no episodes.
    """
    steps, returns = np.asarray(steps, np.int64), np.asarray(returns, np.float64)
    if not len(steps):
        raise ValueError("there are no episodes to draw: none has ended yet")
    window = min(max(20, len(steps) // 100), len(steps))
    means = np.convolve(returns, np.full(window, 1 / window), "valid")
    unit, name = (1e6, "millions") if steps[-1] >= 1e6 else (1e3, "thousands")
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    axes.plot(steps / unit, returns, ".", markersize=3, alpha=0.25, label="an episode")
    label = f"mean of the last {window}"
    axes.plot(steps[window - 1 :] / unit, means, color="black", label=label)
    for number, (policy, value) in enumerate((baselines or {}).items(), 1):
        label = f"{policy}: {value:.1f}"
        axes.axhline(value, color=f"C{number}", linestyle="--", label=label)
    axes.set(title=title, xlabel=f"env steps ({name})", ylabel="return of an episode")
    drawn = np.array([*returns, *means, *(baselines or {}).values()])
    smallest = max(np.abs(drawn[len(returns) :]).min(), 1.0)
    if np.ptp(np.sign(drawn)) == 0 and np.abs(drawn).max() > 20 * smallest:
        axes.set_yscale("symlog", linthresh=smallest)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    with whole_file(path) as aside:
        figure.savefig(aside, dpi=150)
