"""The model of a terminal command, with a progress bar while its weights are packed."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from treadle import LLM
from treadle.config import Config
from treadle.core import TreadleError


def loaded(config: Config) -> LLM:
    """Load the model that the settings name. The bar is drawn on the error stream if that is a terminal."""
    if len(config.draft) > 1:
        raise TreadleError(f"--draft is given {len(config.draft)} times; one model has one draft model")
    console = Console(stderr=True)
    columns = (TextColumn("loading"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("weights", total=1.0)
        return LLM(
            next(iter(config.model), None),
            threads=config.threads,
            context=config.context,
            kv_dtype=config.kv_dtype,
            draft=next(iter(config.draft), None),
            pack_cache=config.pack_cache,
            pack_cache_size=config.pack_cache_size,
            progress=lambda share: bar.update(task, completed=share),
        )
