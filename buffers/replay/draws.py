"""Draws and walks: from the numbers that can be drawn to rows, and from rows along links.

A draw takes `begin` and `end`, int64 (R,) each: the first number of each ring that can be drawn and
the one behind the last. They are on the device of the drawn rows; no draw waits for it.

On hosts a compiled function walks windows of several steps; on devices operations of torch walk all
rows of a batch at once. A walk stops at either flag, at a row without a link, and at a link to a
row that is not committed. Rewards are summed in float64.
"""

from __future__ import annotations

import operator
from typing import Literal

import numpy as np
import torch
from torch import Generator, Tensor

from buffers.core.kernels import njit, prefetch

__all__ = ["Draw", "draw", "draw_uniform", "find_windows", "find_windows_there"]

# All transitions equally likely; first a ring, then one of its transitions; or without repeats.
Draw = Literal["rows", "rings", "distinct"]
_FLAGS = "terminations", "truncations"


def draw(
    kind: Draw, begin: Tensor, end: Tensor, span: int, generator: Generator, rows: Tensor
) -> None:
    """Write drawn rows int64 (B,), of rings of `span` rows each."""
    if kind == "rows":
        draw_uniform(begin, end, span, generator, rows)
    elif kind == "distinct":
        _draw_distinct(begin, end, span, generator, rows)
    else:
        counts = end - begin
        ends = (counts > 0).cumsum(0)
        chosen = rows.random_(generator=generator).remainder_(ends[-1:])
        rings = torch.searchsorted(ends, chosen, right=True)
        rows.random_(generator=generator).remainder_(counts.index_select(0, rings))
        rows.add_(begin.index_select(0, rings)).remainder_(span).add_(rings, alpha=span)


def draw_uniform(begin: Tensor, end: Tensor, span: int, generator: Generator, rows: Tensor) -> None:
    """Write drawn rows int64 (B,); all are equally likely."""
    ends = (end - begin).cumsum(0)
    rows.random_(generator=generator).remainder_(ends[-1:])  # of 0 .. 2**63 - 1
    rings = torch.searchsorted(ends, rows, right=True)
    rows.sub_((ends - end).index_select(0, rings)).remainder_(span).add_(rings, alpha=span)


def _draw_distinct(
    begin: Tensor, end: Tensor, span: int, generator: Generator, rows: Tensor
) -> None:
    """Draw different rows: the rows with the largest of random keys."""
    places = torch.arange(span * len(begin), device=rows.device)
    keys = torch.rand(len(places), generator=generator, device=rows.device, dtype=torch.float64)
    rings = torch.div(places, span, rounding_mode="floor")
    age = (places - begin.index_select(0, rings)).remainder_(span)
    keys.masked_fill_(age >= (end - begin).index_select(0, rings), -1.0)  # rows that hold nothing
    rows.copy_(keys.topk(len(rows)).indices)  # sorted by key: a random order


@njit(nogil=True, cache=True)
def find_windows(columns, committed, span, lists, num_steps, gamma, written):
    """Sum rewards along windows of at most `num_steps`.

    Args:
        columns: Columns of all rows: rewards float32 (num_rows,); links int32, 0, or 1 + the next
            row, or above num_rows if there is no next row yet; terminations and truncations, bool.
        committed: int64 (R,), transitions ever added to each ring of `span` rows.
        lists: int64 (J, B): lists[0] are the first rows; lists[1] is written, the last rows.
        written: float32 (B,) each: discounted sums, and discounts: gamma ** m after m steps, 0 if
            the last step terminated.
    """
    rewards, links, terminations, truncations = columns
    sums, discounts = written
    rows, lasts = lists[0], lists[1]
    totals = np.empty(rows.shape[0])
    num_rows, factor = links.shape[0], 1.0
    stride, first, newest = rewards.strides[0], 0, (committed[0] - 1) % span
    for i in range(rows.shape[0]):
        lasts[i], totals[i] = rows[i], 0.0
        prefetch(rewards, rows[i] * stride)
    # Each step is taken for all windows before the next one, so that cache misses overlap.
    for step in range(num_steps):
        for i in range(rows.shape[0]):
            row = lasts[i]
            if row < 0:  # the window has ended
                continue
            totals[i] += factor * rewards[row]
            following = links[row] - 1
            is_over = terminations[row] or truncations[row] or step + 1 == num_steps
            if not is_over and 0 <= following < num_rows:
                if not first <= row < first + span:  # divide, which is slow, only if needed
                    first = row - row % span
                    newest = first + (committed[row // span] - 1) % span
                age, distance = newest - row, following - row
                age += span if age < 0 else 0
                distance += span if distance < 0 else 0
                if 0 < distance <= age:  # else the link is of an unfinished add
                    lasts[i] = following
                    prefetch(rewards, following * stride)
                    continue
            sums[i] = totals[i]
            discounts[i] = 0.0 if terminations[row] else factor * gamma
            lasts[i] = -1 - row
        factor *= gamma
    for i in range(rows.shape[0]):
        lasts[i] = -1 - lasts[i]


def find_windows_there(
    columns: dict[str, Tensor], rows: Tensor, num_steps: int, gamma: float, sums: Tensor,
    discounts: Tensor,
) -> Tensor:  # fmt: skip
    """Do what `find_windows` does by torch, with committed rows only; return last rows int64 (B,).

    Columns are views by name; sums and discounts float32 (B,) are written.
    """
    num_rows, factor = len(columns["link"]), 1.0
    total = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    goes_on = torch.ones(rows.shape, dtype=torch.bool, device=rows.device)
    power = total
    for step in range(num_steps):
        reward = columns["rewards"].index_select(0, rows).double()
        total = total + torch.where(goes_on, factor * reward, 0.0)
        factor *= gamma
        power = torch.where(goes_on, factor, power)
        if step + 1 < num_steps:
            link = columns["link"].index_select(0, rows).long()
            flags = (columns[name].index_select(0, rows) for name in _FLAGS)
            goes_on = goes_on & ~operator.or_(*flags) & (link > 0) & (link <= num_rows)
            rows = torch.where(goes_on, link - 1, rows)
    sums.copy_(total)
    discounts.copy_(torch.where(columns["terminations"].index_select(0, rows), 0.0, power))
    return rows
