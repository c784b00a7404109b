"""Draws: from the numbers that can be drawn and a random stream to rows.

Each takes the first number of each ring that can be drawn and the one behind the last, int64 (R,)
each, on the device of the rows that it returns; nothing waits for that.
"""

from __future__ import annotations

from typing import Literal

import torch

__all__ = ["Draw", "draw", "draw_uniform"]

# Which transitions: each equally likely, each ring and then one of its own, or all different.
Draw = Literal["rows", "rings", "distinct"]
_FEW_OF = 4  # times as many rows, from which on distinct ones are found without all rows
_MORE = 64  # rows drawn besides twice as many


def draw(
    kind: Draw,
    begin: torch.Tensor,
    end: torch.Tensor,
    span: int,
    generator: torch.Generator,
    rows: torch.Tensor,
    count: int,
) -> None:
    """Draw rows int64 (B,), written.

    Args:
        kind: See `Draw`.
        begin, end: See above.
        span: Rows of a ring.
        generator: Of the device.
        rows: See above.
        count: Transitions there are, where `kind` is "distinct"; 0 if only the device knows.
    """
    if kind == "rows":
        draw_uniform(begin, end, span, generator, rows)
    elif kind == "rings":
        _draw_by_ring(begin, end, span, generator, rows)
    else:
        _draw_distinct(begin, end, span, generator, rows, count)


def draw_uniform(
    begin: torch.Tensor,
    end: torch.Tensor,
    span: int,
    generator: torch.Generator,
    rows: torch.Tensor,
) -> None:
    """Draw rows int64 (B,), written: all equally likely."""
    rows.random_(generator=generator)  # 0 .. 2**63 - 1
    if len(begin) == 1:
        rows.remainder_(end - begin).add_(begin).remainder_(span)
        return
    ends = (end - begin).cumsum(0)
    rows.remainder_(ends[-1:])
    rings = torch.searchsorted(ends, rows, right=True)
    rows.sub_((ends - end).index_select(0, rings)).remainder_(span).add_(rings, alpha=span)


def _draw_by_ring(
    begin: torch.Tensor,
    end: torch.Tensor,
    span: int,
    generator: torch.Generator,
    rows: torch.Tensor,
) -> None:
    counts = end - begin
    ends = (counts > 0).cumsum(0)
    rings = torch.searchsorted(
        ends, rows.random_(generator=generator).remainder_(ends[-1:]), right=True
    )
    rows.random_(generator=generator).remainder_(counts.index_select(0, rings))
    rows.add_(begin.index_select(0, rings)).remainder_(span).add_(rings, alpha=span)


def _draw_distinct(
    begin: torch.Tensor,
    end: torch.Tensor,
    span: int,
    generator: torch.Generator,
    rows: torch.Tensor,
    count: int,
) -> None:
    """Draw different rows: of few the first ones that differ among more, else of all by keys."""
    size, device = len(rows), rows.device
    if count >= _FEW_OF * size:
        # Of twice as many, and some more, drawn from four times as many, enough are different but
        # with a probability below 2 ** -128.
        drawn = torch.empty(2 * size + _MORE, dtype=torch.int64, device=device)
        draw_uniform(begin, end, span, generator, drawn)
        found, places = drawn.sort(stable=True)
        is_again = torch.zeros_like(found, dtype=torch.bool)
        torch.eq(found[1:], found[:-1], out=is_again[1:])
        places.masked_fill_(is_again, len(drawn) - 1)  # behind all others
        torch.index_select(drawn, 0, places.sort().values[:size], out=rows)
        return
    num_rows = span * len(begin)
    keys = torch.rand(num_rows, generator=generator, device=device, dtype=torch.float64)
    places = torch.arange(num_rows, device=device)
    rings = torch.div(places, span, rounding_mode="floor")
    age = (places - begin.index_select(0, rings)).remainder_(span)
    is_live = age < (end - begin).index_select(0, rings)
    keys.masked_fill_(~is_live, -1.0)
    rows.copy_(keys.topk(size).indices)  # sorted, else the order is not random
