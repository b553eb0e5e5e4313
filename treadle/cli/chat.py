"""``treadle chat``."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, cast

import click

from treadle.cli.main import config_option, model_argument, settings
from treadle.config import Config
from treadle.core import TreadleError

if TYPE_CHECKING:
    from treadle import LLM
    from treadle.core import SamplingParams

_HELP = "/clear forgets the conversation, /bye ends (so does Ctrl-D), Ctrl-C stops an answer."


@click.command()
@model_argument
@click.option("--system", metavar="TEXT", help="System prompt that opens the conversation.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    help="0: greedy. Default: what the model's makers recommend.",
)
@click.option(
    "--top-p", type=click.FloatRange(0, 1, min_open=True), help="Default: what the model's makers recommend."
)
@click.option(
    "--max-tokens", type=click.IntRange(1), help="Longest answer. Default: until the context is full."
)
@click.option("--seed", type=int, help="Makes answers repeatable.")
@settings("threads", "context", "kv_dtype", "draft", "pack_cache", "pack_cache_size")
@config_option
def command(
    model: str | None,
    system: str | None,
    temperature: float | None,
    top_p: float | None,
    max_tokens: int | None,
    seed: int | None,
    config_file: str | None,
    **flags: Any,
) -> None:
    """Talk to a model in the terminal.

    MODEL is a .gguf file or a name known to `treadle list`; without it the built-in SmolLM2-135M-Instruct
    answers. The conversation so far is part of every question.

    \b
    /clear     forget the conversation
    /bye       end (so does Ctrl-D)
    Ctrl-C     stop the answer being written; at the prompt, clear the line

    Questions may also come from a pipe, one a line:

    \b
    echo "What is the capital of France?" | treadle chat
    """
    if sys.stdin is None:
        raise TreadleError("chat reads questions from standard input, which is closed; leave it open")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text must not end the conversation
    config = Config.load({**flags, "model": model}, file=config_file)
    import msgspec

    from treadle.cli.loading import loaded

    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    opening = [{"role": "system", "content": system}] if system else []
    with loaded(config) as llm:
        named = {key: value for key, value in given.items() if value is not None}
        params = msgspec.structs.replace(llm.recommended, **named)
        if sys.stdin.isatty():
            click.echo(_HELP, err=True)
        _converse(llm, params, opening)


def _converse(llm: LLM, params: SamplingParams, opening: list[dict[str, str]]) -> None:
    from treadle.engine.interfaces import BadRequest

    messages = list(opening)
    while True:
        try:
            question = _ask()
        except KeyboardInterrupt:
            click.echo(err=True)
            continue
        if question is None or question == "/bye":
            return
        if question == "/clear":
            messages = list(opening)
            click.echo("Conversation forgotten.", err=True)
        elif question.startswith("/"):
            click.echo(f"Unknown command {question.split()[0]}. {_HELP}", err=True)
        elif question:
            asked = [*messages, {"role": "user", "content": question}]
            try:
                messages = [*asked, {"role": "assistant", "content": _answer(llm, params, asked)}]
            except BadRequest as error:
                click.echo(f"treadle: {error}", err=True)
                click.echo("The question is dropped; /clear forgets the conversation so far.", err=True)


def _answer(llm: LLM, params: SamplingParams, messages: list[dict[str, str]]) -> str:
    """Stream one answer to the terminal; Ctrl-C keeps what was written so far."""
    pieces: list[str] = []
    with contextlib.suppress(KeyboardInterrupt):
        stream = cast("Generator[str]", llm.chat(messages, params, stream=True))
        with contextlib.closing(stream):
            for piece in stream:
                pieces.append(piece)
                click.echo(piece, nl=False)
    click.echo()
    return "".join(pieces)


def _ask() -> str | None:
    """One line from the user, stripped; None at the end of the input."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() history and editing)
        try:
            return input(">>> ").strip()
        except EOFError:
            click.echo()
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None
