"""Every promise about serving, measured side by side in one run: one table, one JSON file.

    python -m benchmarks.serving.run MODEL.gguf --llama-server llama.cpp/bin/llama-server --out result

users   20 users, prompts of 30 to 60 tokens, answers of 256: total token/s of Treadle, of llama-server, and
        of the engine without a server, all on the same prompts
long    one prompt of 8k tokens arrives among 16 running answers: what they notice
turns   the second turn of a conversation of 4k tokens, also after a restart with --kv-spill
copy    an answer that repeats its prompt, and free text, with and without speculation, one user
        (on --text-model: random weights do not copy)

Both servers get the same file and threads. Servers that run at the same time are asked in turns, A B A B. CPU
time that other processes take is shown with each result; on a busy machine only ratios mean anything, if they
do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.serving import speculation, turns, users
from benchmarks.serving.bars import Bar, table
from benchmarks.serving.long_prompt import long_prompt
from benchmarks.serving.servers import Programs, temporary_folder
from treadle import hub, machine
from treadle.bench.machine import cpu_model
from treadle.bench.provenance import provenance


@dataclass(frozen=True)
class Sizes:
    """How much is done. ``quick`` shows that everything works, and no more."""

    users: int = 20
    answer: int = 256
    rounds: int = 3
    decodes: int = 16
    long_prompt: int = 8000
    watch: float = 15.0  # seconds of undisturbed decoding before the long prompt
    conversation: int = 4000
    copies: int = 4


QUICK = Sizes(users=4, answer=24, rounds=1, decodes=3, long_prompt=600, watch=2.0, conversation=400, copies=1)

Measure = Callable[[], Coroutine[Any, Any, list[Bar]]]


def plan(programs: Programs, text: Programs, sizes: Sizes) -> dict[str, Measure]:
    """What can be measured, by name."""
    return {
        "users": lambda: users.twenty_users(programs, sizes.users, sizes.answer, sizes.rounds),
        "long": lambda: long_prompt(programs, sizes.decodes, sizes.long_prompt, sizes.watch),
        "turns": lambda: turns.second_turn(programs, sizes.conversation, sizes.rounds),
        "copy": lambda: speculation.copying(text, sizes.copies, sizes.rounds),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path, help="its path; without it only Treadle is measured")
    parser.add_argument("--text-model", help="a model that writes text, for `copy` [the built-in one]")
    parser.add_argument("--threads", type=int, default=len(machine.threads()))
    parser.add_argument("--only", default="users,long,turns,copy", help="which of them [%(default)s]")
    parser.add_argument("--quick", action="store_true", help="small counts: a test of the script")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    with temporary_folder() as folder:
        logs = Path(folder)
        programs = Programs(options.model, options.threads, options.llama_server, logs)
        text = Programs(Path(hub.resolve(options.text_model)), options.threads, None, logs)
        bars: list[Bar] = []
        measures = plan(programs, text, sizes)
        for name in options.only.split(","):
            if name not in measures:
                raise SystemExit(f"{name!r} is none of {', '.join(measures)}")
            print(f"# {name}", flush=True)
            bars += asyncio.run(measures[name]())
    title = f"{options.model.name}, {options.threads} threads, {cpu_model()}"
    if options.quick:
        title += ", QUICK: the numbers mean nothing"
    report = f"{title}\n\n{table(bars)}\n"
    print(report)
    if options.out:
        record = {
            "title": title,
            "model": options.model.name,
            "threads": options.threads,
            "run": msgspec.to_builtins(provenance()),
            "bars": [bar.record() for bar in bars],
        }
        write(options.out, report, record)


def write(out: Path, report: str, record: dict[str, Any]) -> None:
    """OUT.md and OUT.json."""
    out.with_suffix(".md").write_text(report, encoding="utf-8")
    out.with_suffix(".json").write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
