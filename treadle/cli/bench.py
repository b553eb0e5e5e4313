"""``treadle bench``: measures the machine, the engine, and any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from treadle.bench.mixtures import MIXTURES
from treadle.bench.shapes import SHAPES, find_shape


class Numbers(click.ParamType[tuple[Any, ...]]):
    """``1,4,8``: positive numbers; an empty text means none."""

    name = "N,N,…"

    def __init__(self, kind: type[int | float], zero: bool = False) -> None:
        self._kind, self._zero = kind, zero

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(self._kind(part) for part in value.split(",") if part.strip())
        except ValueError:
            self.fail(f"{value!r} is no list of numbers; write for example 1,4,8", param, ctx)
        if any(number < 0 or (number == 0 and not self._zero) for number in numbers):
            self.fail(f"{value!r} has a number below {0 if self._zero else 1}", param, ctx)
        return numbers


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
threads_option = click.option(
    "--threads", type=click.IntRange(1), help="Worker threads.  [default: all usable cores]"
)
model_argument = click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))


def _print_json(report: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(report), indent=1))


@click.group()
def command() -> None:
    """Measure: the machine, the kernels, the engine, a server.

    \b
    treadle bench machine                       read bandwidth and arithmetic peaks
    treadle bench offline [MODEL]               prefill and decode speed of a model
    treadle bench serve --users 1,8,20          load on a running server
    treadle bench synth qwen3-8b Q4_K_M X.gguf  a file with random weights to measure on
    """


@command.command()
@threads_option
@json_option
def machine(threads: int | None, as_json: bool) -> None:
    """Read bandwidth with 1 to N threads, and arithmetic peaks of every ISA up to TREADLE_ISA."""
    from treadle.bench.machine import machine_table, measure_machine

    report = measure_machine(threads)
    if as_json:
        _print_json(report)
    else:
        click.echo(machine_table(report))


@command.command()
@model_argument
@threads_option
@click.option(
    "--rows", type=Numbers(int), default="1,2,4,8,16,20,32,64,128,512", show_default=True, help="Tokens, M."
)
@json_option
def kernel(model: Path, threads: int | None, rows: tuple[int, ...], as_json: bool) -> None:
    """Every distinct linear layer of MODEL, a GGUF file, at several numbers of tokens."""
    from treadle.bench.kernel import kernel_table, measure_kernels

    report = measure_kernels(model, threads, rows)
    if as_json:
        _print_json(report)
    else:
        click.echo(kernel_table(report))


@command.command()
@click.argument("model", required=False)
@threads_option
@click.option(
    "--prefill", type=Numbers(int), default="128,512,2048,8192", show_default=True, help="Prompt lengths."
)
@click.option(
    "--context",
    type=Numbers(int, zero=True),
    default="0,2048,8192",
    show_default=True,
    help="Tokens that each decoding sequence already has.",
)
@click.option(
    "--batch",
    type=Numbers(int),
    default="1,4,8,20,32",
    show_default=True,
    help="Sequences decoding together; those above the smallest run at the smallest context only.",
)
@click.option("--cross", is_flag=True, help="Run every batch at every context.")
@click.option("--steps", type=click.IntRange(2), default=32, show_default=True, help="Decode steps per case.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Prefills per case.")
@click.option(
    "--kv-dtype",
    type=click.Choice(["bf16", "q8", "q4"]),
    default="bf16",
    show_default=True,
    help="Numbers in the KV cache.",
)
@json_option
def offline(model: str | None, threads: int | None, kv_dtype: str, as_json: bool, **cases: Any) -> None:
    """Prefill and decode token/s of MODEL, and their share of what this machine allows.

    MODEL is a .gguf file or a name known to `treadle list`; without it the built-in model is measured.
    """
    from treadle import hub
    from treadle.bench.offline import OfflinePlan, measure_offline, offline_table, result_line

    plan = OfflinePlan(
        cases["prefill"], cases["context"], cases["batch"], cases["cross"], cases["steps"], cases["repeats"]
    )
    path = Path(hub.resolve(model))
    report = measure_offline(
        path, threads, plan, lambda result: click.echo(result_line(result), err=True), kv_dtype
    )
    if as_json:
        _print_json(report)
    else:
        click.echo(offline_table(report.results))


@command.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
@click.option("--compare", nargs=2, metavar="URL_A URL_B", help="Two servers, measured alternately.")
@click.option("--model", help="Model id to ask for.  [default: the server's first]")
@click.option("--key", envvar="OPENAI_API_KEY", help="API key; also from OPENAI_API_KEY.")
@click.option(
    "--users",
    type=Numbers(int),
    default="1,4,8,20,32",
    show_default=True,
    help="Closed loop: this many users, each asking again once it has its answer.",
)
@click.option(
    "--rate", type=Numbers(float), default="", help="Open loop: conversations per second (Poisson)."
)
@click.option(
    "--seconds", type=click.FloatRange(1), default=60.0, show_default=True, help="Time per open-loop rate."
)
@click.option(
    "--conversations", type=click.IntRange(1), default=3, show_default=True, help="Per closed-loop user."
)
@click.option(
    "--prompt",
    default="30-60",
    show_default=True,
    help="Tokens per question: 256, 30-60 or lognormal:200,0.8 (median, sigma).",
)
@click.option("--answer", default="256", show_default=True, help="Tokens per answer, likewise.")
@click.option(
    "--shared-prefix",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Tokens of a system message common to all requests.",
)
@click.option(
    "--turns", type=click.IntRange(1), default=1, show_default=True, help="Questions per conversation."
)
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Runs of every load.")
@json_option
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write a report with charts there."
)
def serve(
    compare: tuple[str, str] | None,
    model: str | None,
    key: str | None,
    as_json: bool,
    html: Path | None,
    **load: Any,
) -> None:
    """Load on an OpenAI-compatible server, ours or another: TTFT, ITL, TPOT, E2E and token/s.

    \b
    TTFT  request sent to first text         ITL  between two pieces of text
    TPOT  first to last text, per token      E2E  request sent to end of stream

    Before every load some short requests warm the server up; they are in no number. Tokens are counted by the
    server's usage, failed requests are shown and give none.
    """
    from treadle.bench.serve import Plan, Target, first_model, run_plan
    from treadle.bench.serve_report import compare_table, level_line, remarks, serve_table
    from treadle.bench.workload import Length, Workload

    lengths = Length.parse(load["prompt"]), Length.parse(load["answer"])
    workload = Workload(*lengths, load["shared_prefix"], load["turns"])
    plan = Plan(load["users"], load["rate"], load["conversations"], load["seconds"], load["repeats"])

    async def run() -> list[Any]:
        urls = compare or (load["url"],)
        targets = [Target(url, model or await first_model(url, key), key) for url in urls]
        return await run_plan(
            targets, workload, plan, lambda report: click.echo(level_line(report), err=True)
        )

    reports = asyncio.run(run())
    facts = load_facts(load)
    if html:
        from treadle.bench.serve_html import serve_html

        html.write_text(serve_html("Load on a server", facts, reports), encoding="utf-8")
    if as_json:
        _print_json({"facts": facts, "runs": reports})
        return
    click.echo(serve_table(reports))
    if compare:
        click.echo("\n" + compare_table(reports, compare))
    click.echo("\n" + "\n".join(remarks(reports)))


def load_facts(load: dict[str, Any]) -> list[str]:
    """The workload in words, and when and where it ran."""
    from treadle.bench.machine import cpu_model

    now = datetime.datetime.now().astimezone()
    return [
        f"Questions of {load['prompt']} tokens, answers of {load['answer']}, {load['turns']} turns per "
        f"conversation, {load['shared_prefix']} tokens of system message shared by all, temperature 0.",
        f"{now:%Y-%m-%d %H:%M %Z}, load generated on {cpu_model()}.",
    ]


@command.command(epilog=f"Shapes: {', '.join(SHAPES)}. Quantisations: {', '.join(MIXTURES)}.")
@click.argument("shape")
@click.argument("quant")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same file.")
def synth(shape: str, quant: str, out: Path, seed: int) -> None:
    """Write OUT: a GGUF file with random weights of a published model's SHAPE, quantised as QUANT."""
    from treadle.bench.synth import write_synthetic

    size = write_synthetic(find_shape(shape), quant, out, seed)
    click.echo(f"{out}: {size / 1e9:.2f} GB")
