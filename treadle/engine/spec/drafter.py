"""How many guessed tokens a step should check: as many as are likely to save more time than they cost.

A checked token costs the time by which one more row lengthens a step (measured; small while the step waits
for weights from memory) and, if it comes true, saves its sequence a step.
"""

from __future__ import annotations

from treadle.engine.sequence import Sequence
from treadle.engine.spec.lookup import Lookup

_MOST = 10  # guessed tokens per sequence and step: later ones seldom decide, and a cancel waits for the step
_MOST_DECODES = 4  # with more, steps no longer wait for memory only
_MARGIN = (
    1.25  # expected saving over cost: measurements are noisy, and guessing must not make anything slower
)
_PLAIN_EVERY = 64  # speculative steps after which one without guesses measures again what those save
_FIRST_SHARE = 0.25  # of a step's time per sequence: the cost of a checked token before it has been measured
_WEIGHT = 0.1  # of a new measurement
_RETURN = 0.01  # of the way back to the first assumption, per step in which cost forbids guesses


class Drafter:
    """Chooses the guesses of each step and learns from the time that it took."""

    def __init__(self, max_rows: int) -> None:
        """``max_rows``: logits rows per step."""
        self._max_rows = max_rows
        self._row_s = 0.0  # seconds per checked token; 0: not known
        self._measured = 1  # steps that tell, the first assumption counted as one
        self._since_plain = 0

    def propose(self, decodes: list[Sequence], base: float) -> dict[Sequence, list[int]]:
        """Guesses for some of ``decodes``, which are all that the step runs. ``base``: seconds of the step
        without guesses, 0 if not known.
        """
        count = len(decodes)
        if not base or count > _MOST_DECODES:
            return {}
        if self._since_plain >= _PLAIN_EVERY:
            self._since_plain = 0
            return {}
        value = base / count  # seconds that a token takes without guesses
        cost = max(self._row_s or _FIRST_SHARE * value, 0.02 * value) * _MARGIN
        most = min(_MOST, (self._max_rows - count) // count)
        drafts, guesses = {}, False
        for sequence in decodes:
            lookup = sequence.lookup
            if lookup is None or not lookup.update():
                continue
            guesses = True
            room = min(most, sequence.limit - len(sequence.tokens) - 1)
            length = _length(lookup, room, cost / value)
            if length:
                drafts[sequence] = lookup.draft(length)
        if drafts:
            self._since_plain += 1
        elif guesses and self._row_s:
            self._row_s += _RETURN * (_FIRST_SHARE * value - self._row_s)
        return drafts

    def record(self, drafted: int, base: float, seconds: float) -> None:
        """Learn from a step that checked ``drafted`` tokens in ``seconds``; ``base``: see ``propose``."""
        # A row that seems dearer than a whole step was disturbed.
        row_s = min(base, (seconds - base) / drafted)
        if not self._row_s:
            self._row_s = _FIRST_SHARE * base
        self._measured += 1
        self._row_s += max(_WEIGHT, 1 / self._measured) * (row_s - self._row_s)


def _length(lookup: Lookup, room: int, needed: float) -> int:
    """The number of guesses that are each worth checking: those whose chance is at least ``needed``."""
    chance, length = 1.0, 0
    while length < room:
        chance *= lookup.chance(length)
        if chance < needed:
            break
        length += 1
    return length
