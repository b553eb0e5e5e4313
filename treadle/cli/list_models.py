"""``treadle list``."""

from __future__ import annotations

import click


@click.command()
def command() -> None:
    """List the models that can be named, and which of them are on this machine."""
