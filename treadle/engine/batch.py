"""The input of one step, in arrays that every step reuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from treadle.engine.interfaces import Ids
from treadle.engine.sequence import Sequence
from treadle.engine.spec.drafter import Guess


@dataclass(slots=True)
class Turn:
    """A sequence that chooses its next token from row ``row`` of the logits; ``draft`` is what it is guessed
    to choose there and in the rows that follow, ``by_model`` by whom.
    """

    sequence: Sequence
    row: int
    draft: list[int]
    by_model: bool


class Batch:
    """T tokens of S sequences, decodes first. R of them get logits: the last one of a prompt, every decode
    and every guess.

    Filled by the scheduler; valid until the next ``fill``. The arrays are those of StepRunner.run.
    """

    def __init__(self, max_tokens: int, max_sequences: int) -> None:
        self._tokens = np.zeros(max_tokens, np.int32)
        self._query_lens = np.zeros(max_sequences, np.int32)
        self._past_lens = np.zeros(max_sequences, np.int32)
        self._slots = np.zeros(max_sequences, np.int32)
        self._logits_rows = np.zeros(max_sequences, np.int32)

    def fill(
        self, decodes: list[Sequence], chunks: Mapping[Sequence, int], drafts: Mapping[Sequence, Guess]
    ) -> None:
        """Take one token of each sequence in ``decodes``, followed by its guesses in ``drafts``, and the
        given number of those in ``chunks``.
        """
        ones, count = len(decodes), len(decodes) + len(chunks)
        guesses = [drafts[s].tokens if s in drafts else [] for s in decodes]
        by_model = [s in drafts and drafts[s].by_model for s in decodes]
        self.decodes = ones
        self.drafted = sum(map(len, guesses))
        self.drafted_by_model = sum(len(guess.tokens) for guess in drafts.values() if guess.by_model)
        self.sequences = [*decodes, *chunks]
        self.lens = [1 + len(draft) for draft in guesses] + list(chunks.values())
        ends = list(accumulate(self.lens))
        total = ends[-1]
        first = ones + self.drafted
        self._tokens[:first] = list(
            chain.from_iterable([s.tokens[-1], *draft] for s, draft in zip(decodes, guesses, strict=True))
        )
        for sequence, length, end in zip(chunks, self.lens[ones:], ends[ones:], strict=True):
            self._tokens[end - length : end] = sequence.tokens[sequence.computed : sequence.computed + length]
        self._query_lens[:count] = self.lens
        self._past_lens[:count] = [s.computed for s in self.sequences]
        self._slots[:count] = [s.slot for s in self.sequences]

        rows = [
            *range(first),
            *(end - 1 for s, end in zip(chunks, ends[ones:], strict=True) if chunks[s] == s.pending),
        ]
        self._logits_rows[: len(rows)] = rows
        begins = [end - length for end, length in zip(ends, self.lens, strict=True)]
        self.turns = [Turn(*turn) for turn in zip(decodes, begins[:ones], guesses, by_model, strict=True)]
        self.turns += [
            Turn(s, row, [], False)
            for row, s in enumerate((s for s in chunks if chunks[s] == s.pending), first)
        ]
        self.tokens: Ids = self._tokens[:total]
        self.query_lens: Ids = self._query_lens[:count]
        self.past_lens: Ids = self._past_lens[:count]
        self.slots: Ids = self._slots[:count]
        self.logits_rows: Ids = self._logits_rows[: len(rows)]

    @property
    def prefill(self) -> int:
        """Prompt tokens in the step."""
        return len(self.tokens) - self.decodes - self.drafted
