"""Treadle runs open language models on CPUs.

    from treadle import LLM, SamplingParams

    with LLM() as llm:
        print(llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))[0].text)

Both names are imported when first used, so that importing this package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.core import SamplingParams
    from treadle.llm import LLM

__all__ = ["LLM", "SamplingParams"]

_HOME = {"LLM": "treadle.llm", "SamplingParams": "treadle.core"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
