"""Guesses by a draft model: a smaller model with the same vocabulary continues each sequence, and the larger
one checks what it wrote (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
2023).

Where that paper accepts guesses by chance, so that answers follow the same distribution, here the model
chooses each token as if there were no guess, and a guess is used if it is the same token
(treadle.engine.engine). So the answers themselves are the same, whoever guesses, and however much. The draft
model chooses with a copy of the request's sampler state, at the random number that the model will use: where
both think alike, both then choose alike (compare Daliri et al., "Coupling without Communication and
Drafter-Invariant Speculative Decoding", 2024).

It has a KV cache of its own, and reads what it has not seen of a sequence when guesses are wanted. Full
blocks are kept for later prompts, under the names that they have in the prefix cache of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from treadle.engine.interfaces import SamplerState, StepRunner
from treadle.engine.kv.pool import BLOCK, BlockPool
from treadle.engine.kv.prefix import PrefixCache
from treadle.engine.sequence import Sequence

MOST_DECODES = 4  # sequences that are guessed together: with more, steps no longer wait for memory only
READY = 16  # tokens that are read with the first guess: a pass over so few is hardly longer
_MEMORY = 64  # guesses per sequence that are remembered, about
_ALL_MEMORY = 256  # and of all sequences together
_FIRST = 0.7  # acceptance assumed before any guess
_DOUBT = 4  # guesses that this assumption counts for, and that all sequences count for in each one
_WEIGHT = 0.2  # of a new measurement
_FIRST_TOKEN = 0.1  # of a pass: reading a token, before it has been measured
_FIRST_CHUNK = 32  # tokens that are read before the time of a token is known


class DraftRunner(StepRunner, Protocol):
    """Runs the draft model. Slots are those of the model; ``sample`` takes states that ``fork`` has made, and
    chooses among the model's vocabulary.
    """

    rows: int  # token ids that it can read: 0 to rows - 1

    def fork(self, state: SamplerState, /) -> SamplerState:
        """A copy of a state of the model's runner."""
        ...


class Acceptance:
    """How often guesses come true: a share that forgets what is long ago."""

    __slots__ = ("_memory", "hits", "trials")

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.hits = self.trials = 0.0

    def learn(self, hits: int, trials: int) -> None:
        """Take the outcome of some guesses."""
        self.hits += hits
        self.trials += trials
        if self.trials > self._memory:
            self.hits /= 2
            self.trials /= 2

    def share(self, first: float) -> float:
        """The share, where ``first`` was assumed before."""
        return (_DOUBT * first + self.hits) / (_DOUBT + self.trials)


