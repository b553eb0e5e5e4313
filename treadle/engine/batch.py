"""The input of one step, in arrays that every step reuses."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from treadle.engine.interfaces import Ids, SamplerState
from treadle.engine.sequence import Sequence


class Batch:
    """T tokens of S sequences, decodes first; R of them finish their prompt or decode, and get logits.

    Filled by the scheduler; valid until the next ``fill``. The arrays are those of StepRunner.run.
    """

    def __init__(self, max_tokens: int, max_sequences: int) -> None:
        self._tokens = np.zeros(max_tokens, np.int32)
        self._query_lens = np.zeros(max_sequences, np.int32)
        self._past_lens = np.zeros(max_sequences, np.int32)
        self._slots = np.zeros(max_sequences, np.int32)
        self._logits_rows = np.zeros(max_sequences, np.int32)

    def fill(self, decodes: list[Sequence], chunks: dict[Sequence, int]) -> None:
        """Take one token of each sequence in ``decodes`` and the given number of those in ``chunks``."""
        ones, count = len(decodes), len(decodes) + len(chunks)
        self.decodes = ones
        self.sequences = [*decodes, *chunks]
        self.lens = [1] * ones + list(chunks.values())
        ends = list(accumulate(self.lens))
        total = ends[-1]
        self._tokens[:ones] = [s.tokens[-1] for s in decodes]
        for sequence, length, end in zip(chunks, self.lens[ones:], ends[ones:], strict=True):
            self._tokens[end - length : end] = sequence.tokens[sequence.computed : sequence.computed + length]
        self._query_lens[:count] = self.lens
        self._past_lens[:count] = [s.computed for s in self.sequences]
        self._slots[:count] = [s.slot for s in self.sequences]

        ending = [i for i, s in enumerate(self.sequences) if i < ones or self.lens[i] == s.pending]
        self.sampled = [self.sequences[i] for i in ending]
        self._logits_rows[: len(ending)] = [ends[i] - 1 for i in ending]
        self.tokens: Ids = self._tokens[:total]
        self.query_lens: Ids = self._query_lens[:count]
        self.past_lens: Ids = self._past_lens[:count]
        self.slots: Ids = self._slots[:count]
        self.logits_rows: Ids = self._logits_rows[: len(ending)]

    def keep(self, sampled: list[int]) -> None:
        """Sample only these (indices into ``sampled``); the others have failed."""
        self.sampled = [self.sampled[i] for i in sampled]

    @property
    def states(self) -> list[SamplerState]:
        """Sampler states in the order of ``logits_rows``."""
        return [s.state for s in self.sampled]

    @property
    def prefill(self) -> int:
        """Prompt tokens in the step."""
        return len(self.tokens) - self.decodes
