"""A comparison as a picture: rates, shares of the time, diversity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vecenv.compare.result import Case, Comparison
from vecenv.files import whole_file
from vecenv.timing.plot import draw_shares, new_figure

__all__ = ["check_picture", "plot_comparison"]

_COLOURS = {
    "loop": "#555555",
    "sync": "#2a9d8f",
    "async": "#457b9d",
    "async-first-ready": "#1d3557",
    "jit": "#e76f51",
    "gymnasium-sync": "#b7b7a4",
    "gymnasium-async": "#d4a373",
}
_ROW_INCHES = 0.27
_GAP = 0.5  # rows between numbers of envs


def check_picture(path: Path) -> None:
    """Refuse a path that no picture can be written to, before the work is done.

    Raises:
        ValueError: The ending names no known format.
        ImportError: matplotlib is missing.
    """
    known = new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"plot is {str(path)!r}, expected an ending of {', '.join(sorted(known))}")


def plot_comparison(comparison: Comparison, path: str | Path) -> None:
    """Draw a comparison into a file.

    Raises:
        ImportError: matplotlib is missing.
        OSError: The file can't be written.
    """
    measured = comparison.measured
    reports = {case.name: case.report for case in measured if case.report is not None}
    heights = [0.9 + _ROW_INCHES * len(measured)]
    heights += [0.9 + 1.5 * _ROW_INCHES * len(reports)] if reports else []
    heights += [1.9] if comparison.diversity else []
    figure = new_figure(10, sum(heights))
    parts = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    _draw_rates(next(parts).subplots(), comparison)
    if reports:
        draw_shares(next(parts).subplots(), reports)
    if comparison.diversity:
        _draw_diversity(next(parts), comparison)
    with whole_file(path) as aside:
        figure.savefig(aside, dpi=130)


def _draw_rates(axes: Any, comparison: Comparison) -> None:
    measured = comparison.measured
    groups = sorted({case.num_envs for case in measured if case.backend != "loop"})
    rows = []
    for number, case in enumerate(measured):
        row = number + _GAP * (0 if case.backend == "loop" else 1 + groups.index(case.num_envs))
        rows.append(row)
        rate = case.steps_per_second
        error = [[rate - min(case.rates)], [max(case.rates) - rate]]
        bar_style = {"ecolor": "#00000080", "capsize": 2}
        axes.barh(row, rate, color=_COLOURS[case.backend], xerr=error, error_kw=bar_style)
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        place = max(case.rates) * 1.06
        axes.text(place, row, _label(case), va="center", fontsize=8, bbox=behind)
    loop = next((case for case in measured if case.backend == "loop"), None)
    if loop is not None:
        axes.axvline(loop.steps_per_second, color=_COLOURS["loop"], linestyle="--", linewidth=1)
    axes.set_yticks(rows, [case.name for case in measured])
    axes.invert_yaxis()
    axes.set_xscale("log")
    left, right = axes.get_xlim()
    axes.set_xlim(left, right * 4)
    axes.set_xlabel("env steps per second (bar: all rounds, line: lowest to highest round)")
    axes.set_title(comparison.env, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)


def _label(case: Case) -> str:
    factor = "" if case.speed_up is None else f"   {case.speed_up:.3g} x loop"
    return f"{case.steps_per_second:,.0f}{factor if case.backend != 'loop' else ''}"


def _draw_diversity(figure: Any, comparison: Comparison) -> None:
    found = comparison.diversity
    measures = {
        "distinct states (%)": [100 * entry.distinct for entry in found],
        "distance to the\nnearest state (sd)": [entry.neighbour_distance for entry in found],
        "correlation within\na batch (ICC)": [entry.correlation for entry in found],
        "variance of the\npolicy gradient": [entry.gradient_variance for entry in found],
    }
    names = [str(entry.num_envs) for entry in found]
    for axes, (name, values) in zip(
        figure.subplots(1, len(measures)), measures.items(), strict=True
    ):
        errors = [entry.gradient_error or 0.0 for entry in found] if "variance" in name else None
        heights = [value or 0.0 for value in values]
        axes.bar(names, heights, yerr=errors, color="#8d99ae", width=0.6, ecolor="#00000080")
        for column, value in enumerate(values):
            label = "" if value is None else f"{value:.3g}"
            top = heights[column] + (errors[column] if errors else 0.0)
            axes.text(column, top, label, ha="center", va="bottom", fontsize=8)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("envs", fontsize=8)
        axes.margins(y=0.2)
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
