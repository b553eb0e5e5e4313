"""GGUF files with random weights at published shapes: speed tests without a download.

The file loads in any GGUF reader: hyper-parameters, a byte-level BPE tokenizer, a chat template and every
tensor are there. Tensor types are those of a real file (treadle.bench.mixtures), so bytes per token are too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.bench.blocks import BLOCK_TYPES, BlockType
from treadle.bench.gguf_writer import GgufWriter, TensorInfo, Value
from treadle.bench.mixtures import MIXTURES, LayerRule, Mixture
from treadle.bench.shapes import Shape
from treadle.bench.synth_tokenizer import tokenizer_metadata
from treadle.core import TreadleError

_CHUNK_BYTES = 32 << 20  # random bytes made at a time: bounds the memory used

_FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a synthetic file. ``rows`` is 1 for vectors; a row has ``cols`` values."""

    name: str
    rows: int
    cols: int
    block: BlockType
    fill: Callable[[Tensor, np.random.Generator], Iterator[NDArray[np.uint8]]]

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return self.rows * self.cols // self.block.values * self.block.nbytes


def _matrix(tensor: Tensor, rng: np.random.Generator) -> Iterator[NDArray[np.uint8]]:
    """Standard deviation 1/sqrt(cols): outputs are as large as the inputs."""
    blocks = tensor.nbytes // tensor.block.nbytes
    step = max(1, _CHUNK_BYTES // tensor.block.nbytes)
    for start in range(0, blocks, step):
        yield tensor.block.random(min(step, blocks - start), 1 / math.sqrt(tensor.cols), rng)


def _norm(tensor: Tensor, rng: np.random.Generator) -> Iterator[NDArray[np.uint8]]:
    yield rng.uniform(0.9, 1.1, tensor.cols).astype("<f4").view(np.uint8)


def _bias(tensor: Tensor, rng: np.random.Generator) -> Iterator[NDArray[np.uint8]]:
    yield (0.02 * rng.standard_normal(tensor.cols)).astype("<f4").view(np.uint8)


def _llama3_rope_factors(tensor: Tensor, _rng: np.random.Generator) -> Iterator[NDArray[np.uint8]]:
    """Frequency divisors of Llama 3.1's ``rope_scaling``: factor 8, low 1, high 4, original context 8192."""
    exponents = np.arange(tensor.cols) / tensor.cols
    wavelength = 2 * np.pi * 500000.0**exponents
    smooth = np.clip((8192 / wavelength - 1) / (4 - 1), 0, 1)
    yield (1 / (smooth + (1 - smooth) / 8)).astype("<f4").view(np.uint8)


def _fitting(type_name: str, cols: int) -> BlockType:
    """The type itself, or llama.cpp's substitute when rows are no whole number of its blocks."""
    if cols % BLOCK_TYPES[type_name].values:
        type_name = _FALLBACK.get(type_name, "F16")
    if cols % BLOCK_TYPES[type_name].values:
        type_name = "F16"
    return BLOCK_TYPES[type_name]


def _output_type(mixture: Mixture, cols: int) -> BlockType:
    """The output matrix, or the embedding matrix when it serves as output too."""
    if mixture.base not in ("F32", "F16", "BF16") and cols % BLOCK_TYPES[mixture.base].values:
        return _fitting("Q8_0", cols)
    return _fitting(mixture.output, cols)


def plan_tensors(shape: Shape, quant: str) -> list[Tensor]:
    """Every tensor of the file. Raises TreadleError for an unknown quantisation."""
    mixture = MIXTURES.get(quant.upper())
    if mixture is None:
        raise TreadleError(f"no quantisation is called {quant!r}; the known ones are {', '.join(MIXTURES)}")
    f32 = BLOCK_TYPES["F32"]
    hidden, heads_dim, kv_dim = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    embedding = _output_type(mixture, hidden) if shape.tied else _fitting(mixture.base, hidden)
    tensors = [Tensor("token_embd.weight", shape.vocab, hidden, embedding, _matrix)]
    if shape.family == "llama3":
        tensors.append(Tensor("rope_freqs.weight", 1, shape.head_dim // 2, f32, _llama3_rope_factors))
    for layer in range(shape.layers):
        at = f"blk.{layer}."
        value_type, down_type = _layer_types(mixture, shape, layer)
        rows_cols_type = {
            "attn_q": (heads_dim, hidden, mixture.base),
            "attn_k": (kv_dim, hidden, mixture.base),
            "attn_v": (kv_dim, hidden, value_type),
            "attn_output": (hidden, heads_dim, mixture.attn_output or mixture.base),
            "ffn_gate": (shape.intermediate, hidden, mixture.base),
            "ffn_up": (shape.intermediate, hidden, mixture.base),
            "ffn_down": (hidden, shape.intermediate, down_type),
        }
        for name, (rows, cols, type_name) in rows_cols_type.items():
            tensors.append(Tensor(f"{at}{name}.weight", rows, cols, _fitting(type_name, cols), _matrix))
        if shape.architecture == "qwen2":
            for name, width in (("attn_q", heads_dim), ("attn_k", kv_dim), ("attn_v", kv_dim)):
                tensors.append(Tensor(f"{at}{name}.bias", 1, width, f32, _bias))
        norms = [("attn_norm", hidden), ("ffn_norm", hidden)]
        if shape.architecture == "qwen3":
            norms += [("attn_q_norm", shape.head_dim), ("attn_k_norm", shape.head_dim)]
        tensors += [Tensor(f"{at}{name}.weight", 1, width, f32, _norm) for name, width in norms]
    tensors.append(Tensor("output_norm.weight", 1, hidden, f32, _norm))
    if not shape.tied:
        tensors.append(Tensor("output.weight", shape.vocab, hidden, _output_type(mixture, hidden), _matrix))
    return tensors


def _layer_types(mixture: Mixture, shape: Shape, layer: int) -> tuple[str, str]:
    """Types of ``attn_v`` and ``ffn_down`` in one layer."""

    def choose(exception: tuple[str, LayerRule], rest: str) -> str:
        name, rule = exception
        return name if rule(layer, shape.layers) else rest or mixture.base

    value = choose(mixture.attn_v, mixture.attn_v_rest)
    if shape.layers == 80 and value in ("Q3_K", "Q4_K"):  # llama.cpp's exception for 70B models
        value = "Q5_K"
    return value, choose(mixture.ffn_down, mixture.ffn_down_rest)


def _metadata(shape: Shape, quant: str) -> dict[str, Value]:
    arch = shape.architecture
    metadata: dict[str, Value] = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": f"{shape.name} (random weights)",
        f"{arch}.block_count": shape.layers,
        f"{arch}.context_length": shape.context,
        f"{arch}.embedding_length": shape.hidden,
        f"{arch}.feed_forward_length": shape.intermediate,
        f"{arch}.attention.head_count": shape.heads,
        f"{arch}.attention.head_count_kv": shape.kv_heads,
        f"{arch}.rope.freq_base": shape.rope_base,
        f"{arch}.attention.layer_norm_rms_epsilon": shape.rms_eps,
    }
    if arch == "llama":
        metadata |= {"llama.vocab_size": shape.vocab, "llama.rope.dimension_count": shape.head_dim}
    if arch == "qwen3":
        metadata |= {
            "qwen3.attention.key_length": shape.head_dim,
            "qwen3.attention.value_length": shape.head_dim,
        }
    metadata |= {"general.quantization_version": 2, "general.file_type": MIXTURES[quant.upper()].file_type}
    return metadata | tokenizer_metadata(shape)


def write_synthetic(shape: Shape, quant: str, path: Path, seed: int = 0) -> int:
    """Writes the file and returns its size in bytes. The same seed gives the same file.

    The file appears under its name only when it is complete.
    """
    tensors = plan_tensors(shape, quant)
    rng = np.random.Generator(np.random.SFC64(seed))
    infos = [
        TensorInfo(t.name, (t.cols,) if t.rows == 1 else (t.cols, t.rows), t.block.id, t.nbytes)
        for t in tensors
    ]
    partial = path.with_name(path.name + ".part")
    try:
        with GgufWriter(partial, _metadata(shape, quant), infos) as writer:
            for tensor in tensors:
                writer.write_tensor(tensor.fill(tensor, rng))
        partial.replace(path)
    except OSError as error:
        raise TreadleError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return path.stat().st_size
