"""Answers that must follow a grammar, and reasoning that must end: which tokens may come next, worked out
beside the steps of the model.

A grammar is what ``llguidance`` takes: a text in its Lark dialect, or its JSON form.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

from treadle import _native
from treadle.core import SamplingParams
from treadle.engine.vocabulary import complaint, index, matcher
from treadle.text.reasoning import CLOSE, OPEN
from treadle.text.tokenizer import Tokenizer

Words = NDArray[np.uint32]  # [(vocabulary + 31) // 32]: bit i % 32 of word i // 32 allows token i

log = logging.getLogger("treadle.engine")

_THREADS = 2
# Seconds of masks for which no thread is woken: where all cores compute, to wake one that takes the core of
# another costs a step of SmolLM2-135M about 0.4 ms on top (benchmarks/grammar.py).
_ALONE = 5e-4


class Grammars:
    """Grammars over the tokens of one model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """``vocab_size``: number of logits, which may be more than the tokenizer has ids."""
        self.vocab_size = vocab_size
        self.text = tokenizer
        self.open_id = tokenizer.token_id(OPEN)
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._loading: Future[LLTokenizer] | None = None
        # Steps have threads of their own, so that no answer waits for the grammar of another to be compiled.
        self._steps = ThreadPoolExecutor(_THREADS, thread_name_prefix="masks")
        # Those that have accepted a token which their next mask must take in, each once: two threads must not
        # work for one state.
        self._due: dict[GuidedState, None] = {}
        self._mask_seconds = 5e-5  # that a mask takes, a moving mean

    def prepare(self) -> Future[LLTokenizer]:
        """Begin to index the vocabulary, which takes about a second, unless that has been done."""
        if self._loading is None:
            self._loading = self.pool.submit(self._load)
        return self._loading

    def _load(self) -> LLTokenizer:
        return index(self.text, self.vocab_size)

    def due(self, state: GuidedState) -> None:
        """``state`` needs a new mask; ``begin`` has it made."""
        self._due[state] = None

    def begin(self) -> None:
        """Begin to make the masks that are due, beside what the caller does next, if they take long enough to
        be worth a thread. Else they are made where they are waited for."""
        due, self._due = list(self._due), {}
        if len(due) * self._mask_seconds < _ALONE:
            return
        size = -(-len(due) // _THREADS)
        for first in range(0, len(due), size):
            part = due[first : first + size]
            task = self._steps.submit(_advance_all, part)
            for state in part:
                state.wait_for(task)

    def took(self, seconds: float) -> None:
        """A mask has been made in that time."""
        self._mask_seconds += (seconds - self._mask_seconds) / 32

    @cached_property
    def nothing(self) -> Words:
        """No token."""
        return self.words(set())

    @cached_property
    def not_end(self) -> Words:
        """All tokens but those that end the text."""
        return self.words(set(range(self.vocab_size)) - self.text.eos_ids)

    @cached_property
    def not_open(self) -> Words:
        """All tokens but the one that opens a think block."""
        return self.words(set(range(self.vocab_size)) - {self.open_id})

    @cached_property
    def newlines(self) -> Words:
        """Tokens of nothing but newlines."""
        ids = range(self.text.vocab_size)
        return self.words({id for id in ids if (data := self.token_bytes(id)) and not data.strip(b"\n")})

    @cached_property
    def closing(self) -> list[int]:
        """The tokens that close a think block which has become too long."""
        return self.text.encode(f"\n{CLOSE}\n\n", specials=True)

    def words(self, ids: set[int]) -> Words:
        """A mask that allows ``ids``."""
        bits = np.zeros((self.vocab_size + 31) // 32 * 32, np.uint8)
        bits[list(ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of a token; none for ids that only pad the vocabulary."""
        return self.text.token_bytes(id) if id < self.text.vocab_size else b""


class Guide:
    """Follows one answer. ``accept`` every token; ``words`` then allows what may follow (None: anything).

    Reasoning is free, except that the text cannot end in it, and that its block is closed once it has
    ``reasoning_budget`` tokens; the grammar, if there is one, rules what comes after. Between the two one
    token of newlines is free, as models are used to. When the grammar breaks or a token does not fit, nothing
    is allowed any more, so that the answer fails rather than going on without its grammar.
    """

    def __init__(self, grammars: Grammars, tokenizer: LLTokenizer | None, params: SamplingParams) -> None:
        """``tokenizer``: needed for a grammar only."""
        self._grammars = grammars
        self._matcher = (
            matcher(tokenizer, params.grammar)
            if tokenizer is not None and params.grammar is not None
            else None
        )
        self.failure: str | None = None  # why nothing is allowed any more
        self._phase = {"none": "answer", "open": "reasoning", "may_open": "start"}[params.reasoning]
        self._budget = params.reasoning_budget
        self._closing: list[int] = []  # what must come next, last first
        self._tail = b""  # end of the reasoning, which may hold the beginning of its closing tag
        self._close_in_time()
        self.words = self._words()

    def accept(self, token: int) -> None:
        """Take the next token."""
        match self._phase:
            case "reasoning":
                if self._budget is not None:
                    self._budget -= 1
                self._reason(token)
                self._close_in_time()
            case "closing":
                self._closing.pop()
                self._phase = "closing" if self._closing else "answer"
            case "start" if token == self._grammars.open_id:
                self._phase = "reasoning"
                self._close_in_time()
            case _:
                self._answer(token)
        self.words = self._words()

    def _close_in_time(self) -> None:
        if self._phase == "reasoning" and self._budget is not None and self._budget <= 0:
            self._phase, self._closing = "closing", self._grammars.closing[::-1]

    def _answer(self, token: int) -> None:
        between, self._phase = self._phase == "between", "answer"
        if self._matcher is None or (between and not self._matcher.validate_tokens([token])):
            return  # newlines, or the mask would not have allowed it
        self._matcher.consume_token(token)

    def _reason(self, token: int) -> None:
        close = CLOSE.encode()
        self._tail += self._grammars.token_bytes(token)
        _, found, rest = self._tail.partition(close)
        self._tail = self._tail[-len(close) :]
        if not found:
            return
        self._phase = "answer" if rest else "between"
        if rest.strip() and self._matcher is not None:  # one token that closes the block and begins more
            self._matcher.consume_tokens(self._grammars.text.encode(rest.decode("utf-8", "replace")))

    def _words(self) -> Words | None:
        if self._phase == "reasoning":
            return self._grammars.not_end
        if self._phase == "closing":
            return self._grammars.words({self._closing[-1]})
        if self._matcher is None:
            opens = self._phase == "start" and self._grammars.open_id is not None
            return self._grammars.not_open if opens and self._budget == 0 else None
        words: Words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        words = words[: (self._grammars.vocab_size + 31) // 32]
        if self._matcher.is_error():
            self.failure = f"the answer cannot follow its grammar any further: {complaint(self._matcher)}"
            log.warning("%s", self.failure)
            return np.zeros_like(words)
        if self._phase == "between":
            return words | self._grammars.newlines
        if self._phase == "start" and self._grammars.open_id is not None and self._budget != 0:
            return words | self._grammars.words({self._grammars.open_id})
        return words


def is_guided(params: SamplingParams) -> bool:
    """Whether an answer needs a GuidedState."""
    return params.grammar is not None or (params.reasoning_budget is not None and params.reasoning != "none")


class GuidedState(_native.SamplerState):
    """A sampler state whose mask follows a grammar and a budget of reasoning. Masks that take long are made
    on threads of ``grammars`` from its ``begin`` on, while the model computes the logits that they will be
    applied to; call ``settle`` before sampling."""

    def __init__(self, grammars: Grammars, params: SamplingParams, **sampling: Any) -> None:
        """``sampling``: parameters of SamplerState. Raises ValueError for those that oppose a grammar."""
        tokenizer: Future[LLTokenizer] | None = None
        if params.grammar is not None:
            _check(grammars, params)
            tokenizer = grammars.prepare()
        super().__init__(grammars.vocab_size, **sampling)
        self._grammars = grammars
        self._guide: Guide | None = None
        self._mask: Words | None = None  # the one that is set
        self._token: int | None = None  # accepted, and not yet taken in by the guide
        self._broken: str | None = None  # what an exception said while a mask was made
        self._task: Future[None] | None = grammars.pool.submit(self._begin, tokenizer, params)

    def _begin(self, tokenizer: Future[LLTokenizer] | None, params: SamplingParams) -> None:
        try:
            self._guide = Guide(self._grammars, tokenizer.result() if tokenizer else None, params)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """Allow nothing any more: this answer fails, and its neighbours in the step go on."""
        log.exception("a grammar could not be applied")
        self._broken = f"the grammar could not be applied: {error}"

    def accept(self, token: int) -> None:
        """Append one output token."""
        super().accept(token)
        self._token = token
        self._grammars.due(self)

    def wait_for(self, task: Future[None]) -> None:
        """``task`` will call ``advance``."""
        self._task = task

    def advance(self) -> None:
        """Make the mask for what comes after the newest token."""
        token, self._token = self._token, None
        if token is None or self._guide is None or self._broken is not None:
            return
        start = time.perf_counter()
        try:
            self._guide.accept(token)
        except Exception as error:
            self._break(error)
        self._grammars.took(time.perf_counter() - start)

    @property
    def failure(self) -> str | None:
        """Why its mask allows nothing any more."""
        return self._broken or (self._guide.failure if self._guide is not None else None)

    def settle(self) -> None:
        """Wait until the mask fits the newest token, or make it here if nobody has begun."""
        if self._task is not None:
            self._task.result()
            self._task = None
        self.advance()
        words = self._grammars.nothing if self._broken or self._guide is None else self._guide.words
        if words is self._mask:
            return
        self._mask = words
        if words is None:
            self.clear_mask()
        else:
            self.set_mask(words)


def _advance_all(states: list[GuidedState]) -> None:
    for state in states:
        state.advance()


def _check(grammars: Grammars, params: SamplingParams) -> None:
    if params.ignore_eos or params.min_tokens:
        name = "ignore_eos" if params.ignore_eos else "min_tokens"
        raise ValueError(f"{name} cannot be combined with a grammar, which decides where the answer ends")
    if not grammars.text.eos_ids:
        raise ValueError("grammar: this model has no token that ends a text, so it cannot follow grammars")


def settle(states: Sequence[_native.SamplerState]) -> None:
    """Make the masks of all states ready."""
    for state in states:
        if isinstance(state, GuidedState):
            state.settle()
