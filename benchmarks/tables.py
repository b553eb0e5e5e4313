"""Writes the tables of README.md and docs/performance.md from the results of real runs.

    python -m benchmarks.tables            rewrite them
    python -m benchmarks.tables --check    fail if one says something else than its results

To publish new numbers, put the JSON file that a benchmark wrote into benchmarks/results/ (or over an older
one there) and run this. Files come from

    benchmarks/peers/run.py --out          side by side with a peer
    benchmarks.serving.run --out           promises about serving
    treadle eval kl --json                 divergence from a reference

A table stands between two lines, `<!-- results: VIEW -->` and `<!-- end of results -->`. VIEW is one of
`VIEWS` below.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peers import run as peers
from benchmarks.serving import bars as serving
from treadle.bench.provenance import Provenance
from treadle.bench.report import markdown_table, summarise
from treadle.evaluation.run import Side
from treadle.evaluation.scores import Divergence

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/performance.md")
_BLOCK = re.compile(r"(<!-- results: (.*?) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)


class Wrong(Exception):
    """Results or a document that cannot be used; the text says which and why."""


@dataclass(frozen=True)
class Result:
    """One file of results."""

    path: Path
    kind: str  # peers, serving or accuracy
    content: dict[str, Any]
    run: Provenance

    def caption(self) -> str:
        """Model, machine, date, versions and command, in Markdown."""
        run = self.run
        versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
        machine = f"{run.cpu}, {run.cores} cores, {run.memory_gib:g} GiB, {run.system}"
        return f"{run.date[:10]}, {machine}; {versions}:\n\n```bash\n{run.command}\n```"


def read_results(folder: Path) -> list[Result]:
    """All files, by name. Raises Wrong."""
    return [_read(path) for path in sorted(folder.glob("*.json"))]


def _read(path: Path) -> Result:
    kinds = {"cases": "peers", "bars": "serving", "reference": "accuracy"}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind = next(kind for key, kind in kinds.items() if content.get(key))
        return Result(path, kind, content, msgspec.convert(content["run"], Provenance))
    except (ValueError, StopIteration, LookupError, AttributeError, TypeError) as error:
        raise Wrong(f"{path.name} is no result of a benchmark: {error!r}") from None


# ---------------------------------------------------------------------- views


def peers_tables(results: Sequence[Result]) -> str:
    """Every case of every comparison, with spread and noise."""
    parts = []
    for result in results:
        title = f"**{_model(result)}**, {result.content['threads']} threads"
        parts.append(f"{title}, {result.caption()}\n\n{peers.table(_measured(result), _peer(result))}")
    return "\n\n".join(parts)


def peers_summary(results: Sequence[Result]) -> str:
    """A row per model: our median and how many times the peer's it is; of several runs the newest."""
    newest: dict[str, dict[peers.Case, str]] = {}
    for result in sorted(results, key=lambda result: result.run.date):
        for entry in _measured(result):
            ours, peer = summarise(entry.ours).median, summarise(entry.peer).median
            newest.setdefault(_row(result), {})[entry.case] = f"{ours:.1f} ({ours / peer:.2f} ×)"
    cases = sorted({case for row in newest.values() for case in row}, key=_order)
    rows = [(model, *(row.get(case, "") for case in cases)) for model, row in sorted(newest.items())]
    return markdown_table(("token/s", *map(_in_words, cases)), rows)


def _order(case: peers.Case) -> tuple[bool, int, int]:
    return case.kind != "prefill", case.batch, case.tokens


def serving_tables(results: Sequence[Result]) -> str:
    """Every promise of every run."""
    parts = []
    for result in results:
        records = [{k: v for k, v in bar.items() if k != "verdict"} for bar in result.content["bars"]]
        table = serving.table([serving.Bar(**record) for record in records])
        title = f"**{_model(result)}**, {result.content['threads']} threads"
        parts.append(f"{title}, {result.caption()}\n\n{table}")
    return "\n\n".join(parts)