class _Reading:
    """What the draft model has of one sequence."""

    __slots__ = ("acceptance", "blocks", "computed", "guesses", "lost", "named", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.blocks: list[int] = []
        self.computed = 0  # tokens of the sequence whose KV is in the blocks
        self.named = 0  # leading blocks that the prefix cache knows
        self.guesses: list[int] = []  # for the tokens after those; all but the last have their KV, too
        self.lost = False  # it has a token that the draft model does not know
        self.acceptance = Acceptance(_MEMORY)


@dataclass(slots=True)
class _Writing:
    """A sequence that is being continued."""

    sequence: Sequence
    slot: int
    length: int  # guesses wanted
    past: int  # tokens that have their KV
    tokens: list[int]  # that come next
    guesses: list[int] = field(default_factory=list)


class DraftModel:
    """Continues sequences, and knows what that costs and how often it comes true. Not thread-safe."""

    def __init__(self, runner: DraftRunner, clock: Callable[[], float], share: float) -> None:
        """``share``: of the model's time that a pass may take, as far as sizes tell."""
        assert runner.max_tokens >= READY * MOST_DECODES, "a pass must hold what is unread of all sequences"
        self.runner = runner
        self.seconds = 0.0  # that it has taken so far
        self._clock = clock
        self._share = share
        self._cache = PrefixCache(BlockPool(runner.num_blocks))
        self._readings: dict[Sequence, _Reading] = {}
        self._acceptance = Acceptance(_ALL_MEMORY)
        self._pass_s: dict[int, float] = {}  # by number of sequences
        self._token_s = 0.0  # of reading; 0: not known

    # ------------------------------------------------------------------ what it would cost and bring

    def follow(self, decodes: Iterable[Sequence]) -> None:
        """Take the tokens that were chosen, and forget sequences that have left their slot."""
        for sequence, reading in list(self._readings.items()):
            if sequence.slot != reading.slot:
                self._cache.release(reading.blocks)
                del self._readings[sequence]
        for sequence in decodes:
            if sequence not in self._readings:
                self._readings[sequence] = self._begin(sequence)
            self._settle(sequence, self._readings[sequence])

    def unread(self, sequence: Sequence) -> int:
        """Tokens that it has to read before it can guess."""
        return len(sequence.tokens) - self._readings[sequence].computed

    def room(self, sequence: Sequence) -> int:
        """Tokens that it can guess."""
        if self._readings[sequence].lost:
            return 0
        return max(0, self.runner.context - len(sequence.tokens))

    def chance(self, sequence: Sequence) -> float:
        """Probability that a guess comes true, given that those before it have."""
        return self._readings[sequence].acceptance.share(self._acceptance.share(_FIRST))

    def pass_seconds(self, sequences: int, base: float) -> float:
        """Of a pass that guesses a token of each of so many. ``base``: of a step of the model."""
        return self._pass_s.get(sequences, self._share * base)

    def reading_seconds(self, tokens: int, base: float) -> float:
        """Of reading so many."""
        return tokens * (self._token_s or _FIRST_TOKEN * self._share * base)

    # ------------------------------------------------------------------ what it does

    def read(self, sequence: Sequence, seconds: float) -> None:
        """Read on in a sequence for about that long, up to its last token."""
        reading = self._readings[sequence]
        length = max(int(seconds / self._token_s), READY) if self._token_s else _FIRST_CHUNK
        length = min(length, self.runner.max_tokens, self.unread(sequence) - 1)
        length = self._reserve(reading, reading.computed + length) - reading.computed
        if length <= 0 or not self._knows(sequence, reading, length):
            return
        start, end = self._clock(), reading.computed + length
        chunk = sequence.tokens[reading.computed : end].tolist()
        self._run([_Writing(sequence, reading.slot, 0, reading.computed, chunk)], logits=False)
        token_s = self._took(start) / length
        self._token_s += (_WEIGHT if self._token_s else 1.0) * (token_s - self._token_s)
        self._advance(sequence, reading, end)

    def guess(self, lengths: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """So many next tokens of each sequence; fewer where there is no memory for more, nothing to choose
        from, or an end. At most READY tokens of each may be unread.
        """
        writings = [w for sequence, length in lengths.items() if (w := self._prepare(sequence, length))]
        going, states = writings, dict[Sequence, SamplerState]()
        while going:
            start = self._clock()
            self._run(going, logits=True)
            for w in going:
                if w.sequence not in states:
                    states[w.sequence] = self.runner.fork(w.sequence.state)
            try:
                chosen = self.runner.sample(range(len(going)), [states[w.sequence] for w in going])[0]
            except ValueError as error:
                if not getattr(error, "picks", ()):
                    raise
                break  # a mask allows none of the tokens that the draft model knows
            seconds = self._took(start)
            known = self._pass_s.get(len(going), seconds)
            self._pass_s[len(going)] = known + _WEIGHT * (seconds - known)
            for w, token in zip(going, chosen.tolist(), strict=True):
                w.guesses.append(token)
                w.past, w.tokens = w.past + len(w.tokens), [token]
                states[w.sequence].accept(token)
            going = [
                w for w in going if len(w.guesses) < w.length and w.guesses[-1] not in w.sequence.stop_ids
            ]
        for w in writings:
            reading = self._readings[w.sequence]
            self._advance(w.sequence, reading, len(w.sequence.tokens))
            reading.guesses = w.guesses
        return {w.sequence: w.guesses for w in writings if w.guesses}

    def check(self) -> None:
        """Raise AssertionError unless blocks and tables add up."""
        self._cache.check(reading.blocks for reading in self._readings.values())

    # ------------------------------------------------------------------ its KV cache

    def _begin(self, sequence: Sequence) -> _Reading:
        reading = _Reading(sequence.slot)
        limit = (len(sequence.tokens) - 1) // BLOCK  # the last token must run: it gives the logits
        sequence.hash_until(limit)
        reading.blocks = self._cache.match(sequence.hashes, limit)
        self._cache.hold(reading.blocks)
        reading.named = len(reading.blocks)
        reading.computed = reading.named * BLOCK
        self.runner.tables[reading.slot, : reading.named] = reading.blocks
        return reading

    def _settle(self, sequence: Sequence, reading: _Reading) -> None:
        """Compare the guesses with what was chosen. Those that came true have their KV already; what wrong
        ones have written is overwritten by the tokens that take their positions.
        """
        guesses, reading.guesses = reading.guesses, []
        if not guesses:
            return
        chosen = sequence.tokens[reading.computed : reading.computed + len(guesses)].tolist()
        hits = 0
        while hits < len(chosen) and chosen[hits] == guesses[hits]:
            hits += 1
        for acceptance in (reading.acceptance, self._acceptance):
            acceptance.learn(hits, hits + (hits < len(chosen)))
        # The last token runs again if a step has checked fewer guesses than were made: it gives the logits.
        last = len(sequence.tokens) - 1
        self._advance(sequence, reading, min(last, reading.computed + min(hits, len(guesses) - 1)))

    def _prepare(self, sequence: Sequence, length: int) -> _Writing | None:
        reading, end = self._readings[sequence], len(sequence.tokens)
        if not self._knows(sequence, reading, end - reading.computed):
            return None
        length = min(length, self._reserve(reading, end + length - 1) - end + 1)
        if length <= 0:
            return None
        tokens = sequence.tokens[reading.computed :].tolist()
        return _Writing(sequence, reading.slot, length, reading.computed, tokens)

    def _knows(self, sequence: Sequence, reading: _Reading, length: int) -> bool:
        tokens = sequence.tokens[reading.computed : reading.computed + length]
        reading.lost = max(tokens, default=0) >= self.runner.rows
        return not reading.lost

    def _reserve(self, reading: _Reading, tokens: int) -> int:
        """Blocks for that many tokens of a sequence; returns for how many there are some."""
        while len(reading.blocks) * BLOCK < tokens:
            if not self._cache.available:
                return len(reading.blocks) * BLOCK
            block = self._cache.allocate()
            self.runner.tables[reading.slot, len(reading.blocks)] = block
            reading.blocks.append(block)
        return tokens

    def _advance(self, sequence: Sequence, reading: _Reading, computed: int) -> None:
        """The first ``computed`` tokens have their KV; full blocks get a name."""
        reading.computed = computed
        full = computed // BLOCK
        sequence.hash_until(full)
        for i in range(reading.named, full):
            block = self._cache.register(sequence.hashes[i], sequence.parent_hash(i), reading.blocks[i])
            reading.blocks[i] = self.runner.tables[reading.slot, i] = block
        reading.named = full

    def _run(self, writings: list[_Writing], *, logits: bool) -> None:
        lens = np.array([len(w.tokens) for w in writings], np.int32)
        self.runner.run(
            np.array([token for w in writings for token in w.tokens], np.int32),
            lens,
            np.array([w.past for w in writings], np.int32),
            np.array([w.slot for w in writings], np.int32),
            (np.cumsum(lens, dtype=np.int32) - 1)[: len(lens) if logits else 0],
        )

    def _took(self, start: float) -> float:
        seconds = self._clock() - start
        self.seconds += seconds
        return seconds
