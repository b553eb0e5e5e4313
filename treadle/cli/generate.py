"""``treadle generate``."""

from __future__ import annotations

import io
import sys
from typing import Any

import click

from treadle.cli.main import config_option, model_argument, settings
from treadle.config import Config
from treadle.core import TreadleError

_LOADING = ("threads", "context", "kv_dtype", "pack_cache", "pack_cache_size")


@click.command()
@model_argument
@click.option(
    "--prompt", "-p", "prompts", multiple=True, metavar="TEXT", help="Text to continue; - reads stdin."
)
@click.option(
    "--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Longest continuation."
)
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True, help="0: greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True)
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. Repeat for several.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per prompt with counts and times."
)
@settings(*_LOADING)
@config_option
def command(
    model: str | None,
    prompts: tuple[str, ...],
    as_json: bool,
    config_file: str | None,
    **options: Any,
) -> None:
    """Continue a text, without a chat template.

    Several --prompt options run together as one batch; their continuations are printed in order.

    \b
    treadle generate --prompt "Once upon a time" --max-tokens 64
    treadle generate model.gguf --json < prompt.txt

    Without --prompt the text comes from stdin, whose last line break is no part of it.
    """
    if not prompts and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("give a text with --prompt, or through a pipe")
    if "-" in (prompts or ("-",)):
        if sys.stdin is None:
            raise TreadleError("stdin is closed; give a text with --prompt")
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # bytes that are no text, as in `treadle chat`
    texts = [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in prompts or ("-",)]
    if not all(texts):
        raise TreadleError(
            "the prompt is empty; give at least one character, with --prompt or through a pipe"
        )
    loading = {name: options.pop(name) for name in _LOADING}
    config = Config.load({"model": model, **loading}, file=config_file)
    import msgspec

    from treadle.cli.loading import loaded
    from treadle.core import SamplingParams

    with loaded(config) as llm:
        for result in llm.generate(texts, SamplingParams(**options)):
            if as_json:
                record = {
                    "text": result.text,
                    "finish_reason": result.finish_reason,
                    "usage": result.usage,
                    "timing": result.timing,
                }
                click.echo(msgspec.json.encode(record).decode())
            else:
                click.echo(result.text)
