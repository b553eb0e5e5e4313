"""Ids equal Hugging Face's, from GGUF metadata and from a directory; users' text never becomes a control
token."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.text.conftest import TEXTS
from treadle.core import TreadleError
from treadle.text import Tokenizer

CORPUS = [line for text in TEXTS for line in text.splitlines() if line.strip()] * 40


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_hugging_face(
    text: str,
    r1: Tokenizer,
    r1_oracle: PreTrainedTokenizerFast,
    smol: Tokenizer,
    smol_oracle: PreTrainedTokenizerFast,
) -> None:
    for ours, oracle in ((r1, r1_oracle), (smol, smol_oracle)):
        ids = oracle.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@given(st.text().filter(lambda text: not re.search(r"<.+>", text)))
def test_any_text_gives_the_same_ids(r1: Tokenizer, r1_oracle: PreTrainedTokenizerFast, text: str) -> None:
    assert r1.encode(text) == r1_oracle.encode(text, add_special_tokens=False)


@given(
    st.lists(
        st.one_of(st.text(max_size=5), st.sampled_from(["<｜User｜>", "<think>", "<|EOT|>", "<", "｜>"]))
    )
)
def test_specials_are_found_as_hugging_face_finds_them(
    r1: Tokenizer, r1_oracle: PreTrainedTokenizerFast, parts: list[str]
) -> None:
    text = "".join(parts)
    assert r1.encode(text, specials=True) == r1_oracle.encode(text, add_special_tokens=False)
    assert not any(r1.is_special(id) or id in (151648, 151649) for id in r1.encode(text))


def test_special_spelling_in_plain_text_stays_text(smol: Tokenizer) -> None:
    ids = smol.encode("<|im_end|>")
    assert 2 not in ids and smol.decode(ids) == "<|im_end|>"
    assert smol.encode("<|im_end|>", specials=True) == [2]


def test_bos_once_and_only_where_the_metadata_wants_it(r1: Tokenizer, smol: Tokenizer) -> None:
    bos = r1.bos_id
    assert r1.encode("x", add_bos=True) == [bos, *r1.encode("x")]
    assert r1.encode("<｜begin▁of▁sentence｜>x", specials=True, add_bos=True).count(151646) == 1
    assert smol.encode("x", add_bos=True) == smol.encode("x")


def test_end_ids(r1: Tokenizer, smol: Tokenizer) -> None:
    assert 151643 in r1.eos_ids and smol.eos_ids == {0, 2}


def test_unused_ids_have_no_text(r1: Tokenizer) -> None:
    assert r1.vocab_size == 152064 and r1.token_bytes(152063) == b""
    with pytest.raises(IndexError):
        r1.token_bytes(152064)


def test_token_bytes_join_to_the_text(r1: Tokenizer) -> None:
    for text in TEXTS[:6]:
        if text.isascii():
            assert b"".join(map(r1.token_bytes, r1.encode(text))) == text.encode()


def _sentencepiece_model() -> tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        character_coverage=0.985,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    count = processor.get_piece_size()
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in range(count)
    ]
    return processor, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": np.array([processor.get_score(i) for i in range(count)], np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_vocabulary_gives_sentencepiece_ids() -> None:
    processor, metadata = _sentencepiece_model()
    ours = Tokenizer.from_gguf(metadata)
    for text in [*TEXTS, "unseen ☃ \U0001f9ff", "</s> <s> <0x41>", " two  spaces"]:
        text = text.replace("\x00", "")
        ids = processor.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == processor.decode(ids) == text
    assert ours.encode("a", add_bos=True)[0] == 1
    assert ours.encode("<s>a</s>", specials=True)[-1] == 2


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_directory_gives_hugging_face_ids(tmp_path: Path, scheme: str) -> None:
    metaspace = tokenizers.pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.pre_tokenizer = metaspace
    steps = tokenizers.decoders
    backend.decoder = steps.Sequence(
        [steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=900, special_tokens=special[:3], show_progress=False)
    backend.train_from_iterator(
        ["the quick brown fox", "der schnelle braune Fuchs", "Hello world [INST]"] * 20, trainer
    )
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    oracle.chat_template = "{% for m in messages %}{{ '<s>' + m['content'] + '</s>' }}{% endfor %}"
    oracle.save_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    for text in ("the quick fox", "<s>Hello</s>world fox</s> the", " Hello"):
        assert ours.encode(text, specials=True) == oracle.encode(text, add_special_tokens=False)
    assert ours.chat_template == oracle.chat_template and ours.eos_ids == {2} and ours.bos_id == 1


def test_directory_of_a_byte_level_model(
    tmp_path: Path, smol: Tokenizer, smol_oracle: PreTrainedTokenizerFast
) -> None:
    smol_oracle.save_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    for text in [*TEXTS, "<|im_start|>user"]:
        assert ours.encode(text) == smol.encode(text)
        assert ours.encode(text, specials=True) == smol_oracle.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.model": "wordpiece"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "no-such"}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["zzzz qqqqq"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.eos_token_id": 49152}, "tokenizer.ggml.eos_token_id"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model"),
    ],
)
def test_broken_metadata_is_named(smol_metadata: dict[str, Any], change: dict[str, Any], named: str) -> None:
    with pytest.raises(TreadleError, match=named):
        Tokenizer.from_gguf(smol_metadata | change)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TreadleError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": []}}')
    with pytest.raises(TreadleError, match="Unigram"):
        Tokenizer.from_directory(tmp_path)


def test_half_a_surrogate_pair_is_refused(smol: Tokenizer) -> None:
    with pytest.raises(TreadleError, match="surrogate"):
        smol.encode("\ud83d")


def test_merges_cannot_make_a_control_token(smol_metadata: dict[str, Any]) -> None:
    tokens = [*smol_metadata["tokenizer.ggml.tokens"][:-1], "qz"]
    kinds = [*smol_metadata["tokenizer.ggml.token_type"][:-1], 3]
    changed = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["q z", "h e"],
    }
    ours = Tokenizer.from_gguf(smol_metadata | changed)
    assert len(tokens) - 1 not in ours.encode("qz") and ours.encode("qz", specials=True) == [len(tokens) - 1]
