"""Pictures of reports: stacked bars of the shares, and distributions of step times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vecenv.files import whole_file

if TYPE_CHECKING:
    from vecenv.timing.report import TimingReport

__all__ = ["draw_shares", "new_figure", "plot_reports"]

_COLOURS = {
    "env compute": "#2a9d8f",
    "env reset": "#264653",
    "env calls": "#2a9d8f",
    "straggler wait": "#e76f51",
    "hand-over": "#e9c46a",
    "copying": "#f4a261",
    "policy": "#457b9d",
    "buffer": "#a8dadc",
    "learner": "#1d3557",
    "other": "#cccccc",
}
_MORE_COLOURS = ("#6d597a", "#b56576", "#355070", "#84a59d", "#f28482")


def plot_reports(reports: Mapping[str, TimingReport], path: str | Path) -> None:
    """Draw one bar per report, and the distributions of their env steps.

    Args:
        reports: Reports by the name of their bar.
        path: File to write; the ending names the format.

    Raises:
        ImportError: matplotlib is missing.
        OSError: The file can't be written.
    """
    figure = new_figure(10, 1.9 + 0.5 * len(reports) + 2.4)
    heights = [1 + 0.5 * len(reports), 2.4]
    bars, times = figure.subplots(2, 1, height_ratios=heights)
    draw_shares(bars, reports)
    _draw_times(times, reports)
    with whole_file(path) as aside:
        figure.savefig(aside, dpi=130)


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure; sizes in inches.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install vecenv[plots]") from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_shares(axes: Any, reports: Mapping[str, TimingReport]) -> None:
    """Draw one stacked bar per report into matplotlib axes."""
    names = list(dict.fromkeys(name for report in reports.values() for name in report.shares))
    names = [name for name in names if any(r.shares.get(name, 0.0) for r in reports.values())]
    more = iter(_MORE_COLOURS * len(names))
    labels = [
        f"{title}\n{report.steps_per_second:,.0f} steps/s" for title, report in reports.items()
    ]
    left = np.zeros(len(reports))
    for name in names:
        widths = np.array([100 * report.shares.get(name, 0.0) for report in reports.values()])
        colour = _COLOURS.get(name) or next(more)
        axes.barh(labels, widths, left=left, color=colour, label=name)
        for row, width in enumerate(widths):
            if width >= 6:
                middle = left[row] + width / 2
                axes.text(middle, row, f"{width:.0f} %", ha="center", va="center", fontsize=9)
        left += widths
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of wall time (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _draw_times(axes: Any, reports: Mapping[str, TimingReport]) -> None:
    stamped = {title: r.durations_ns / 1e6 for title, r in reports.items() if len(r.durations_ns)}
    if not stamped:
        axes.set_axis_off()
        return
    lowest = max(min(float(times.min()) for times in stamped.values()), 1e-5)
    highest = max(float(times.max()) for times in stamped.values())
    edges = np.geomspace(lowest * 0.9, highest * 1.1, 60)
    for title, times in stamped.items():
        weights = np.full(len(times), 100 / len(times))
        axes.hist(times, edges, weights=weights, histtype="step", linewidth=1.6, label=title)
    axes.set_xscale("log")
    axes.set_xlabel("length of an env step (ms)")
    axes.set_ylabel("steps (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
