"""The tokens of prompts after their last full block, which the prefix cache does not know.

While a sequence that has read such a tail runs, another one with the same prompt copies the block instead of
reading it again; while one is reading it, others wait. So ``n`` answers cost one prefill to the token.
"""

from __future__ import annotations

from treadle.engine.sequence import Sequence


class Tails:
    """The tails of running sequences."""

    def __init__(self) -> None:
        self._runners: dict[bytes, list[Sequence]] = {}  # by the name of their tail

    def add(self, sequence: Sequence) -> None:
        """A sequence has got a slot."""
        if sequence.tail:
            self._runners.setdefault(sequence.tail, []).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence leaves its slot; it still has its blocks."""
        if sequence.tail:
            runners = self._runners[sequence.tail]
            runners.remove(sequence)
            if not runners:
                del self._runners[sequence.tail]

    def check(self, running: list[Sequence]) -> None:
        """Raise AssertionError unless these are the tails of the sequences that run."""
        known = {sequence for runners in self._runners.values() for sequence in runners}
        assert known == {sequence for sequence in running if sequence.tail}, "a tail is lost or left over"

    def being_read(self, sequence: Sequence) -> bool:
        """Whether somebody reads the tail of this prompt, and nobody has read it."""
        return sequence.tail in self._runners and self.source(sequence) is None

    def source(self, sequence: Sequence) -> int | None:
        """A block that begins with the tail of this prompt."""
        for runner in self._runners.get(sequence.tail, ()):
            if runner.computed >= runner.tail_end:
                return runner.blocks[runner.tail_block]
        return None
