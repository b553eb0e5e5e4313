"""Answers that must follow a grammar: which tokens may come next, worked out beside the steps of the model.

A grammar is what ``llguidance`` takes: a text in its Lark dialect, or its JSON form.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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


class Grammars:
    """Grammars over the tokens of one model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """``vocab_size``: number of logits, which may be more than the tokenizer has ids."""
        self.vocab_size = vocab_size
        self.text = tokenizer
        self.open_id = tokenizer.token_id(OPEN)
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._loading: Future[LLTokenizer] | None = None

    def prepare(self) -> Future[LLTokenizer]:
        """Begin to index the vocabulary, which takes about a second, unless that has been done."""
        if self._loading is None:
            self._loading = self.pool.submit(self._load)
        return self._loading

    def _load(self) -> LLTokenizer:
        self.not_end = self.words(set(range(self.vocab_size)) - self.text.eos_ids)
        newlines = [id for id in range(self.text.vocab_size) if not self.token_bytes(id).strip(b"\n")]
        self.newlines = self.words({id for id in newlines if self.token_bytes(id)})
        return index(self.text, self.vocab_size)

    def words(self, ids: set[int]) -> Words:
        """A mask that allows ``ids``."""
        bits = np.zeros((self.vocab_size + 31) // 32 * 32, np.uint8)
        bits[list(ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of a token; none for ids that only pad the vocabulary."""
        return self.text.token_bytes(id) if id < self.text.vocab_size else b""


class Guide:
    """Follows one answer. ``accept`` every token; ``words`` then allows what may follow.

    Reasoning is free, except that the text cannot end in it; the grammar rules what comes after. Between the
    two one token of newlines is free, as models are used to. When the grammar breaks or a token does not fit,
    nothing is allowed any more, so that the answer fails rather than going on without its grammar.
    """

    def __init__(self, grammars: Grammars, tokenizer: LLTokenizer, params: SamplingParams) -> None:
        assert params.grammar is not None
        self._grammars = grammars
        self._matcher = matcher(tokenizer, params.grammar)
        self.failure: str | None = None  # why nothing is allowed any more
        self._phase = {"none": "answer", "open": "reasoning", "may_open": "start"}[params.reasoning]
        self._tail = b""  # end of the reasoning, which may hold the beginning of its closing tag
        self.words = self._words()

    def accept(self, token: int) -> None:
        """Take the next token."""
        if self._phase == "reasoning":
            self._reason(token)
        elif self._phase == "start" and token == self._grammars.open_id:
            self._phase = "reasoning"
        elif self._phase == "between" and not self._matcher.validate_tokens([token]):
            self._phase = "answer"  # newlines, or the mask would not have allowed it
        else:
            self._phase = "answer"
            self._matcher.consume_token(token)
        self.words = self._words()

    def _reason(self, token: int) -> None:
        close = CLOSE.encode()
        self._tail += self._grammars.token_bytes(token)
        _, found, rest = self._tail.partition(close)
        self._tail = self._tail[-len(close) :]
        if not found:
            return
        self._phase = "answer" if rest else "between"
        if rest.strip():  # one token that closes the block and begins the answer
            self._matcher.consume_tokens(self._grammars.text.encode(rest.decode("utf-8", "replace")))

    def _words(self) -> Words:
        if self._phase == "reasoning":
            return self._grammars.not_end
        words: Words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        words = words[: (self._grammars.vocab_size + 31) // 32]
        if self._matcher.is_error():
            self.failure = f"the answer cannot follow its grammar any further: {complaint(self._matcher)}"
            log.warning("%s", self.failure)
            return np.zeros_like(words)
        if self._phase == "between":
            return words | self._grammars.newlines
        if self._phase == "start" and self._grammars.open_id is not None:
            return words | self._grammars.words({self._grammars.open_id})
        return words


class GuidedState(_native.SamplerState):
    """A sampler state whose mask follows a grammar. The masks are made on the threads of ``grammars``, while
    the model computes the logits that they will be applied to; call ``settle`` before sampling."""

    def __init__(self, grammars: Grammars, params: SamplingParams, **sampling: Any) -> None:
        """``sampling``: parameters of SamplerState. Raises ValueError for those that oppose a grammar."""
        if params.ignore_eos or params.min_tokens:
            name = "ignore_eos" if params.ignore_eos else "min_tokens"
            raise ValueError(f"{name} cannot be combined with a grammar, which decides where the answer ends")
        if not grammars.text.eos_ids:
            raise ValueError(
                "grammar: this model has no token that ends a text, so it cannot follow grammars"
            )
        super().__init__(grammars.vocab_size, **sampling)
        self._grammars = grammars
        self._guide: Guide | None = None
        tokenizer = grammars.prepare()
        self._pending: Future[None] | None = grammars.pool.submit(self._begin, tokenizer, params)

    def _begin(self, tokenizer: Future[LLTokenizer], params: SamplingParams) -> None:
        self._guide = Guide(self._grammars, tokenizer.result(), params)

    def accept(self, token: int) -> None:
        """Append one output token."""
        super().accept(token)
        assert self._guide is not None
        self._pending = self._grammars.pool.submit(self._guide.accept, token)

    @property
    def failure(self) -> str | None:
        """Why its mask allows nothing any more."""
        return self._guide.failure if self._guide is not None else None

    def settle(self) -> None:
        """Wait until the mask fits the last token."""
        if self._pending is None:
            return
        self._pending.result()
        self._pending = None
        assert self._guide is not None
        self.set_mask(self._guide.words)


def settle(states: Sequence[_native.SamplerState]) -> None:
    """Make the masks of all states ready."""
    for state in states:
        if isinstance(state, GuidedState):
            state.settle()
