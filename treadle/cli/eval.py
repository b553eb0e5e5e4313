"""``treadle eval``: how well a model predicts a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from treadle.cli.main import model_argument

if TYPE_CHECKING:
    from treadle.evaluation.run import Report
    from treadle.evaluation.scores import Progress

F = TypeVar("F", bound=Callable[..., Any])

_READING = (
    click.option(
        "--text",
        required=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="UTF-8 text to predict.",
    ),
    click.option(
        "--context", type=click.IntRange(2), help="Tokens read at once.  [default: 2048, or the model's]"
    ),
    click.option(
        "--stride",
        type=click.IntRange(1),
        help="How many of them are new, and predicted after the others.  [default: half of --context]",
    ),
    click.option("--tokens", type=click.IntRange(2), help="Use the first so many tokens of the text only."),
    click.option("--threads", type=click.IntRange(1), help="Worker threads.  [default: all usable cores]"),
)
_ACTIVATIONS = click.Choice(["auto", "int8", "float32"])
_KV_DTYPES = click.Choice(["bf16", "q8", "q4"])
_kv_dtype = click.option(
    "--kv-dtype", type=_KV_DTYPES, default="bf16", show_default=True, help="Numbers in the KV cache."
)
_activations = click.option(
    "--activations",
    type=_ACTIVATIONS,
    default="auto",
    show_default=True,
    help="auto: as in serving; int8: 8 bits also where serving takes 15; float32: not rounded.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def _reading(function: F) -> F:
    for option in reversed(_READING):
        function = option(function)
    return function


@click.group()
def command() -> None:
    """Measure how well a model predicts a text.

    \b
    treadle eval perplexity model.gguf --text book.txt
    treadle eval kl model.gguf --text book.txt                          rounding of activations
    treadle eval kl model-Q4_K_M.gguf --reference model-BF16.gguf --text book.txt

    Every token of the text is predicted once. Files of logits let other programs, machines and settings
    (TREADLE_ISA) be the reference.
    """


@command.command()
@model_argument
@_reading
@_kv_dtype
@_activations
@click.option(
    "--save-logits",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write all logits there (.npy, 4 bytes each), as a reference for `treadle eval kl`.",
)
@_json
def perplexity(
    model: str | None,
    kv_dtype: str,
    activations: str,
    save_logits: Path | None,
    as_json: bool,
    **reading: Any,
) -> None:
    """Perplexity of MODEL over a text, with its standard error."""
    from treadle.evaluation.run import Loading, Reading, measure_perplexity

    threads = reading.pop("threads")
    loading = Loading(model=model, threads=threads, kv_dtype=kv_dtype, activations=activations)
    with _Bar() as progress:
        report = measure_perplexity(loading, Reading(**reading), save_logits, progress)
    _print(report, as_json)


@command.command()
@model_argument
@click.option(
    "--reference",
    metavar="MODEL_OR_LOGITS",
    help="Another model, or a file of `treadle eval perplexity --save-logits`.  [default: MODEL itself]",
)
@_reading
@_kv_dtype
@_activations
@click.option(
    "--reference-kv-dtype",
    type=_KV_DTYPES,
    default="bf16",
    show_default=True,
    help="Numbers in the reference's KV cache.",
)
@click.option(
    "--reference-activations",
    type=_ACTIVATIONS,
    default="float32",
    show_default=True,
    help="Of the reference. float32 takes 4 bytes of memory per weight.",
)
@_json
def kl(
    model: str | None,
    reference: str | None,
    kv_dtype: str,
    activations: str,
    reference_kv_dtype: str,
    reference_activations: str,
    as_json: bool,
    **reading: Any,
) -> None:
    """Kullback-Leibler divergence of MODEL from a reference: how far its predictions are from those.

    Also how often both have the same most likely token, and both perplexities.
    """
    from treadle.evaluation.run import Loading, Reading, measure_divergence

    threads = reading.pop("threads")
    loading = Loading(model=model, threads=threads, kv_dtype=kv_dtype, activations=activations)
    base = Loading(
        model=model if reference is None else reference,
        threads=threads,
        kv_dtype=reference_kv_dtype,
        activations=reference_activations,
    )
    with _Bar() as progress:
        report = measure_divergence(loading, base, Reading(**reading), progress)
    _print(report, as_json)


class _Bar:
    """A progress bar on the error stream, if that is a terminal."""

    def __enter__(self) -> Progress:
        from rich.console import Console
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        self._bar = Bar(console=console, transient=True, disable=not console.is_terminal)
        self._bar.start()
        task = self._bar.add_task("reading", total=None)
        return lambda done, total: self._bar.update(task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _print(report: Report, as_json: bool) -> None:
    import msgspec

    from treadle.evaluation.tables import report_table

    click.echo(
        msgspec.json.format(msgspec.json.encode(report), indent=1) if as_json else report_table(report)
    )
