"""Synthetic files, read by the `gguf` package as an independent oracle."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from treadle.bench.mixtures import MIXTURES
from treadle.bench.shapes import SHAPES, Shape, find_shape
from treadle.bench.synth import plan_tensors, write_synthetic
from treadle.bench.synth_tokenizer import tokenizer_metadata
from treadle.core import TreadleError

TINY = Shape("tiny", "qwen2", 3, 256, 512, 4, 2, 512, 1024, 1e6, 1e-6, head_dim=64)


@pytest.mark.parametrize("quant", MIXTURES)
def test_every_tensor_has_its_shape_and_sane_values(tmp_path: Path, quant: str) -> None:
    path = tmp_path / "m.gguf"
    assert write_synthetic(TINY, quant, path) == path.stat().st_size
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert list(tensors["blk.0.ffn_down.weight"].shape) == [512, 256]  # ggml order: contiguous first
    assert list(tensors["blk.2.attn_k.weight"].shape) == [256, 128]
    assert list(tensors["blk.1.attn_k.bias"].shape) == [128]
    assert list(tensors["output.weight"].shape) == [256, 512]
    for name, tensor in tensors.items():
        values = dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all(), name
        if len(tensor.shape) == 2:
            wanted = 1 / np.sqrt(tensor.shape[0])
            assert 0.4 * wanted < values.std() < 2.1 * wanted, name
            assert abs(values.mean()) < 0.2 * values.std(), name


@pytest.mark.parametrize("family", ["deepseek-r1-qwen", "qwen2", "qwen3", "llama3", "smollm2"])
def test_metadata_of_every_family(tmp_path: Path, family: str) -> None:
    shape = Shape("tiny", family, 2, 256, 512, 4, 2, 512, 1024, 1e6, 1e-6, head_dim=128)  # type: ignore[arg-type]
    write_synthetic(shape, "Q8_0", tmp_path / "m.gguf")
    fields = {k: f.contents() for k, f in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    arch = fields["general.architecture"]
    assert fields[f"{arch}.block_count"] == 2
    assert fields[f"{arch}.attention.head_count_kv"] == 2
    tokens = fields["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == 512
    assert tokens[fields["tokenizer.ggml.eos_token_id"]] in (
        "<|im_end|>",
        "<|eot_id|>",
        "<｜end▁of▁sentence｜>",
    )
    for merge in fields["tokenizer.ggml.merges"]:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= set(tokens)


def test_words_become_the_same_tokens_again() -> None:
    """With the `tokenizers` package as oracle."""
    metadata: dict[str, Any] = dict(tokenizer_metadata(find_shape("qwen3-8b")))
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert len(tokens) == len(set(tokens)) == 151936
    pairs = [tuple(merge.split(" ")) for merge in merges]
    encoder = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    encoder.pre_tokenizer = ByteLevel(add_prefix_space=False)
    encoder.decoder = ByteLevelDecoder()
    words = [i for i, token in enumerate(tokens) if token.startswith("Ġ")]
    ids = random.Random(0).sample(words, 500)
    assert encoder.encode(encoder.decode(ids)).ids == ids


def test_mixture_equals_a_real_q4_k_m_file() -> None:
    """Types in DeepSeek-R1-Distill-Qwen-7B-Q4_K_M.gguf as published."""
    types = {
        tensor.name: tensor.block.name for tensor in plan_tensors(find_shape("r1-distill-qwen-7b"), "q4_k_m")
    }
    larger = [layer for layer in range(28) if types[f"blk.{layer}.ffn_down.weight"] == "Q6_K"]
    assert larger == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]
    assert larger == [layer for layer in range(28) if types[f"blk.{layer}.attn_v.weight"] == "Q6_K"]
    assert types["output.weight"] == "Q6_K"
    assert types["token_embd.weight"] == "Q4_K"
    assert types["blk.3.ffn_up.weight"] == "Q4_K"
    assert len(types) == 339


def test_tied_embeddings_and_rows_that_no_super_block_fits() -> None:
    qwen = {tensor.name: tensor.block.name for tensor in plan_tensors(find_shape("Qwen2.5-1.5B"), "Q4_K_M")}
    assert "output.weight" not in qwen
    assert qwen["token_embd.weight"] == "Q6_K"
    smol = {tensor.name: tensor.block.name for tensor in plan_tensors(find_shape("smollm2-135m"), "Q4_K_M")}
    assert smol["token_embd.weight"] == "Q8_0"
    assert smol["blk.4.attn_q.weight"] == "Q5_0"
    assert smol["blk.0.ffn_down.weight"] == "Q6_K"  # 1536 columns do fit


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("r1-distill-qwen-1.5b", 1.777e9), ("r1-distill-qwen-7b", 7.616e9), ("r1-distill-qwen-14b", 14.77e9),
        ("r1-distill-qwen-32b", 32.76e9), ("llama-8b", 8.03e9), ("llama-70b", 70.55e9), ("qwen3-8b", 8.19e9),
        ("qwen3-32b", 32.76e9), ("qwen2.5-1.5b", 1.544e9), ("smollm2-135m", 134.5e6),
    ],
)  # fmt: skip
def test_parameter_counts_are_the_published_ones(name: str, parameters: float) -> None:
    total = sum(tensor.rows * tensor.cols for tensor in plan_tensors(SHAPES[name], "F16"))
    assert total == pytest.approx(parameters, rel=0.002)


def test_same_seed_same_file(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_synthetic(TINY, "Q4_K_M", tmp_path / name, seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]


def test_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TreadleError, match=r"'gpt-5'.*qwen3-8b"):
        find_shape("gpt-5")
    with pytest.raises(TreadleError, match=r"'Q7_K'.*Q4_K_M"):
        write_synthetic(TINY, "Q7_K", tmp_path / "m.gguf")
    with pytest.raises(TreadleError, match="cannot write"):
        write_synthetic(TINY, "Q8_0", tmp_path / "missing" / "m.gguf")
