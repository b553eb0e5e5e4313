"""Medians with spread, percentiles and plain tables: what every benchmark prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class Summary(msgspec.Struct, frozen=True):
    """Repeats of one measurement. ``spread`` is half the quartiles' distance over the median."""

    median: float
    low: float
    high: float
    spread: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.4g} ±{100 * self.spread:.0f} %"


def summarise(values: Sequence[float]) -> Summary:
    """Raises ValueError for no values at all."""
    if not values:
        raise ValueError("nothing was measured")
    median = statistics.median(values)
    quarter = percentile(values, 75) - percentile(values, 25)
    return Summary(
        median=median,
        low=min(values),
        high=max(values),
        spread=quarter / 2 / abs(median) if median else 0.0,
        count=len(values),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks, as NumPy's default does."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table that also lines up in a terminal; the first column is text, the others numbers."""
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        padded = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])]) + "|"
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])
