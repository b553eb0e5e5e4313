"""``treadle serve``."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import shlex
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.cli.main import config_option, settings
from treadle.config import Config

if TYPE_CHECKING:
    from treadle.server.service import Served, Service

FIRST_QUESTION = "What is the capital of France?"


@click.command()
@click.argument("model", metavar="[[NAME=]MODEL]...", nargs=-1)
@settings("host", "port", "api_key", "threads", "cpu_share", "context", "kv_memory", "kv_dtype")
@settings("kv_spill", "kv_spill_size", "pack_cache", "pack_cache_size")
@settings("target_itl", "idle_unload", "load_timeout", "engine_timeout")
@settings(
    "max_queue",
    "speculation",
    "draft",
    "reasoning_format",
    "cors_origin",
    "max_body",
    "keep_alive",
    "shutdown_timeout",
    "log_format",
    "log_level",
)
@settings("data_dir", "tls_cert", "tls_key", "root_path", "trusted_proxies")
@click.option(
    "--first-answer", is_flag=True, help=f'Once ready, ask "{FIRST_QUESTION}" over HTTP and show the answer.'
)
@config_option
def command(model: tuple[str, ...], first_answer: bool, config_file: str | None, **flags: Any) -> None:
    """Serve models over the APIs of OpenAI and Anthropic.

    MODEL is a .gguf file or a name known to `treadle list`; without it the built-in SmolLM2-135M-Instruct is
    served. NAME= chooses what the API calls it. Several models are loaded as far as they fit into memory
    together; the others are loaded when they are asked for, in place of those not used for longest.

    The port answers at once: `GET /health` says loading, ready or failed, and until a model is there the API
    answers 503 with Retry-After. Ctrl-C or SIGTERM lets running answers finish.

    Without an API key only programs on this machine are answered. To open the server to others:

    \b
    treadle serve --host 0.0.0.0    the first key is made and put into a file, which is named
    treadle key create alice        one more, also while the server runs; see `treadle key --help`

    \b
    GET  /health  /ready  /version  /metrics  /openapi.json
    GET  /v1/models  /v1/models/NAME
    POST /v1/chat/completions  /v1/completions  /v1/embeddings
    POST /v1/responses  /v1/messages  /v1/messages/count_tokens
    POST /tokenize  /detokenize
    """
    config = Config.load({**flags, "model": model}, file=config_file)
    from treadle import hub
    from treadle.cli.load import split_name
    from treadle.server.log import configure
    from treadle.server.run import run

    async def load() -> list[Served]:
        from treadle.cli.load import load_models

        return await load_models(config)

    async def on_loaded(service: Service, local: str, url: str) -> None:
        for served in service.models:
            click.echo(f"Ready: {served.name} on {url}  ({served.engine.summary})")
        name = service.models[0].name
        if first_answer:
            click.echo(f"\nYou:     {FIRST_QUESTION}\nTreadle: ", nl=False)
            await asyncio.to_thread(ask, local, name, service.own_key)
        click.echo(first_steps(url, name, service.needs_key, source))

    configure(config.log_level, config.log_format)
    named = [split_name(model) for model in config.model]
    source = named[0][1] if named else None
    for _, path in named + [split_name(draft) for draft in config.draft]:
        hub.check(path)
    click.echo(f"Loading {', '.join(config.model) or 'the built-in model'} ...")
    run(config, load, installed_version(), on_loaded)


def installed_version() -> str:
    """Version of the installed distribution; a source tree that was never installed has none."""
    try:
        return importlib.metadata.version("treadle")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def first_steps(url: str, model: str, needs_key: bool, source: str | None = None) -> str:
    """What to do once the server is ready. ``source``: what the model was called on the command line."""
    key = ' -H "Authorization: Bearer YOUR_KEY"' if needs_key else ""
    keyed = ", API key YOUR_KEY" if needs_key else ""
    chat = " ".join([program(), "chat", *([shlex.quote(source)] if source else [])])
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    return f"""
Ask from a shell:
  curl {url}/v1/chat/completions{key} -H "Content-Type: application/json" -d '{body}'
Use it from any OpenAI client: base URL {url}/v1, model {model}{keyed}
Talk in the terminal:  {chat}  (loads its own copy of the model)
Stop with Ctrl-C."""


def program() -> str:
    """What to write in a shell to call the program that is running."""
    if shutil.which("treadle"):
        return "treadle"
    if Path(sys.argv[0]).name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m treadle.cli"
    return shlex.quote(sys.argv[0])


def ask(url: str, model: str, key: str | None) -> None:
    """Send the first question over HTTP and write the answer to the terminal as it comes."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": FIRST_QUESTION}],
        "temperature": 0,
        "max_completion_tokens": 64,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=600) as response:  # noqa: S310
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    click.echo(f"[{event['error']['message']}]", nl=False)
                for choice in event.get("choices", ()):
                    click.echo(choice["delta"].get("content") or "", nl=False)
        click.echo()
    except urllib.error.URLError as error:
        click.echo(f"[no answer: {error.reason}]")
