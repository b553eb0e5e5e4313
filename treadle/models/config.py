"""Hyper-parameters of a model, read from GGUF metadata and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from treadle.core import TreadleError
from treadle.weights.gguf import GgufModelFile

# Values of ``pooling_type`` in GGUF files
_NO_POOLING = 0
_LAST_TOKEN = 3
_OTHER_POOLING = {1: "mean of all tokens", 2: "first token", 4: "score of a reranker"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every dense decoder has (GGUF keys without the architecture's prefix)."""

    layers: int  # block_count
    hidden: int  # embedding_length
    feed_forward: int  # feed_forward_length
    heads: int  # attention.head_count
    kv_heads: int  # attention.head_count_kv
    head_dim: int  # attention.key_length, or hidden / heads
    eps: float  # attention.layer_norm_rms_epsilon
    context: int  # context_length: tokens the model was trained for

    def outputs(self, role: str) -> int:
        """Outputs of a layer's matrix, by the last part of its name."""
        return {
            "attn_q": self.heads * self.head_dim,
            "attn_k": self.kv_heads * self.head_dim,
            "attn_v": self.kv_heads * self.head_dim,
            "attn_output": self.hidden,
            "ffn_gate": self.feed_forward,
            "ffn_up": self.feed_forward,
            "ffn_down": self.hidden,
        }[role]


def read_config(file: GgufModelFile) -> ModelConfig:
    """The shared hyper-parameters. Raises TreadleError naming a key that is absent or impossible."""
    hidden = bounded(file, "embedding_length", 16, 2**20)
    heads = bounded(file, "attention.head_count", 1, 2**12)
    kv_heads = bounded(file, "attention.head_count_kv", 1, heads, heads)
    if heads % kv_heads:
        raise TreadleError(
            f"{file.path}: attention.head_count is {heads}, which is no multiple of the {kv_heads} of "
            "attention.head_count_kv"
        )
    if file.int("attention.key_length", 0) == 0 and hidden % heads:
        raise TreadleError(
            f"{file.path}: embedding_length is {hidden}, which is no multiple of the {heads} of "
            "attention.head_count"
        )
    head_dim = bounded(file, "attention.key_length", 16, 256, hidden // heads)
    if head_dim % 16:
        raise TreadleError(
            f"{file.path}: heads of {head_dim} values (attention.key_length, or embedding_length divided by "
            "attention.head_count); supported are multiples of 16 up to 256"
        )
    return ModelConfig(
        layers=bounded(file, "block_count", 1, 2**12),
        hidden=hidden,
        feed_forward=bounded(file, "feed_forward_length", 1, 2**22),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=positive(file, "attention.layer_norm_rms_epsilon"),
        context=bounded(file, "context_length", 1, 2**31 - 1),
    )


def embeds(file: GgufModelFile) -> bool:
    """Whether the model makes an embedding of a text, that of its last token, instead of continuing it.
    Raises TreadleError for other ways of pooling.
    """
    pooling = file.int("pooling_type", _NO_POOLING)
    if pooling in (_NO_POOLING, _LAST_TOKEN):
        return pooling == _LAST_TOKEN
    name = _OTHER_POOLING.get(pooling, "unknown")
    raise TreadleError(
        f"{file.path}: pooling_type is {pooling} ({name}); Treadle serves embedding models that take the "
        f"last token ({_LAST_TOKEN})"
    )


def bounded(file: GgufModelFile, key: str, low: int, high: int, default: int | None = None) -> int:
    """A whole number from ``low`` to ``high``."""
    value = file.int(key) if default is None else file.int(key, default)
    if not low <= value <= high:
        raise TreadleError(f"{file.path}: {key} is {value}; it must be from {low} to {high}")
    return value


def positive(file: GgufModelFile, key: str, default: float | None = None) -> float:
    """A finite number above zero."""
    value = file.float(key) if default is None else file.float(key, default)
    if not (math.isfinite(value) and value > 0):
        raise TreadleError(f"{file.path}: {key} is {value}; it must be a finite number above 0")
    return value
