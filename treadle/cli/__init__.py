"""The command line: ``treadle COMMAND``. One file per command, imported only when it is needed."""

from __future__ import annotations

from treadle.cli.main import main

__all__ = ["main"]
