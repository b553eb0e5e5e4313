"""Published shapes of the models that speed is measured on (from each model's ``config.json``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from treadle.core import TreadleError

Family = Literal["deepseek-r1-qwen", "qwen2", "qwen3", "llama3", "smollm2"]


@dataclass(frozen=True)
class Shape:
    """Everything a GGUF says about a dense decoder, except the weights."""

    name: str
    family: Family
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    rope_base: float
    rms_eps: float
    head_dim: int = 128
    tied: bool = False  # the output matrix is the embedding matrix

    @property
    def architecture(self) -> str:
        """The value of ``general.architecture`` in a GGUF."""
        return {"deepseek-r1-qwen": "qwen2", "qwen2": "qwen2", "qwen3": "qwen3"}.get(self.family, "llama")


_ALL = (
    Shape("r1-distill-qwen-1.5b", "deepseek-r1-qwen", 28, 1536, 8960, 12, 2, 151936, 131072, 1e4, 1e-6),
    Shape("r1-distill-qwen-7b", "deepseek-r1-qwen", 28, 3584, 18944, 28, 4, 152064, 131072, 1e4, 1e-6),
    Shape("r1-distill-qwen-14b", "deepseek-r1-qwen", 48, 5120, 13824, 40, 8, 152064, 131072, 1e6, 1e-5),
    Shape("r1-distill-qwen-32b", "deepseek-r1-qwen", 64, 5120, 27648, 40, 8, 152064, 131072, 1e6, 1e-5),
    Shape("llama-8b", "llama3", 32, 4096, 14336, 32, 8, 128256, 131072, 5e5, 1e-5),
    Shape("llama-70b", "llama3", 80, 8192, 28672, 64, 8, 128256, 131072, 5e5, 1e-5),
    Shape("qwen3-8b", "qwen3", 36, 4096, 12288, 32, 8, 151936, 40960, 1e6, 1e-6),
    Shape("qwen3-32b", "qwen3", 64, 5120, 25600, 64, 8, 151936, 40960, 1e6, 1e-6),
    Shape("qwen2.5-1.5b", "qwen2", 28, 1536, 8960, 12, 2, 151936, 32768, 1e6, 1e-6, tied=True),
    Shape("smollm2-135m", "smollm2", 30, 576, 1536, 9, 3, 49152, 8192, 1e5, 1e-5, head_dim=64, tied=True),
)
SHAPES = {shape.name: shape for shape in _ALL}


def find_shape(name: str) -> Shape:
    """The shape called ``name``, upper or lower case. Raises TreadleError with the known names."""
    try:
        return SHAPES[name.lower()]
    except KeyError:
        known = ", ".join(SHAPES)
        raise TreadleError(f"no model shape is called {name!r}; the known ones are {known}") from None
