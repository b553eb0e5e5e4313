"""One request inside the engine: its tokens, its KV blocks and where its time went."""

from __future__ import annotations

from array import array

from treadle.core import FinishReason, Output, Request, Timing, Usage
from treadle.engine.interfaces import SamplerState
from treadle.engine.kv.pool import BLOCK
from treadle.engine.kv.prefix import block_hash, root_hash
from treadle.engine.spec.lookup import Lookup


class User:
    """One fairness group: every request with the same ``Request.user`` that is inside the engine."""

    __slots__ = ("inside", "running", "service", "waiting")

    def __init__(self, service: float) -> None:
        self.service = service  # tokens computed for this group; who has had least goes first
        self.inside = 0
        self.running = 0
        self.waiting: list[Sequence] = []  # in order


class Sequence:
    """Owned by the scheduler from ``add`` until the last output."""

    __slots__ = (
        "_tail", "arrived", "blocks", "cached", "computed", "first_token", "hashes", "limit", "lookup",
        "order", "registered", "request", "restoring", "scheduled", "slot", "state", "stop_ids", "tail_end",
        "tokens", "user",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        state: SamplerState,
        user: User,
        order: tuple[int, int],
        stop_ids: frozenset[int],
        limit: int,
        now: float,
    ) -> None:
        self.request = request
        self.state = state
        self.user = user
        self.order = order  # (priority, arrival): lower goes first
        self.stop_ids = stop_ids
        self.limit = limit  # tokens of prompt and output after which it ends with "length"
        self.tokens = array("i", request.prompt_ids)  # prompt and output
        self.tail_end = len(self.tokens) - 1  # of the prompt; its last token must run: it gives the logits
        self._tail: bytes | None = None
        self.slot = -1  # -1: waiting
        self.blocks: list[int] = []  # held, in order of position
        self.computed = 0  # tokens whose KV is in the blocks
        self.hashes: list[bytes] = []  # names of full blocks, as far as they were needed
        self.registered = 0  # leading blocks that the prefix cache knows
        self.restoring = False  # while blocks of its prompt are loaded from disk
        self.cached: int | None = None  # prompt tokens found in the prefix cache when first scheduled
        self.lookup: Lookup | None = None  # guesses of its next tokens, if it may be speculated
        self.arrived = now
        self.scheduled = 0.0
        self.first_token = 0.0

    def speculate(self) -> None:
        """Let its tokens be guessed."""
        self.lookup = Lookup(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens to run before the next one can be chosen: 1 while decoding."""
        return len(self.tokens) - self.computed

    def hash_until(self, blocks: int) -> None:
        """Make sure that the names of the first ``blocks`` blocks, which must be full, are known."""
        for i in range(len(self.hashes), blocks):
            tokens = self.tokens[i * BLOCK : (i + 1) * BLOCK].tobytes()
            self.hashes.append(block_hash(self.parent_hash(i), tokens))

    @property
    def tail_block(self) -> int:
        """Full blocks before its tail: the tokens of the prompt that fill no block, without the last one."""
        return self.tail_end // BLOCK

    @property
    def tail(self) -> bytes:
        """The name of its tail; empty if there is none."""
        if self._tail is None:
            tokens = self.tokens[self.tail_block * BLOCK : self.tail_end].tobytes()
            self.hash_until(self.tail_block)
            self._tail = block_hash(self.parent_hash(self.tail_block), tokens) if tokens else b""
        return self._tail

    def parent_hash(self, block: int) -> bytes:
        """The name that precedes block number ``block``."""
        return self.hashes[block - 1] if block else root_hash(self.request.cache_salt)

    def last_output(
        self, reason: FinishReason, now: float, stop_token: int | None = None, error: str | None = None
    ) -> Output:
        """The output that ends this request, without tokens."""
        prompt = len(self.request.prompt_ids)
        usage = Usage(
            prompt_tokens=prompt, completion_tokens=len(self.tokens) - prompt, cached_tokens=self.cached or 0
        )
        timing = Timing()
        if self.first_token:
            timing.ttft = self.first_token - self.arrived
            timing.prefill_s = self.first_token - self.scheduled
            timing.decode_s = now - self.first_token
        return Output(
            id=self.request.id,
            token_ids=[],
            finish_reason=reason,
            stop_token=stop_token,
            usage=usage,
            timing=timing,
            error=error,
        )


def join_outputs(earlier: Output | None, later: Output) -> Output:
    """Both as one, in ``later``; uses up ``earlier``."""
    if earlier is not None:
        earlier.token_ids.extend(later.token_ids)
        later.token_ids = earlier.token_ids
        if earlier.logprobs is not None:
            earlier.logprobs.extend(later.logprobs or ())
            later.logprobs = earlier.logprobs
    return later
