"""``treadle serve``."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import click

from treadle.cli.main import config_option, model_argument, settings
from treadle.config import Config

if TYPE_CHECKING:
    from treadle.server.service import Served, Service

FIRST_QUESTION = "What is the capital of France?"


@click.command()
@model_argument
@settings("host", "port", "api_key", "threads", "context", "kv_memory", "served_name")
@settings("reasoning_format", "cors_origin", "max_body", "keep_alive", "shutdown_timeout", "log_level")
@click.option("--first-answer", is_flag=True, help=f'Once ready, ask "{FIRST_QUESTION}" over HTTP and show the answer.')
@config_option
def command(model: str | None, first_answer: bool, config_file: str | None, **flags: Any) -> None:
    """Serve a model over the OpenAI API.

    MODEL is a .gguf file or a name known to `treadle list`; without it the built-in SmolLM2-135M-Instruct is served.
    The port answers at once: `GET /health` says loading, ready or failed, and until the model is ready the API
    answers 503 with Retry-After. Ctrl-C or SIGTERM lets running answers finish.

    Without an API key only programs on this machine are answered. To open the server to others:

    \b
    treadle serve --host 0.0.0.0 --api-key "$(openssl rand -hex 24)"

    \b
    GET  /health  /ready  /version  /metrics
    GET  /v1/models  /v1/models/NAME
    POST /v1/chat/completions  /v1/completions
    POST /tokenize  /detokenize
    """
    config = Config.load({**flags, "model": model}, file=config_file)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel("WARNING" if config.log_level == "info" else config.log_level.upper())
    from treadle.server.run import run

    async def load() -> Served:
        return await load_model(config)

    async def on_loaded(service: Service, url: str) -> None:
        announce(config, service.served(), url)
        if first_answer:
            await show_first_answer(config, service.served().name, url)

    click.echo(f"Loading {config.model or 'the built-in model'} ...", err=True)
    run(config, load, version(), on_loaded)
