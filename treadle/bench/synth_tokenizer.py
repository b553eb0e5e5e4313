"""A vocabulary of the right size for a synthetic model: bytes, syllables, words, the family's special tokens.

Words are a space and one to three syllables, merged from left to right, so a text of such words becomes the
same tokens again when it is sent back: conversations grow, and prefixes repeat, as with a real vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.bench.gguf_writer import Value
from treadle.bench.shapes import Family, Shape

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # llama.cpp's token types
_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxyz" for vowel in "aeiou"]

_R1_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
_CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@dataclass(frozen=True)
class _Specials:
    pre: str  # tokenizer.ggml.pre
    first: int  # id of the first special token in the real vocabulary
    names: tuple[str, ...]
    bos: str | None
    eos: str
    template: str


_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SPECIALS: dict[Family, _Specials] = {
    "deepseek-r1-qwen": _Specials(
        "deepseek-r1-qwen",
        151643,
        (
            "<｜end▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜begin▁of▁sentence｜>",
            "<|EOT|>",
            "<think>",
            "</think>",
        ),
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        _R1_TEMPLATE,
    ),
    "qwen2": _Specials("qwen2", 151643, _QWEN, None, "<|im_end|>", _CHATML_TEMPLATE),
    "qwen3": _Specials("qwen2", 151643, _QWEN, None, "<|im_end|>", _CHATML_TEMPLATE),
    "llama3": _Specials(
        "llama-bpe",
        128000,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
        _LLAMA3_TEMPLATE,
    ),
    "smollm2": _Specials(
        "smollm",
        0,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_start|>",
        "<|im_end|>",
        _CHATML_TEMPLATE,
    ),
}


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte 0..255."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = iter(range(256, 512))
    stand_in = {byte: chr(byte) for byte in printable}
    return [stand_in.get(byte) or chr(next(others)) for byte in range(256)]


def _merges(count: int) -> list[str]:
    """``count`` merges, one new token each: syllables first, then words, short ones first."""
    merges = [" ".join(syllable) for syllable in _SYLLABLES]
    stems = ["Ġ"]
    while len(merges) < count:
        merges += (f"{stem} {syllable}" for stem in stems for syllable in _SYLLABLES)
        stems = [stem + syllable for stem in stems for syllable in _SYLLABLES]
    return merges[:count]


def tokenizer_metadata(shape: Shape) -> dict[str, Value]:
    """The ``tokenizer.*`` entries of a GGUF for this shape; needs a vocabulary of at least 300."""
    specials = _SPECIALS[shape.family]
    first = min(specials.first, shape.vocab - len(specials.names))  # small test vocabularies: at the end
    merges = _merges(shape.vocab - 256 - len(specials.names))
    words = [*_byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    tokens = words[:first] + list(specials.names) + words[first:]
    types = np.full(shape.vocab, _NORMAL, np.int32)
    for offset, name in enumerate(specials.names):
        types[first + offset] = _USER_DEFINED if name in ("<think>", "</think>") else _CONTROL
    metadata: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": specials.pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": first + specials.names.index(specials.eos),
        "tokenizer.ggml.add_bos_token": specials.bos is not None and shape.family != "smollm2",
        "tokenizer.chat_template": specials.template,
    }
    if specials.bos is not None:
        metadata["tokenizer.ggml.bos_token_id"] = first + specials.names.index(specials.bos)
    return metadata
