"""Which tokens run in the next step: continuous batching with chunked prefill, fair and deterministic.

- Every running decode is in every step; prompts share what the token budget leaves (treadle.engine.budget).
- Half of that goes to the prompt whose user has had least service, half to the shortest: a long prompt always
  advances, a short one never waits for it.
- Requests wait in order of (priority, service of their user, arrival). Prompts that begin like one being read
  wait until those blocks are in the prefix cache, so that ``n`` answers cost one prefill.
- When KV runs out, the last in (priority, arrival) is preempted: it gives its blocks back, waits, and is
  recomputed from what the prefix cache kept. A request may also displace others of worse priority, or of a
  user who runs at least two more than its own.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from treadle.core import Output, Request, TokenLogprobs
from treadle.engine.batch import Batch
from treadle.engine.budget import Budget
from treadle.engine.interfaces import Admission, BadRequest, SampleResult, StepRunner, check_request
from treadle.engine.kv.pool import BLOCK, BlockPool, blocks_for
from treadle.engine.kv.prefix import PrefixCache
from treadle.engine.sequence import Sequence, User

_ORDER = attrgetter("order")
_LOOKAHEAD = 32  # waiting requests per user that are looked at for one that need not wait for a prefix


class Scheduler:
    """Owns every request from ``add`` until its last output, and all KV blocks."""

    def __init__(
        self,
        runner: StepRunner,
        *,
        target_itl: float,
        max_queue: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert runner.max_tokens > runner.max_sequences, "a step must hold all decodes and some prefill"
        self._runner = runner
        self._clock = clock
        self._pool = BlockPool(runner.num_blocks)
        self.cache = PrefixCache(self._pool)
        self.budget = Budget(runner.max_tokens, runner.max_sequences, target_itl)
        self.admission = Admission(runner.max_sequences + max_queue)
        self.context = min(runner.context, runner.num_blocks * BLOCK)
        self.running: list[Sequence] = []  # in order; each has a slot
        self.preemptions = 0
        self._live: dict[str, Sequence] = {}
        self._users: dict[str, User] = {}
        self._reading: set[bytes] = set()  # names of blocks that running prompts will put into the cache
        self._slots = list(range(runner.max_sequences - 1, -1, -1))
        self._arrivals = 0
        self._batch = Batch(runner.max_tokens, runner.max_sequences)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._live) - len(self.running)

    @property
    def held_blocks(self) -> int:
        """KV blocks that running sequences hold."""
        return self._pool.num_blocks - self.cache.available

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises BadRequest, QueueFull."""
        if request.id in self._live:
            raise BadRequest(f"a request with id {request.id!r} is already running; ids must be unique")
        check_request(request, self.context, self._runner.vocab_size)
        params = request.params
        try:
            state = self._runner.new_state(request)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        self.admission.enter(request.user)
        user = self._users.get(request.user)
        if user is None:  # starts level with those who are here, without credit for having been away
            user = User(min((other.service for other in self._users.values()), default=0.0))
            self._users[request.user] = user
        user.inside += 1
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._runner.eos_ids
        limit = min(self.context, len(request.prompt_ids) + (params.max_tokens or self.context))
        self._arrivals += 1
        order = (request.priority, self._arrivals)
        sequence = Sequence(request, state, user, order, stop_ids, limit, self._clock())
        self._live[request.id] = sequence
        insort(user.waiting, sequence, key=_ORDER)

    def cancel(self, request_id: str) -> Output | None:
        """Free everything the request holds, at once. None if there is no such request (any more)."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        output = sequence.last_output("cancelled", self._clock())
        self._remove(sequence)
        return output

    def fail(self, sequence: Sequence, error: str) -> Output:
        """End a request with an error."""
        output = sequence.last_output("error", self._clock(), error=error)
        self._remove(sequence)
        return output

    def _remove(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self._leave_slot(sequence)
        else:
            sequence.user.waiting.remove(sequence)
        del self._live[sequence.request.id]
        name = sequence.request.user
        self.admission.leave(name)
        sequence.user.inside -= 1
        if not sequence.user.inside:
            del self._users[name]

    # ------------------------------------------------------------------ one step

    def schedule(self) -> Batch | None:
        """The next step, or None when there is nothing to run. Blocks and tables are ready when it
        returns.
        """
        self._admit()
        if not self.running:
            return None
        decodes = self._grow_decodes()
        self._batch.fill(decodes, self._plan_prefill(len(decodes)))
        return self._batch

    def update(self, batch: Batch, sampled: SampleResult) -> list[Output]:
        """Take the results of a step: one token per sequence in ``batch.sampled``."""
        for sequence, length in zip(batch.sequences, batch.lens, strict=True):
            sequence.computed += length
            sequence.user.service += length
            if sequence.computed // BLOCK > sequence.registered:
                self._register(sequence)
        tokens, logprobs, tops = sampled
        now = self._clock()
        choices = zip(batch.sampled, tokens.tolist(), logprobs.tolist(), tops, strict=True)
        return [
            self._accept(sequence, token, None if top is None else [TokenLogprobs(logprob, top)], now)
            for sequence, token, logprob, top in choices
        ]

    def _accept(
        self, sequence: Sequence, token: int, logprobs: list[TokenLogprobs] | None, now: float
    ) -> Output:
        if not sequence.first_token:
            sequence.first_token = now
        if token in sequence.stop_ids:
            output = sequence.last_output("stop", now, stop_token=token)
            self._remove(sequence)
            return output
        sequence.tokens.append(token)
        if len(sequence.tokens) < sequence.limit:
            sequence.state.accept(token)
            return Output(id=sequence.request.id, token_ids=[token], logprobs=logprobs)
        output = sequence.last_output("length", now)
        output.token_ids, output.logprobs = [token], logprobs
        self._remove(sequence)
        return output

    # ------------------------------------------------------------------ who runs

    def _admit(self) -> None:
        while self.waiting and (self._slots or self._may_displace()):
            candidate = self._next_waiting()
            if candidate is None:
                return
            sequence, matched = candidate
            if not self._make_room(sequence, matched):
                return
            self._start(sequence, matched)

    def _next_waiting(self) -> tuple[Sequence, list[int]] | None:
        """The first request that need not wait for a prefix being read, and its blocks in the prefix
        cache.
        """
        best: tuple[tuple[int, float, int], Sequence, list[int]] | None = None
        for user in self._users.values():
            for sequence in user.waiting[:_LOOKAHEAD]:
                key = (sequence.order[0], user.service, sequence.order[1])
                if best is not None and best[0] < key:
                    break
                sequence.hash_until(len(sequence.tokens) // BLOCK)
                limit = (len(sequence.tokens) - 1) // BLOCK  # the last token must run: it gives the logits
                matched = self.cache.match(sequence.hashes, limit)
                if len(matched) == limit or sequence.hashes[len(matched)] not in self._reading:
                    best = (key, sequence, matched)
                    break
        return best and best[1:]

    def _may_displace(self) -> bool:
        worst = self.running[-1].order[0]
        most = max(user.running for user in self._users.values())
        return any(
            user.waiting and (user.waiting[0].order[0] < worst or user.running + 2 <= most)
            for user in self._users.values()
        )

    def _make_room(self, sequence: Sequence, matched: list[int]) -> bool:
        """See that there are a slot and blocks for the whole prompt, displacing others if that is fair."""
        if not self.running:
            return True
        slots = len(self._slots)
        blocks = self.cache.available - self.cache.count_idle(matched)
        blocks -= self._growth(sequence) - len(matched) + sum(map(self._growth, self.running))
        kept = set(matched)
        victims: list[Sequence] = []
        left = {user: user.running for user in self._users.values()}
        for other in reversed(self.running):
            if slots and blocks >= 0:
                break
            worse = other.order[0] > sequence.order[0]
            equal = other.order[0] == sequence.order[0]
            if worse or (equal and left[other.user] >= left[sequence.user] + 2):
                victims.append(other)
                left[other.user] -= 1
                slots += 1
                blocks += self._growth(other)
                blocks += sum(self._pool.refs[block] == 1 for block in other.blocks if block not in kept)
        if not slots or blocks < 0:
            return False
        for victim in victims:
            self._preempt(victim)
        return True

    @staticmethod
    def _growth(sequence: Sequence) -> int:
        """Blocks that the sequence still needs for its prompt and one more block of output, at most its
        limit.
        """
        return blocks_for(min(len(sequence.tokens) + BLOCK, sequence.limit)) - len(sequence.blocks)

    def _start(self, sequence: Sequence, matched: list[int]) -> None:
        self.cache.hold(matched)
        sequence.slot = self._slots.pop()
        sequence.blocks = matched
        sequence.registered = len(matched)
        sequence.computed = len(matched) * BLOCK
        self._runner.tables[sequence.slot, : len(matched)] = matched
        self._reading.update(sequence.hashes[len(matched) :])
        if sequence.cached is None:
            sequence.cached = sequence.computed
            sequence.scheduled = self._clock()
        sequence.user.waiting.remove(sequence)
        sequence.user.running += 1
        insort(self.running, sequence, key=_ORDER)

    def _preempt(self, sequence: Sequence) -> None:
        self._leave_slot(sequence)
        insort(sequence.user.waiting, sequence, key=_ORDER)
        self.preemptions += 1

    def _leave_slot(self, sequence: Sequence) -> None:
        self.cache.release(sequence.blocks)
        self._reading.difference_update(sequence.hashes[sequence.registered :])
        self.running.remove(sequence)
        sequence.user.running -= 1
        self._slots.append(sequence.slot)
        sequence.slot = -1
        sequence.blocks = []
        sequence.registered = sequence.computed = 0

    # ------------------------------------------------------------------ what they run

    def _grow_decodes(self) -> list[Sequence]:
        """The decodes of this step, each with a block for its token. May preempt from the end of
        ``running``.
        """
        decodes = []
        for sequence in self.running.copy():
            if sequence.slot < 0:
                break  # preempted, like all that follow
            if sequence.pending != 1:
                continue
            if sequence.computed == len(sequence.blocks) * BLOCK:
                while not self.cache.available and sequence.slot >= 0:
                    self._preempt(self.running[-1])
                if sequence.slot < 0:
                    break
                self._extend(sequence)
            decodes.append(sequence)
        return decodes

    def _plan_prefill(self, decodes: int) -> dict[Sequence, int]:
        """Tokens to read of each prompt in this step, with blocks for them."""
        while prompts := [sequence for sequence in self.running if sequence.pending > 1]:
            chunks = self._split(prompts, self.budget.prefill_tokens(decodes))
            if chunks or decodes:
                return chunks
            self._preempt(self.running[-1])  # several prompts hold all blocks, and none can go on
        return {}

    def _split(self, prompts: list[Sequence], budget: int) -> dict[Sequence, int]:
        first = min(prompts, key=lambda s: (s.order[0], s.user.service, s.order[1]))
        shares = {first: self._reserve(first, min(first.pending, (budget + 1) // 2))}
        left = budget - shares[first]
        if len(prompts) > 1:
            prompts.sort(key=lambda s: (s.order[0], s is first, s.pending, s.order[1]))
        for sequence in prompts:
            had = shares.get(sequence, 0)
            shares[sequence] = self._reserve(sequence, min(sequence.pending, had + left))
            left -= shares[sequence] - had
            if not left:
                break
        return {sequence: share for sequence, share in shares.items() if share}

    def _reserve(self, sequence: Sequence, tokens: int) -> int:
        """Take blocks for that many more tokens; returns for how many there are some."""
        while len(sequence.blocks) * BLOCK < sequence.computed + tokens:
            if not self.cache.available:
                return len(sequence.blocks) * BLOCK - sequence.computed
            self._extend(sequence)
        return tokens

    def _extend(self, sequence: Sequence) -> None:
        block = self.cache.allocate()
        self._runner.tables[sequence.slot, len(sequence.blocks)] = block
        sequence.blocks.append(block)

    def _register(self, sequence: Sequence) -> None:
        """Put the blocks that this step has filled into the prefix cache."""
        full = sequence.computed // BLOCK
        sequence.hash_until(full)
        for i in range(sequence.registered, full):
            name = sequence.hashes[i]
            self._reading.discard(name)
            block = self.cache.register(name, sequence.parent_hash(i), sequence.blocks[i])
            if block != sequence.blocks[i]:
                sequence.blocks[i] = block
                self._runner.tables[sequence.slot, i] = block
        sequence.registered = full

    def check(self) -> None:
        """Raise AssertionError unless blocks, slots, queues and counts add up."""
        self.cache.check(sequence.blocks for sequence in self.running)
        assert self.running == sorted(self.running, key=_ORDER), "running sequences are out of order"
        taken = [sequence.slot for sequence in self.running]
        assert sorted(taken + self._slots) == list(range(self._runner.max_sequences)), (
            "slots are lost or shared"
        )
        waiting = [s for user in self._users.values() for s in user.waiting]
        assert len(waiting) == self.waiting == len({*waiting} - {*self.running}), (
            "a request is lost or queued twice"
        )
        assert self.admission.inside == len(self._live), "places and requests differ"
        assert sum(user.inside for user in self._users.values()) == len(self._live), (
            "users and requests differ"
        )
        due = {name for s in self.running for name in s.hashes[s.registered :]}
        assert self._reading <= due, "a prefix is awaited that nobody reads"
        for s in self.running:
            row = self._runner.tables[s.slot, : len(s.blocks)].tolist()
            assert row == s.blocks, f"the block table of request {s.request.id} differs from its blocks"
