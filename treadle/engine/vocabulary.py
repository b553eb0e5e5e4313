"""The tokens of a model as grammars see them. Without the native module, so that a server can try grammars
out."""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from treadle.text.tokenizer import Tokenizer

# What the library says when a grammar is too much for it; its other messages may quote what clients wrote.
_LIMITS = re.compile(r"(Parser Error: )?(Current row has \d+ items; max is \d+|lexer error: [a-z ]+)")
_ROW = 10_000  # ways to go on at one place, about four per optional property of an object; 20 take 1 µs

# Sets of tokens that are allowed or not as a whole: those that fit into strings of JSON, by their length in
# characters. One for each length halves the time of masks in strings with maxLength against the library's
# own sets (10, 30, any), because near the end of the string few tokens are left to try.
_BLANKS = r"[\x20\x0A\x0D\x09]+"
_CHARACTER = r"[^\"\\\x00-\x1F\x7F]"
_LENGTHS = (*range(1, 17), 20, 30)


def index(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """The vocabulary in the form that masks are computed from, which takes up to a second.

    vocab_size: number of logits, which may be more than the tokenizer has ids. Raises ValueError if no token
    ends a text.
    """
    if not tokenizer.eos_ids:
        raise ValueError("this model has no token that ends a text, so it cannot follow grammars")
    return LLTokenizer(
        TokenizerWrapper(_Vocabulary(tokenizer, vocab_size)),
        eos_token=sorted(tokenizer.eos_ids),
        slices=[_BLANKS, *(f"{_CHARACTER}{{1,{most}}}" for most in _LENGTHS), f"{_CHARACTER}+"],
    )


def matcher(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """Follows ``grammar``; whether it can is told by its ``is_error``."""
    limits = LLParserLimits(max_items_in_row=_ROW, verbose_errors=False)
    return LLMatcher(tokens, grammar, log_level=0, limits=limits)


def complaint(broken: LLMatcher) -> str:
    """Why a matcher has failed, in words that hold nothing of the grammar or the answer."""
    known = _LIMITS.match(broken.get_error() or "")
    return known[0] if known else broken.stop_reason()


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._text = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        padding = [b""] * (vocab_size - tokenizer.vocab_size)
        self.tokens = [
            tokenizer.token_bytes(id) for id in range(min(vocab_size, tokenizer.vocab_size))
        ] + padding
        controls = {tokenizer.token_id(spelling) for spelling in tokenizer.control_texts}
        self.special_token_ids = sorted(id for id in controls if id is not None)

    def __call__(self, text: bytes) -> list[int]:
        return self._text.encode(text.decode("utf-8", "replace"))
