"""One module per architecture, named as GGUF's ``general.architecture``, with a function ``build(graph)``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import cast

from treadle.core import TreadleError
from treadle.models.graph import Graph

_SHARED = {"config", "graph", "rope"}


def architectures() -> list[str]:
    """Every architecture there is a model file for."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _SHARED)


def builder(architecture: str) -> Callable[[Graph], None]:
    """The build function of an architecture. Raises TreadleError listing the known ones."""
    if architecture not in architectures():
        raise TreadleError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(architectures())}"
        )
    module = importlib.import_module(f"treadle.models.{architecture}")
    return cast(Callable[[Graph], None], module.build)
