"""One promise, what was measured for it, and whether it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from treadle.bench.report import markdown_table


@dataclass(frozen=True)
class Bar:
    """``value`` must be at least ``least`` or at most ``most``; neither: it is only shown."""

    name: str
    value: float
    least: float | None = None
    most: float | None = None
    foreign: float | None = None  # share of all CPU time that other processes took meanwhile
    detail: dict[str, Any] = field(default_factory=dict)  # the numbers behind it

    @property
    def verdict(self) -> str:
        """``holds``, ``MISSED`` or nothing."""
        if self.least is None and self.most is None:
            return ""
        holds = (self.least is None or self.value >= self.least) and (
            self.most is None or self.value <= self.most
        )
        return "holds" if holds else "MISSED"

    @property
    def wanted(self) -> str:
        """The promise."""
        if self.least is not None:
            return f"at least {self.least:g}"
        return f"at most {self.most:g}" if self.most is not None else ""

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"verdict": self.verdict}


def table(bars: Sequence[Bar]) -> str:
    """A Markdown table."""
    rows = [
        (
            bar.name,
            f"{bar.value:.3g}",
            bar.wanted,
            bar.verdict,
            "" if bar.foreign is None else f"{100 * bar.foreign:.0f} %",
        )
        for bar in bars
    ]
    return markdown_table(("what", "measured", "promise", "", "CPU of others"), rows)
