"""Guesses by prompt lookup: what followed the same few tokens earlier in this request (Saxena, "Prompt
Lookup Decoding", 2023), and how often such guesses come true.

Every token that is chosen while there is a guess tells whether the guess was right, whether or not a step
checked it. So the acceptance is known, at no cost, while checking does not pay.
"""

from __future__ import annotations

from array import array

_GRAM = 3  # tokens that must agree; fewer agree by chance
_LONG = 8  # agreeing tokens beyond which more tell nothing new
_CLASSES = 3  # 3, 4..7, and 8 or more agreeing tokens come true differently often
_MEMORY = 32  # guesses per class that are remembered, about
_FIRST = 0.1  # acceptance assumed before any guess: below what pays, so that one must come true first


class Lookup:
    """Follows the tokens of one request. ``update`` after they have grown, then ``chance`` and ``draft``."""

    __slots__ = ("_at", "_hits", "_indexed", "_next", "_seen", "_tokens", "_trials", "length")

    def __init__(self, tokens: array[int]) -> None:
        """``tokens``: prompt and output, which the owner goes on appending to."""
        self._tokens = tokens
        self._next: dict[bytes, int] = {}  # three tokens (int32) -> position after their last occurrence
        self._indexed = _GRAM - 1  # the threes that end before this position are in it
        self._seen = 0
        self._at = -1  # position of the token that is guessed to come next; -1: no guess
        self.length = 0  # tokens that agree before the guess
        self._hits = [0.0] * _CLASSES
        self._trials = [0.0] * _CLASSES

    def update(self) -> bool:
        """Take the new tokens. Returns whether there is a guess."""
        tokens, end = self._tokens, len(self._tokens)
        for token in tokens[self._seen : end] if self._at >= 0 else ():
            hit = tokens[self._at] == token
            self._learn(hit)
            if not hit:
                self._at = -1
                break
            self._at += 1
            self.length += 1
        self._seen = end
        self._index(end - 1)  # all but the last three, which would find themselves
        if self._at < 0:
            self._at = self._next.get(tokens[-_GRAM:].tobytes(), -1)
            self.length = self._agreement() if self._at >= 0 else 0
        return self._at >= 0

    def chance(self, ahead: int) -> float:
        """Probability that the guess of the token ``ahead`` places after the next comes true, given that
        those before it have.
        """
        chance = _FIRST
        # Longer agreement is at least as good: a class without guesses takes over from the one below.
        for i in range(_class(self.length + ahead) + 1):
            chance = (chance + self._hits[i]) / (1 + self._trials[i])
        return chance

    def draft(self, count: int) -> list[int]:
        """The next ``count`` tokens as they are guessed: a copy that goes round if it meets its own end."""
        tokens, at, end = self._tokens, self._at, len(self._tokens)
        draft: list[int] = []
        for position in range(at, at + count):
            draft.append(tokens[position] if position < end else draft[position - end])
        return draft

    def _index(self, end: int) -> None:
        begin = self._indexed
        if begin >= end:
            return
        raw, size = self._tokens[begin - _GRAM + 1 : end].tobytes(), self._tokens.itemsize
        for i in range(end - begin):
            self._next[raw[i * size : (i + _GRAM) * size]] = begin + i + 1
        self._indexed = end

    def _agreement(self) -> int:
        tokens, end, length = self._tokens, len(self._tokens), _GRAM
        while (
            length < _LONG and length < self._at and tokens[self._at - 1 - length] == tokens[end - 1 - length]
        ):
            length += 1
        return length

    def _learn(self, hit: bool) -> None:
        i = _class(self.length)
        self._hits[i] += hit
        self._trials[i] += 1
        if self._trials[i] > _MEMORY:
            self._hits[i] /= 2
            self._trials[i] /= 2


def _class(length: int) -> int:
    return 0 if length < 4 else 1 if length < _LONG else 2
