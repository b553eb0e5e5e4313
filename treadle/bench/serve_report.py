"""What a load on a server gave: counts, percentiles, tables.

Counting rules. Tokens are those of the server's ``usage``; where it sends none, pieces of text are counted
instead, which are never more than its tokens, and ``no_usage`` says for how many requests. Tokens of failed
requests count nowhere, their time does. Prompt tokens that the server found in its cache are left out of
``total_tokens_per_s``: nobody computed them. Warm-up requests are in no number but ``warm_up``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from treadle.bench.report import markdown_table, percentile

if TYPE_CHECKING:
    from treadle.bench.serve import Exchange

_PERCENTILES = (50, 90, 99)


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds."""

    p50: float
    p90: float
    p99: float
    mean: float


class LevelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One load level against one server. See the module for what is counted."""

    url: str
    users: int | None  # closed loop
    rate: float | None  # open loop, conversations begun per second
    seconds: float  # first request sent to last answer ended
    warm_up: int  # requests before, in no other number
    requests: int  # failed ones included
    errors: int
    error_examples: list[str]
    short_answers: int  # that ended before the tokens they were asked for
    no_usage: int
    client_cpu: float  # CPU seconds of this load generator per second; near 1 it measures itself
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompt, without cached ones, and output
    user_tokens_per_s: float  # median over requests of tokens after the first per second
    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None
    ttft_by_turn: list[float]  # medians, first turn first

    @property
    def load(self) -> str:
        """``8 users`` or ``0.5 /s``."""
        return f"{self.users} users" if self.users is not None else f"{self.rate:g} /s"


@dataclass(frozen=True)
class Level:
    """What was done to a server, and how long it took; the exchanges make it a LevelReport."""

    url: str
    users: int | None
    rate: float | None
    seconds: float
    warm_up: int
    client_cpu: float


def summarise_level(level: Level, done: Sequence[Exchange]) -> LevelReport:
    """Percentiles and sums of one level."""
    good = [e for e in done if e.error is None]
    decoding = [
        (e.arrivals[-1] - e.arrivals[0], e.completion_tokens - 1) for e in good if e.completion_tokens > 1
    ]
    output = sum(e.completion_tokens for e in good)
    prompt = sum(e.prompt_tokens for e in good)
    cached = sum(e.cached_tokens for e in good)
    speeds = [tokens / span for span, tokens in decoding if span > 0]
    turns = range(max((e.turn + 1 for e in good), default=0))
    ttft = [[e.arrivals[0] - e.sent for e in good if e.turn == turn] for turn in turns]
    return LevelReport(
        url=level.url,
        users=level.users,
        rate=level.rate,
        seconds=level.seconds,
        warm_up=level.warm_up,
        requests=len(done),
        errors=len(done) - len(good),
        error_examples=sorted({e.error for e in done if e.error})[:5],
        short_answers=sum(e.completion_tokens < e.asked for e in good if e.has_usage),
        no_usage=sum(not e.has_usage for e in good),
        client_cpu=level.client_cpu,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=output,
        output_tokens_per_s=output / level.seconds,
        total_tokens_per_s=(prompt - cached + output) / level.seconds,
        user_tokens_per_s=percentile(speeds, 50) if speeds else 0.0,
        ttft=_percentiles([value for turn in ttft for value in turn]),
        itl=_percentiles([b - a for e in good for a, b in zip(e.arrivals, e.arrivals[1:], strict=False)]),
        tpot=_percentiles([span / tokens for span, tokens in decoding]),
        e2e=_percentiles([e.end - e.sent for e in good]),
        ttft_by_turn=[percentile(values, 50) for values in ttft if values],
    )


def _percentiles(values: list[float]) -> Percentiles | None:
    if not values:
        return None
    p50, p90, p99 = (percentile(values, percent) for percent in _PERCENTILES)
    return Percentiles(p50, p90, p99, sum(values) / len(values))


def level_line(report: LevelReport) -> str:
    """One run in a few words, for progress."""
    return (
        f"{report.load} on {report.url}: {report.total_tokens_per_s:.1f} token/s, "
        f"{report.errors} of {report.requests} requests failed"
    )


HEADERS = (
    "load",
    "server",
    "requests",
    "failed",
    "total token/s",
    "output token/s",
    "per user",
    "TTFT ms",
    "ITL ms",
    "TPOT ms",
    "E2E ms",
)


def level_rows(reports: Sequence[LevelReport]) -> list[tuple[str, ...]]:
    """The cells under ``HEADERS``, one row per run; milliseconds are p50 / p99."""

    def milliseconds(values: Percentiles | None) -> str:
        return f"{1000 * values.p50:.0f} / {1000 * values.p99:.0f}" if values else "-"

    return [
        (
            r.load,
            r.url,
            str(r.requests),
            str(r.errors),
            f"{r.total_tokens_per_s:.1f}",
            f"{r.output_tokens_per_s:.1f}",
            f"{r.user_tokens_per_s:.1f}",
            milliseconds(r.ttft),
            milliseconds(r.itl),
            milliseconds(r.tpot),
            milliseconds(r.e2e),
        )
        for r in reports
    ]


def serve_table(reports: Sequence[LevelReport]) -> str:
    """A Markdown table, one line per run."""
    return markdown_table(HEADERS, level_rows(reports))


def remarks(reports: Sequence[LevelReport]) -> list[str]:
    """What must be known to read the numbers: the rules of counting, and where a run was not as planned."""
    lines = [
        f"{sum(r.warm_up for r in reports)} warm-up requests before the runs are in no number.",
        "Milliseconds are p50 / p99. Total token/s: output and prompt tokens, those from a prefix cache left "
        "out. Failed requests add their time, but no tokens.",
    ]
    for r in reports:
        where = f"{r.load} on {r.url}"
        if r.errors:
            lines.append(f"{where}: {r.errors} of {r.requests} requests failed: {r.error_examples[0]}")
        if r.no_usage:
            lines.append(f"{where}: {r.no_usage} answers came without usage; their pieces were counted.")
        if r.short_answers:
            lines.append(f"{where}: {r.short_answers} answers are shorter than asked for.")
        if r.client_cpu > 0.7:
            lines.append(
                f"{where}: the load generator used {100 * r.client_cpu:.0f} % of a core; it may be the limit."
            )
    return lines


def compare_table(reports: Sequence[LevelReport], urls: tuple[str, str]) -> str:
    """How many times better the first server is at each load: medians over the repeats."""
    first, second = urls
    rows = []
    for load in dict.fromkeys(r.load for r in reports):
        pair = [[r for r in reports if r.url == url and r.load == load] for url in (first, second)]
        throughput = [percentile([r.total_tokens_per_s for r in runs], 50) for runs in pair]
        row = [load, _ratio(*throughput)]
        for name in ("ttft", "itl", "tpot", "e2e"):
            medians = [[value.p50 for r in runs if (value := getattr(r, name))] for runs in pair]
            a, b = (percentile(values, 50) if values else 0.0 for values in medians)
            row.append(_ratio(b, a))
        rows.append(row)
    return markdown_table((f"{first} against {second}", "total token/s", "TTFT", "ITL", "TPOT", "E2E"), rows)


def _ratio(better: float, worse: float) -> str:
    return f"{better / worse:.2f}x" if better and worse else "-"
