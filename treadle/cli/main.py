"""The ``treadle`` command: finds subcommands, and turns every failure into one line and an exit code.

Exit codes: 0 success, 1 an error that Treadle explains, 2 wrong usage, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from treadle.config import Config
from treadle.core import TreadleError
from treadle.machine import require_isa

# name -> module under treadle.cli; each defines `command`
COMMANDS = {
    "chat": "chat",
    "generate": "generate",
    "serve": "serve",
    "pull": "pull",
    "list": "list_models",
    "key": "key",
    "bench": "bench",
    "eval": "eval",
}

F = TypeVar("F", bound=Callable[..., Any])


class Commands(click.Group):
    """A group that imports the module of a command when the command is used or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"treadle.cli.{COMMANDS[cmd_name]}")
        command: click.Command = module.command
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="treadle", prog_name="treadle")
def treadle() -> None:
    """Run open language models on the CPUs you own.

    \b
    treadle chat                        talk to the built-in model
    treadle serve                       OpenAI-compatible server on http://127.0.0.1:8000
    treadle pull smollm2:135m           fetch a model by name
    treadle COMMAND --help              everything about one command

    Every option can also be set in the environment (--kv-memory 4G is TREADLE_KV_MEMORY=4G) or in a TOML file
    (kv_memory = "4G" in ~/.config/treadle/config.toml, or in the file named by TREADLE_CONFIG). A flag wins
    over the environment, the environment over the file.
    """


def settings(*names: str) -> Callable[[F], F]:
    """Options for these fields of Config, with the help and the default written there. Values arrive
    unchecked."""
    by_name = {f.name: f for f in fields(Config)}

    def decorate(function: F) -> F:
        for name in reversed(names):
            spec = by_name[name]
            several = isinstance(spec.default, tuple)
            text = spec.metadata["help"]
            if spec.default not in (None, ()) and "Default" not in text:
                text += f"  [default: {_shown(name, spec.default)}]"
            option = click.option(
                "--" + name.replace("_", "-"),
                name,
                multiple=several,
                help=text,
                metavar=spec.metadata["metavar"],
            )
            function = option(function)
        return function

    return decorate


def model_argument(function: F) -> F:
    """The optional ``[MODEL]`` of most commands."""
    return click.argument("model", required=False)(function)


def config_option(function: F) -> F:
    """``--config FILE``."""
    return click.option("--config", "config_file", metavar="FILE", help="Read settings from this TOML file.")(
        function
    )


def _shown(name: str, value: Any) -> str:
    if name in ("max_body", "kv_spill_size", "pack_cache_size"):
        return f"{value // 2**30}G" if value % 2**30 == 0 else f"{value // 2**20}M"
    return f"{value:g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Entry point of the ``treadle`` script."""
    try:
        require_isa()  # before any command imports the native module
        code = treadle.main(standalone_mode=False)
    except TreadleError as error:
        code = _fail(str(error), 1)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help())
        code = 0
    except click.UsageError as error:
        hint = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
        code = _fail(error.format_message().rstrip(".") + hint, 2)
    except click.ClickException as error:
        code = _fail(error.format_message(), 1)
    except (KeyboardInterrupt, click.Abort):
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the final flush stays quiet
        code = 1
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a disk that is full would fail the final flush again
        where = error.filename or "input or output failed"
        code = _fail(f"{where}: {error.strerror or error}", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    click.echo("treadle: " + " ".join(message.split()), err=True)
    return code
