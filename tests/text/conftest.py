"""Real and locally trained tokenizers, each with its Hugging Face counterpart as oracle."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from treadle.text import Tokenizer

DATA = Path(__file__).parent.parent / "data"
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "Hello, world! I'll be THERE'S 12345 don't",
    "  leading\n\n\n and trailing   \t\n",
    "北京欢迎你，深度求索。ひらがな カタカナ 한국어",
    "😸👨‍👩‍👧‍👦 🇸🇬 T́ cafe\u0301 ﬁ Ⅷ ½ ٣٤٥",
    "def f(x):\n\treturn x**2  # ok\r\n" * 3,
    "3.14159 1,000,000 0x7fff 2026-12-02",
    "\u00a0\u2003\u3000x\u0000y",
    "龘靐齉爩 歪 发 ΑΒΓ абв ÄÖÜß İı",
    "",
]


def read(name: str) -> dict[str, Any]:
    with gzip.open(DATA / f"{name}.tokenizer.json.gz", "rt", encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def hugging_face(metadata: dict[str, Any], pre: Any, nfc: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer as published: whole vocabulary in the model, control tokens added on top."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    vocab = {token: id for id, token in enumerate(tokens)}
    merges = [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre
    backend.decoder = tokenizers.decoders.ByteLevel()
    if nfc:
        backend.normalizer = tokenizers.normalizers.NFC()
    added = [
        tokenizers.AddedToken(token, special=kind == 3, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (3, 4)
    ]
    backend.add_tokens(added)
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[metadata["tokenizer.ggml.eos_token_id"]],
    )
    oracle.chat_template = metadata["tokenizer.chat_template"]
    return oracle


@pytest.fixture(scope="session")
def r1_metadata() -> dict[str, Any]:
    return read("deepseek-r1-distill-qwen-7b")


@pytest.fixture(scope="session")
def r1(r1_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(r1_metadata)


@pytest.fixture(scope="session")
def r1_oracle(r1_metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    pre = tokenizers.pre_tokenizers
    cut = pre.Split(tokenizers.Regex(QWEN2_PATTERN), "isolated")
    return hugging_face(r1_metadata, pre.Sequence([cut, pre.ByteLevel(False, use_regex=False)]), nfc=True)


@pytest.fixture(scope="session")
def smol_metadata() -> dict[str, Any]:
    return read("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smol(smol_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smol_metadata)


@pytest.fixture(scope="session")
def smol_oracle(smol_metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    pre = tokenizers.pre_tokenizers
    return hugging_face(smol_metadata, pre.Sequence([pre.Digits(True), pre.ByteLevel(False)]))
