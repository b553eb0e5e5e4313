"""Keeps what users wrote from becoming control tokens, through whatever a chat template does with it.

Before rendering, the edge characters of every control token's spelling inside a user's strings are exchanged
for private-use characters that occur nowhere in the conversation; so only what the template itself writes can
spell a control token. After the rendered text was cut at those, the characters are changed back. Text without
such spellings is rendered untouched, so its result is exactly the template's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from treadle.core import TreadleError

_PRIVATE = range(0x100000, 0x10FFFE)


class Shield:
    """Exchanges characters in the strings of one conversation. ``thorough``: every edge character, wherever
    it stands."""

    def __init__(self, spellings: Iterable[str], conversation: Any, *, thorough: bool = False) -> None:
        self._spellings = [spelling for spelling in spellings if spelling]
        edges = sorted({edge for spelling in self._spellings for edge in (spelling[0], spelling[-1])})
        used = {character for text in _strings(conversation) if not text.isascii() for character in text}
        free = (chr(code) for code in _PRIVATE if chr(code) not in used)
        try:
            self._cover = {ord(edge): next(free) for edge in edges}
        except StopIteration:
            raise TreadleError("messages: the text uses too many private-use characters") from None
        self._uncover = {ord(cover): chr(edge) for edge, cover in self._cover.items()}
        self._thorough = {code: cover for code, cover in self._cover.items() if not chr(code).isalnum()}
        self._all = thorough
        self._edges = edges
        self._whole = re.compile(
            "|".join(map(re.escape, sorted(self._spellings, key=len, reverse=True))) or "(?!)"
        )

    def cover(self, value: Any) -> Any:
        """The same value with every string in it, keys included, made harmless."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {self.cover(key): self.cover(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.cover(item) for item in value]
        return value

    def uncover(self, text: str) -> str:
        """The user's own characters again."""
        return text.translate(self._uncover)

    def has_edges(self, value: Any) -> bool:
        """Whether any string holds a character that could be the edge of a control token."""
        edges = [chr(code) for code in self._thorough]
        return any(edge in text for text in _strings(value) for edge in edges)

    def _text(self, text: str) -> str:
        if self._all:
            text = text.translate(self._thorough)
        if not any(edge in text for edge in self._edges):
            return text
        text = self._whole.sub(lambda match: match[0].translate(self._cover), text)
        # Halves at the ends, which the text beside them in the template could complete.
        if tail := max((_overlap(text, spelling) for spelling in self._spellings), default=0):
            text = text[:-tail] + text[-tail:].translate(self._cover)
        head = max((_overlap(spelling, text) for spelling in self._spellings), default=0)
        return text[:head].translate(self._cover) + text[head:]


def _overlap(left: str, right: str) -> int:
    """Length of the longest end of ``left`` that begins ``right``."""
    for length in range(min(len(left), len(right), 64), 0, -1):
        if left.endswith(right[:length]):
            return length
    return 0


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
