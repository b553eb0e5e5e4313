"""What the scheduler drives, what a request must satisfy, and how many may be inside at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.core import Request, TreadleError

Ids = NDArray[np.int32]

# Tokens int32 [n], log-probabilities float32 [n] (NaN if not asked for), and per choice the most likely
# (id, log-probability) pairs or None; as treadle._native.Sampler.sample returns them.
SampleResult = tuple[Ids, NDArray[np.float32], Items[list[tuple[int, float]] | None]]


class SamplerState(Protocol):
    """What one request brings to the choice of its next token, such as treadle._native.SamplerState."""

    def accept(self, token: int, /) -> None:
        """Append one output token."""
        ...


class StepRunner(Protocol):
    """Runs one step of a model over sequences that live in slots. All arrays are int32 and only read."""

    max_tokens: int  # tokens per step at most; more than max_sequences
    max_sequences: int  # slots
    context: int  # tokens per sequence at most
    num_blocks: int  # KV blocks of treadle.engine.kv.pool.BLOCK tokens
    vocab_size: int
    eos_ids: frozenset[int]
    threads: int
    isa: str  # level of the kernels
    weight_bytes: int  # of memory for the packed weights
    cache_bytes: int  # of memory for the KV cache, taken from the system as it is used
    embeds: bool  # gives embeddings of prompts instead of logits
    tables: Ids  # [max_sequences, blocks per sequence]: row ``slot`` names the blocks of the sequence there

    def run(self, tokens: Ids, query_lens: Ids, past_lens: Ids, slots: Ids, logits_rows: Ids, /) -> None:
        """Compute S sequences at once: the KV of ``tokens`` [T] and the logits of some of them.

        Sequence s brings ``query_lens[s]`` tokens (they follow each other in ``tokens``) after
        ``past_lens[s]`` earlier ones whose KV is in the blocks of row ``slots[s]`` of ``tables``.
        ``logits_rows`` [R]: indices into ``tokens`` of the rows whose logits are wanted.
        """
        ...

    def step_bytes(self, query_lens: Ids, past_lens: Ids, logits_rows: Ids, /) -> int:
        """Bytes that such a step must at least read from memory: weights and the KV of each sequence once."""
        ...

    def sample(self, rows: Items[int], states: Items[Any], /) -> SampleResult:
        """Choose one token per state (of those that ``new_state`` made); state i reads row ``rows[i]``
        (0..R-1) of the last run's logits.

        A ValueError with an attribute ``picks`` (indices into ``states``) says that for these nothing is left
        to choose; the others may then be sampled again.
        """
        ...

    def copy_block(self, source: int, target: int, /) -> None:
        """Put the content of a KV block into another one."""
        ...

    def use_threads(self, count: int, /) -> None:
        """Run on that many of the ``threads``, from the next step on."""
        ...

    def embed(self, rows: Items[int], /) -> NDArray[np.float32]:
        """The embeddings [n, hidden], of length 1, of these rows (0..R-1) of the last run; only of a runner
        that ``embeds``.
        """
        ...

    def new_state(self, request: Request, /) -> SamplerState:
        """State of a new request. Raises ValueError naming a parameter out of range."""
        ...


class QueueFull(TreadleError):
    """Too many requests are inside; the caller should answer 429 and ask to try again."""


class BadRequest(TreadleError):
    """The request can never run on this engine."""


class TooMany(BadRequest):
    """More requests at once than this engine ever takes."""


class Admission:
    """Bounds the requests inside an engine. No named user may take the last quarter of the places."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside = 0
        self._by_user: Counter[str] = Counter()

    def enter(self, user: str, count: int = 1) -> None:
        """Take ``count`` places, or none: raises QueueFull, and TooMany if waiting would not help."""
        most = max(1, self.limit * 3 // 4) if user else self.limit
        if count > most:
            raise TooMany(f"{count} answers at once are more than this server takes; ask for at most {most}")
        if self.inside + count > self.limit:
            raise QueueFull(
                f"{self.inside} of {self.limit} places for requests are taken and {count} more are needed; "
                "try again later"
            )
        if user and self._by_user[user] + count > most:
            raise QueueFull(
                f"{self._by_user[user]} requests of this user are in work and {count} more would pass the "
                f"limit of {most}; try again later"
            )
        self.inside += count
        self._by_user[user] += count

    def leave(self, user: str) -> None:
        """Give the place back."""
        self.inside -= 1
        self._by_user[user] -= 1
        if not self._by_user[user]:
            del self._by_user[user]


def check_request(request: Request, context: int, vocab_size: int, embeds: bool = False) -> None:
    """Raise BadRequest unless prompt and answer fit. ``context``: tokens of prompt and output together.
    ``embeds``: there is no output.
    """
    ids, params = request.prompt_ids, request.params
    if not ids:
        raise BadRequest("the prompt is empty; it must have at least one token")
    if len(ids) > context or (len(ids) == context and not embeds):
        raise BadRequest(
            f"the prompt has {len(ids)} tokens, but the context holds {context} tokens of prompt and answer "
            "together; shorten the prompt or serve the model with a larger context"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(id for id in ids if not 0 <= id < vocab_size)
        raise BadRequest(f"token id {wrong} of the prompt is not in the vocabulary of {vocab_size} tokens")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise BadRequest(f"max_tokens is {params.max_tokens}; it must be at least 1")
    room = min(params.max_tokens or context, context - len(ids))
    if params.min_tokens > room:
        raise BadRequest(
            f"min_tokens is {params.min_tokens}, but max_tokens and the context leave {room} tokens for the "
            "answer; lower min_tokens"
        )