def accuracy_table(results: Sequence[Result]) -> str:
    """One line per divergence, and the commands."""
    rows = []
    for result in results:
        model, reference = (msgspec.convert(result.content[name], Side) for name in ("model", "reference"))
        found = msgspec.convert(result.content["result"], Divergence)
        rows.append(
            (
                f"{model.source.removesuffix('.gguf')}: {_difference(model, reference)}",
                result.content["context"],
                found.tokens,
                f"{found.kl.value:.2g} ± {found.kl.error:.1g}",
                f"{found.percentiles['99']:.2g}",
                f"{100 * found.top1.value:.1f} %",
                f"{found.perplexity.value:.3f}",
                f"{100 * (found.ratio.value - 1):+.2f} ± {100 * found.ratio.error:.2f} %",
            )
        )
    headers = ("model", "context", "tokens", "mean KL, nats", "99 % below", "same top token", "perplexity")
    commands = "\n".join(result.run.command for result in results)
    table = markdown_table((*headers, "that against the reference"), rows)
    return f"{table}\n\n```bash\n{commands}\n```"


VIEWS: dict[str, tuple[str, Callable[[Sequence[Result]], str]]] = {
    "peers": ("peers", peers_tables),
    "peers, summary": ("peers", peers_summary),
    "serving": ("serving", serving_tables),
    "accuracy": ("accuracy", accuracy_table),
}


def _model(result: Result) -> str:
    name = str(result.content["model"]).removesuffix(".gguf")
    isa = result.content.get("isa")
    return f"{name}, {isa} kernels" if isa else name


def _peer(result: Result) -> str:
    return next(name for name in result.run.versions if name != "treadle")


def _row(result: Result) -> str:
    peer = _peer(result)
    return _model(result) if peer == "llama.cpp" else f"{_model(result)}, {peer}"


def _measured(result: Result) -> list[peers.Measured]:
    cases = result.content["cases"]
    return [peers.Measured(**(entry | {"case": peers.Case(**entry["case"])})) for entry in cases]


def _in_words(case: peers.Case) -> str:
    if case.kind == "prefill":
        return f"prefill {case.tokens}"
    after = f" after {case.tokens} tokens" if case.tokens > 1 else ""
    return f"decode {case.batch} at once{after}" if case.batch > 1 else f"decode{after}"


def _difference(side: Side, other: Side) -> str:
    """In what they differ, as ``KV q8 instead of bf16``."""
    names = {"source": "", "activations": "activations ", "kv_dtype": "KV ", "isa": "kernels "}
    both = ((name, getattr(side, field), getattr(other, field)) for field, name in names.items())
    parts = [f"{name}{mine} instead of {theirs}" for name, mine, theirs in both if None is not theirs != mine]
    return ", ".join(parts) or "repeated"


# ---------------------------------------------------------------------- documents


def rewrite(text: str, results: Sequence[Result], name: str) -> tuple[str, set[str]]:
    """The document with its tables from the results, and the kinds that it shows. Raises Wrong."""
    shown: set[str] = set()

    def table(block: re.Match[str]) -> str:
        if block[2] not in VIEWS:
            raise Wrong(f"{name}: there are no results {block[2]!r}; there are {', '.join(VIEWS)}")
        kind, view = VIEWS[block[2]]
        shown.add(kind)
        chosen = [result for result in results if result.kind == kind]
        return f"{block[1]}\n{view(chosen) if chosen else 'Not measured yet.'}\n\n{block[4]}"

    found = _BLOCK.sub(table, text)
    begins, ends = text.count("<!-- results:"), text.count("<!-- end of results -->")
    if not begins == ends == len(_BLOCK.findall(text)):
        raise Wrong(f"{name}: {begins} tables begin and {ends} end")
    return found, shown


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would change")
    options = parser.parse_args()
    stale = []
    shown: set[str] = set()
    try:
        results = read_results(ROOT / "benchmarks" / "results")
        for name in DOCUMENTS:
            path = ROOT / name
            text = path.read_text(encoding="utf-8")
            new, kinds = rewrite(text, results, name)
            shown |= kinds
            if new != text:
                stale.append(name)
                if not options.check:
                    path.write_text(new, encoding="utf-8")
        for result in results:
            if result.kind not in shown:
                raise Wrong(f"{result.path.name}: no document has a table of {result.kind} results")
    except Wrong as wrong:
        raise SystemExit(str(wrong)) from None
    if stale and options.check:
        raise SystemExit(
            f"tables in {', '.join(stale)} differ from benchmarks/results; run python -m benchmarks.tables"
        )
    print(f"{len(results)} results; {'rewritten: ' + ', '.join(stale) if stale else 'all tables are theirs'}")


if __name__ == "__main__":
    main()
