"""``treadle pull``."""

from __future__ import annotations

import click


@click.command()
@click.argument("name")
def command(name: str) -> None:
    """Fetch the model NAME and keep it on this machine.

    The file is verified by SHA-256; a fetch that was interrupted continues where it stopped. `treadle list`
    shows the names.

    \b
    treadle pull smollm2:135m
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from treadle import hub

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    rate = (TransferSpeedColumn(), TimeRemainingColumn())
    fetched = False
    with Progress(*columns, *rate, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None)

        def progress(done: int, total: int) -> None:
            nonlocal fetched
            fetched = True
            bar.update(task, completed=done, total=total)

        path = hub.pull(name, progress=progress)
    click.echo(f"{name} is ready: {path}" if fetched else f"{name} was on this machine already: {path}")
