"""``treadle list``."""

from __future__ import annotations

import click


@click.command()
def command() -> None:
    """List the models that can be named, and which of them are on this machine."""
    from rich.console import Console
    from rich.table import Table

    from treadle import hub

    table = Table("NAME", "SIZE", "ON THIS MACHINE", box=None, pad_edge=False)
    for model in hub.list_models():
        table.add_row(model.name, f"{model.size / 1e6:.0f} MB", "yes" if model.path else "no")
    Console().print(table)
