"""What a tokenizer is made of, whichever file it was read from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import tokenizers


class Kind(IntEnum):
    """Kind of a token; the values are those of ``tokenizer.ggml.token_type`` in GGUF files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


THINK_TAGS = ("<think>", "</think>")
_MARKUP = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_KNOWN_MARKUP = frozenset(
    (*THINK_TAGS, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
)
_END_NAMES = frozenset(
    (
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|EOT|>",
        "<｜end▁of▁sentence｜>",
        "<end_of_turn>",
        "<eod>",
    )
)


@dataclass(frozen=True)
class Control:
    """A token that only the program may write, never a user. ``lstrip``/``rstrip``: takes the blanks beside
    it."""

    id: int
    special: bool = True  # left out of shown text
    lstrip: bool = False
    rstrip: bool = False


@dataclass(kw_only=True)
class Vocabulary:
    """Tokens of one model. ``backend`` encodes ordinary text and cannot produce a control token."""

    tokens: list[str]  # by id
    kinds: list[int]  # Kind by id
    backend: tokenizers.Tokenizer
    backend_inside: tokenizers.Tokenizer | None = None  # for text after a control token, where it differs
    byte_level: bool  # tokens are spelled in GPT-2's alphabet of bytes; otherwise ▁ is a space
    controls: dict[str, Control]
    space_prefix: bool = False  # encoding puts a space before the text
    bos_id: int | None = None
    adds_bos: bool = False
    eos_id: int | None = None
    adds_eos: bool = False  # to texts that are read whole, such as those to be embedded
    eos_ids: set[int] = field(default_factory=set)
    chat_template: str | None = None
    template_variables: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, …
    family: str = ""  # architecture or model type, as the file calls it
    name: str = ""


def is_control_text(text: str, template: str) -> bool:
    """Whether a user-defined token steers the model rather than being a piece of text, such as a run of
    blanks."""
    if _MARKUP.fullmatch(text) or text in _KNOWN_MARKUP:
        return True
    return bool(text.strip()) and len(text) > 2 and not text.isalnum() and text in template


def ends_text(controls: dict[str, Control]) -> set[int]:
    """Ids of control tokens that are known to end a turn, whatever the file declares."""
    return {control.id for text, control in controls.items() if text in _END_NAMES}


def as_list(value: Any) -> list[Any]:
    """A list from a list or a NumPy array."""
    return value if isinstance(value, list) else list(value.tolist())
