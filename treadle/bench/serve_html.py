"""The report of ``treadle bench serve`` as one HTML file: a table, and charts as SVG inside it. No scripts,
and nothing is fetched when it is read."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from html import escape

import leather

from treadle.bench.serve_report import HEADERS, LevelReport, Percentiles, level_rows, remarks

Value = Callable[[LevelReport], float | None]

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 82em; padding: 0 1em; color: #222 }
table { border-collapse: collapse }
td, th { padding: .3em .7em; text-align: right; border-bottom: 1px solid #ddd }
td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left; } tr.failed { background: #fde8e8; }
.charts { display: flex; flex-wrap: wrap; gap: 1em }
.charts svg { width: 36em; height: 24em; max-width: 100% }
"""
_WIDTH, _HEIGHT = 720, 480  # of a chart, in the units of its own drawing


def serve_html(title: str, facts: Sequence[str], reports: Sequence[LevelReport]) -> str:
    """The whole page. ``facts``: lines about workload and machine. Repeats are one row each in the table, and
    their median in the charts.
    """
    facts_list = "".join(f"<li>{escape(fact)}</li>" for fact in [*facts, *remarks(reports)])
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADERS)
    body = "".join(
        f"<tr{' class=failed' if report.errors else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for report, row in zip(reports, level_rows(reports), strict=True)
    )
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><ul>{facts_list}</ul>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f'<div class="charts">{"".join(_charts(reports))}</div></body></html>\n'
    )


def _charts(reports: Sequence[LevelReport]) -> list[str]:
    closed = [r for r in reports if r.users is not None]
    opened = [r for r in reports if r.rate is not None]
    charts = []
    for levels, axis in ((closed, "users"), (opened, "conversations begun per second")):
        if not levels:
            continue
        charts += [
            _chart("Total token/s", axis, levels, {"": lambda r: r.total_tokens_per_s}),
            _chart("Token/s of one user, median", axis, levels, {"": lambda r: r.user_tokens_per_s}),
            _chart("Time to first token, ms", axis, levels, _spread(lambda r: r.ttft)),
            _chart("Between two pieces of text (ITL), ms", axis, levels, _spread(lambda r: r.itl)),
            _chart("Per token after the first (TPOT), ms", axis, levels, _spread(lambda r: r.tpot)),
            _chart("Whole request (E2E), ms", axis, levels, _spread(lambda r: r.e2e)),
            _chart("Failed requests", axis, levels, {"": lambda r: float(r.errors)}),
        ]
    most = max((len(r.ttft_by_turn) for r in reports), default=0)
    if most > 1:
        charts.append(_turns(reports))
    return charts


def _spread(of: Callable[[LevelReport], Percentiles | None]) -> dict[str, Value]:
    def value(name: str) -> Value:
        return lambda r: None if (found := of(r)) is None else 1000 * float(getattr(found, name))

    return {" p50": value("p50"), " p99": value("p99")}


def _chart(title: str, axis: str, reports: Sequence[LevelReport], lines: dict[str, Value]) -> str:
    """One line per server and entry of ``lines``, over the load."""
    series = {}
    for url in dict.fromkeys(r.url for r in reports):
        for suffix, value in lines.items():
            by_load: dict[float, list[float]] = {}
            for r in reports:
                if r.url == url and (found := value(r)) is not None:
                    load = r.users if r.users is not None else r.rate
                    by_load.setdefault(float(load or 0), []).append(found)
            points = [(load, statistics.median(values)) for load, values in sorted(by_load.items())]
            series[_short(url) + suffix] = points
    return _draw(title, axis, series)


def _turns(reports: Sequence[LevelReport]) -> str:
    series = {
        f"{_short(r.url)}, {r.load}": [(float(i), 1000 * s) for i, s in enumerate(r.ttft_by_turn, 1)]
        for r in reports
    }
    return _draw("Time to first token by turn, median, ms", "turn", series)


def _draw(title: str, axis: str, series: dict[str, list[tuple[float, float]]]) -> str:
    chart = leather.Chart(title)
    series = {name: points for name, points in series.items() if points}
    xs = [x for points in series.values() for x, _ in points]
    if not xs:
        return ""
    chart.add_x_scale(0, max(xs))
    chart.add_y_scale(0, max(max(y for points in series.values() for _, y in points) * 1.05, 1e-9))
    loads = sorted(set(xs))
    chart.add_x_axis(ticks=loads, tick_formatter=lambda value, *_: f"{value:g}", name=axis)
    for name, points in series.items():
        if len(points) > 1:
            chart.add_line(points, name=name)
        else:
            chart.add_dots(points, name=name, radius=5)
    return str(chart.to_svg(width=_WIDTH, height=_HEIGHT))


def _short(url: str) -> str:
    return url.removeprefix("http://").removeprefix("https://").rstrip("/")
