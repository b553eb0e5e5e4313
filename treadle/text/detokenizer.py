"""Token ids to text while they are generated: whole characters only, and nothing that may still become a stop
string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from treadle.text.tokenizer import Tokenizer


class Detokenizer:
    """One per request. ``push`` for every step, then ``finish`` once.

    stop: text ends before the first of these (after it with ``include_stop``); ``stopped`` then tells which.
    keep: ids of special tokens that are shown although ``skip_specials`` is set, such as tool-call marks.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_specials: bool = True,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        self.stopped: str | None = None
        self.offsets: list[int] = []  # per token: characters of text before it
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded = 0  # characters, whether given out or withheld
        self._held = ""
        self._include_stop = include_stop
        self._skip_specials = skip_specials
        self._keep = keep
        self._stops = tuple(string for string in stop if string)

    def push(self, ids: Iterable[int]) -> str:
        """Text that these tokens complete. Nothing more comes once a stop string was found."""
        if self.stopped is not None:
            return ""
        parts: list[str] = []
        for id in ids:
            self.offsets.append(self._decoded)
            if self._skip_specials and self._tokenizer.is_special(id) and id not in self._keep:
                continue
            text = self._decoder.decode(self._tokenizer.token_bytes(id))
            self._decoded += len(text)
            if text:
                parts.append(text)
        return self._release("".join(parts)) if parts else ""

    def finish(self) -> str:
        """The rest: what was withheld, and one U+FFFD for a character that was never completed."""
        if self.stopped is not None:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if not self._stops:
            return text
        text = self._held + text
        found = first_stop(text, self._stops)
        if found is not None:
            start, self.stopped = found
            self._held = ""
            return text[: start + len(self.stopped) if self._include_stop else start]
        keep = pending_suffix(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Place and string of the stop that is complete first when ``text`` is read character by character."""
    found = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def pending_suffix(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that may still grow into one of ``marks``."""
    longest = max(map(len, marks), default=0)
    for length in range(min(len(text), longest - 1), 0, -1):
        tail = text[len(text) - length :]
        if any(mark.startswith(tail) for mark in marks):
            return length
    return 0
