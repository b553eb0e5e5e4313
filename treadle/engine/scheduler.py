"""Which tokens run in the next step: continuous batching with chunked prefill, fair and deterministic.

- Every running decode is in every step; prompts share what the token budget leaves (treadle.engine.budget).
- Half of that goes to the prompt whose user has had least service, half to the shortest: a long prompt always
  advances, a short one never waits for it.
- A step that runs decodes only may check guesses of their next tokens (treadle.engine.spec).
- When KV runs out, the last in (priority, arrival) is preempted and recomputed later.

Who gets a slot at all is decided in treadle.engine.places.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from treadle.core import Output, Request, TokenLogprobs
from treadle.engine.batch import Batch
from treadle.engine.budget import Budget
from treadle.engine.interfaces import Admission, BadRequest, StepRunner, check_request
from treadle.engine.kv.pool import BLOCK
from treadle.engine.kv.spill import Spill
from treadle.engine.places import Places
from treadle.engine.sequence import Sequence
from treadle.engine.spec.drafter import Drafter, Guess

_RESTORING = 0.02  # seconds per step that loading a prompt's KV from disk may take from running requests


class Scheduler:
    """Owns every request from ``add`` until its last output, and all KV blocks."""

    def __init__(
        self,
        runner: StepRunner,
        *,
        target_itl: float,
        max_queue: int,
        drafter: Drafter | None = None,
        spill: Spill | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``drafter``: guesses tokens; None: nobody does."""
        assert runner.max_tokens > runner.max_sequences, "a step must hold all decodes and some prefill"
        self._runner = runner
        self._clock = clock
        self.places = Places(runner, clock, spill)
        self.cache = self.places.cache
        self.budget = Budget(runner.max_tokens, runner.max_sequences, target_itl)
        self._drafter = drafter
        self.admission = Admission(runner.max_sequences + max_queue)
        self.context = min(runner.context, runner.num_blocks * BLOCK)
        self.running = self.places.running
        self._live: dict[str, Sequence] = {}
        self._arrivals = 0
        self._batch = Batch(runner.max_tokens, runner.max_sequences)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return self.places.waiting

    @property
    def preemptions(self) -> int:
        """How often a sequence has lost its slot so far."""
        return self.places.preemptions

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises BadRequest, QueueFull."""
        if request.id in self._live:
            raise BadRequest(f"a request with id {request.id!r} is already running; ids must be unique")
        check_request(request, self.context, self._runner.vocab_size, self._runner.embeds)
        params = request.params
        try:
            state = self._runner.new_state(request)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        self.admission.enter(request.user)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._runner.eos_ids
        limit = min(self.context, len(request.prompt_ids) + (params.max_tokens or self.context))
        self._arrivals += 1
        order = (request.priority, self._arrivals)
        user = self.places.join(request.user)
        sequence = Sequence(request, state, user, order, stop_ids, limit, self._clock())
        if self._drafter is not None:
            sequence.speculate()
        self._live[request.id] = sequence
        self.places.wait(sequence)

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

    def embedded(self, sequence: Sequence, embedding: bytes) -> Output:
        """End a request whose prompt has been read with its embedding."""
        sequence.first_token = self._clock()
        output = sequence.last_output("stop", sequence.first_token)
        output.embedding = embedding
        self._remove(sequence)
        return output

    def _remove(self, sequence: Sequence) -> None:
        self.places.remove(sequence)
        self.admission.leave(sequence.request.user)
        del self._live[sequence.request.id]

    # ------------------------------------------------------------------ one step

    def schedule(self) -> Batch | None:
        """The next step, or None when there is nothing to run. Blocks and tables are ready when it
        returns.
        """
        self.places.admit()
        if not self.running:
            return None
        self.places.restore(_RESTORING)
        decodes = self._grow_decodes()
        chunks = self._plan_prefill(len(decodes))
        if not decodes and not chunks:
            return None  # every prompt waits for more of itself from disk
        self._batch.fill(decodes, chunks, self._draft(decodes))
        return self._batch

    def computed(self, batch: Batch) -> None:
        """The step has run: its tokens have their KV. Guesses count only once they are confirmed."""
        for i, (sequence, length) in enumerate(zip(batch.sequences, batch.lens, strict=True)):
            sequence.user.service += length
            self._advance(sequence, 1 if i < batch.decodes else length)

    def confirm(self, sequence: Sequence) -> None:
        """The token that was accepted last is the one that was guessed, so it has its KV already. What wrong
        guesses have written is overwritten by the tokens that take their positions.
        """
        self._advance(sequence, 1)

    def _advance(self, sequence: Sequence, tokens: int) -> None:
        sequence.computed += tokens
        if sequence.computed // BLOCK > sequence.registered:
            self.places.register(sequence)

    def accept(self, sequence: Sequence, token: int, logprobs: list[TokenLogprobs] | None) -> Output:
        """Take the token that was chosen; the last one ends the request."""
        now = self._clock()
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
            while sequence.slot >= 0 and not self.places.reserve(sequence, 1):
                self.places.preempt(self.running[-1])
            if sequence.slot >= 0:
                decodes.append(sequence)
        return decodes

    def _draft(self, decodes: list[Sequence]) -> dict[Sequence, Guess]:
        """Guesses, with blocks for them, when nothing but ``decodes`` is there to be run."""
        if self._drafter is None or len(decodes) < len(self.running):
            return {}
        drafts = self._drafter.propose(decodes, self.budget.decode_seconds(len(decodes)))
        rooms = {s: self.places.reserve(s, 1 + len(draft.tokens)) - 1 for s, draft in drafts.items()}
        return {s: Guess(drafts[s].tokens[:room], drafts[s].by_model) for s, room in rooms.items() if room}

    def measured(self, batch: Batch, seconds: float) -> None:
        """Learn from the time that a step took."""
        if batch.drafted and self._drafter is not None:
            self._drafter.record(batch.drafted, self.budget.decode_seconds(batch.decodes), seconds)
        else:
            self.budget.record(batch.decodes, batch.prefill, seconds)

    def _plan_prefill(self, decodes: int) -> dict[Sequence, int]:
        """Tokens to read of each prompt in this step, with blocks for them."""
        while prompts := [
            sequence for sequence in self.running if sequence.pending > 1 and not sequence.restoring
        ]:
            waiting = sum(sequence.pending for sequence in prompts)
            chunks = self._split(prompts, self.budget.prefill_tokens(decodes, waiting))
            if chunks or decodes:
                return chunks
            self.places.preempt(self.running[-1])  # several prompts hold all blocks, and none can go on
        return {}

    def _split(self, prompts: list[Sequence], budget: int) -> dict[Sequence, int]:
        first = min(prompts, key=lambda s: (s.order[0], s.user.service, s.order[1]))
        shares = {first: self.places.reserve(first, min(first.pending, (budget + 1) // 2))}
        left = budget - shares[first]
        if len(prompts) > 1:
            prompts.sort(key=lambda s: (s.order[0], s is first, s.pending, s.order[1]))
        for sequence in prompts:
            had = shares.get(sequence, 0)
            shares[sequence] = self.places.reserve(sequence, min(sequence.pending, had + left))
            left -= shares[sequence] - had
            if not left:
                break
        return {sequence: share for sequence, share in shares.items() if share}

    def check(self) -> None:
        """Raise AssertionError unless blocks, slots, queues and counts add up."""
        self.places.check()
        assert self.admission.inside == len(self._live) == self.waiting + len(self.running), (
            "a request is lost"
        )
