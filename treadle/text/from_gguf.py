"""Tokenizers from GGUF metadata (keys ``tokenizer.ggml.*`` and ``tokenizer.chat_template``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import tokenizers
from tokenizers import models, normalizers

from treadle.core import TreadleError
from treadle.text.pretokenizers import scheme
from treadle.text.vocabulary import Control, Kind, Vocabulary, as_list, ends_text, is_control_text

_PREFIX = "tokenizer.ggml."
_HIDDEN = (Kind.UNKNOWN, Kind.CONTROL, Kind.UNUSED)  # kinds that no text may become
_T = TypeVar("_T", str, bool, int)


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Read the vocabulary. Raises TreadleError naming the metadata key that is missing or wrong."""
    fields = _Fields(metadata)
    model = fields.get("model", str)
    tokens = _tokens(fields)
    kinds = fields.numbers("token_type", len(tokens)) or [int(Kind.NORMAL)] * len(tokens)
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    unusual = {
        id: kind for id, kind in enumerate(kinds) if kind != 1
    }  # 1: Kind.NORMAL, compared 150,000 times
    controls = {
        tokens[id]: Control(id, special=kind == Kind.CONTROL)
        for id, kind in unusual.items()
        if kind == Kind.CONTROL or (kind == Kind.USER_DEFINED and is_control_text(tokens[id], template or ""))
    }
    bos, eos, unk = (fields.id(f"{name}_token_id", len(tokens)) for name in ("bos", "eos", "unknown"))
    for id in (bos, eos):
        if id is not None and kinds[id] not in (Kind.NORMAL, Kind.BYTE):
            controls.setdefault(tokens[id], Control(id))
    hidden = {id for id, kind in unusual.items() if kind in _HIDDEN} | {c.id for c in controls.values()}
    plain = {text: id for id, text in enumerate(tokens) if id not in hidden and text not in controls}
    if model == "gpt2":
        pre = scheme(fields.get("pre", str, "gpt-2"))
        backend = tokenizers.Tokenizer(_byte_level(fields, plain, tokens, pre.whole_words_first))
        backend.pre_tokenizer = pre.pre_tokenizer()
        if (normalizer := pre.normalizer()) is not None:
            backend.normalizer = normalizer
        adds_bos, space_prefix = pre.adds_bos, False
    elif model == "llama":
        adds_bos, space_prefix = True, fields.get("add_space_prefix", bool, True)
        scores = fields.numbers("scores", len(tokens))
        if scores is None:
            raise TreadleError(
                "tokenizer.ggml.scores: missing, but tokenizer.ggml.model 'llama' needs one per token"
            )
        backend = tokenizers.Tokenizer(
            _sentencepiece(plain, kinds, scores, None if unk is None else (tokens[unk], unk))
        )
        backend.normalizer = spaces(space_prefix)
    else:
        raise TreadleError(
            f"tokenizer.ggml.model: {model!r} is not supported; supported are 'gpt2' and 'llama'"
        )
    extra = [tokens[id] for id, kind in unusual.items() if kind == Kind.USER_DEFINED and tokens[id] in plain]
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in extra])
    ends = ends_text(controls)
    ends.update(i for n in ("eot", "eom") if (i := fields.id(f"{n}_token_id", len(tokens))) is not None)
    if eos is not None:
        ends.add(eos)
    special = {"bos_token": bos, "eos_token": eos, "unk_token": unk}
    special["pad_token"] = fields.id("padding_token_id", len(tokens))
    return Vocabulary(
        tokens=tokens,
        kinds=kinds,
        backend=backend,
        byte_level=model == "gpt2",
        controls=controls,
        space_prefix=space_prefix,
        bos_id=bos,
        adds_bos=fields.get("add_bos_token", bool, adds_bos) and bos is not None,
        eos_id=eos,
        adds_eos=fields.get("add_eos_token", bool, False) and eos is not None,
        eos_ids=ends,
        chat_template=template,
        template_variables={name: tokens[id] for name, id in special.items() if id is not None},
        family=str(metadata.get("general.architecture", "")),
        name=str(metadata.get("general.name", "")),
    )


def spaces(prefix: bool) -> normalizers.Normalizer:
    """SentencePiece's spelling of spaces, with one put before the text if ``prefix``."""
    replace = normalizers.Replace(" ", "▁")
    return normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace


class _Fields:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, name: str, type_: type[_T], default: _T | None = None) -> _T:
        value = self._metadata.get(_PREFIX + name, default)
        if value is None:
            raise TreadleError(f"{_PREFIX}{name}: missing; this file has no usable tokenizer")
        if not isinstance(value, type_):
            raise TreadleError(f"{_PREFIX}{name}: must be {type_.__name__}, not {type(value).__name__}")
        return value

    def id(self, name: str, count: int) -> int | None:
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise TreadleError(f"{_PREFIX}{name}: must be a token id from 0 to {count - 1}, not {value!r}")
        return value

    def numbers(self, name: str, count: int) -> list[Any] | None:
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return None
        if isinstance(value, (str, bytes, int, float)) or len(value) != count:
            raise TreadleError(f"{_PREFIX}{name}: must be a list of {count} numbers, one per token")
        numbers = as_list(value)
        if not set(map(type, numbers)) <= {int, float}:
            raise TreadleError(f"{_PREFIX}{name}: must be a list of numbers")
        return numbers

    def strings(self, name: str) -> list[Any]:
        value = self._metadata.get(_PREFIX + name)
        if not isinstance(value, list) or not set(map(type, value)) <= {str, bytes}:
            raise TreadleError(f"{_PREFIX}{name}: must be a list of strings")
        return value


def _tokens(fields: _Fields) -> list[str]:
    tokens = fields.strings("tokens")
    if not tokens:
        raise TreadleError("tokenizer.ggml.tokens: must not be empty")
    for id, token in enumerate(tokens):
        if isinstance(token, bytes):
            raise TreadleError(f"tokenizer.ggml.tokens: entry {id} is not valid UTF-8: {token[:40]!r}")
    return tokens


def _byte_level(fields: _Fields, plain: dict[str, int], tokens: list[str], whole_words: bool) -> models.BPE:
    lines = fields.strings("merges")
    split: list[Any] = [tuple(line.split(" ")) if isinstance(line, str) else () for line in lines]
    if set(map(len, split)) <= {2}:
        merges: list[tuple[str, str]] = split
        try:
            return models.BPE(vocab=plain, merges=merges, ignore_merges=whole_words)
        except Exception:  # the library's plain Exception for a merge of unknown tokens, found below
            merges = _known_merges(lines, merges, plain, set(tokens))
            return models.BPE(vocab=plain, merges=merges, ignore_merges=whole_words)
    index = next(index for index, merge in enumerate(split) if len(merge) != 2)
    found = lines[index][:80]
    raise TreadleError(f"tokenizer.ggml.merges: entry {index} is not two tokens with a space: {found!r}")


def _known_merges(
    lines: list[Any], merges: list[tuple[str, str]], plain: dict[str, int], tokens: set[str]
) -> list[tuple[str, str]]:
    """Merges without those that make or use control tokens, which the encoder of plain text does not know."""
    known = []
    for index, (left, right) in enumerate(merges):
        if not {left, right, left + right} <= tokens:
            found = lines[index][:80]
            raise TreadleError(
                f"tokenizer.ggml.merges: entry {index} names tokens that do not exist: {found!r}"
            )
        if left in plain and right in plain and left + right in plain:
            known.append((left, right))
    return known


def _sentencepiece(
    plain: dict[str, int], kinds: list[int], scores: list[float], unk: tuple[str, int] | None
) -> models.BPE:
    """BPE whose merges are ordered by score, as Hugging Face's converter derives them from a SentencePiece
    model."""
    pieces = {text: id for text, id in plain.items() if kinds[id] == Kind.NORMAL}
    found: list[tuple[float, int, int, str, str]] = []
    for merged, id in pieces.items():
        pairs = [(merged[:cut], merged[cut:]) for cut in range(1, len(merged))]
        known = sorted((pieces[a], pieces[b], a, b) for a, b in pairs if a in pieces and b in pieces)
        found.extend((scores[id], len(a), len(b), a, b) for _, _, a, b in known)
    found.sort(key=lambda merge: merge[:3], reverse=True)
    vocab = dict(plain)
    if unk is not None:
        vocab[unk[0]] = unk[1]
    merges = [(left, right) for _, _, _, left, right in found]
    return models.BPE(
        vocab=vocab, merges=merges, unk_token=unk[0] if unk else None, fuse_unk=True, byte_fallback=True
    )
