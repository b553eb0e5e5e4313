"""The engine in one process: add requests, call ``step`` while ``has_work``, pass the outputs on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from treadle.core import Output, Request, TokenLogprobs
from treadle.engine.batch import Batch, Turn
from treadle.engine.interfaces import BadRequest, SampleResult, StepRunner
from treadle.engine.kv.pool import blocks_for
from treadle.engine.kv.spill import Spill
from treadle.engine.scheduler import Scheduler
from treadle.engine.sequence import join_outputs
from treadle.engine.spec.drafter import Drafter
from treadle.engine.spec.model import DraftModel, DraftRunner


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine can be told."""

    target_itl: float = 0.1  # seconds between two tokens of a running request that prefill should not exceed
    max_queue: int = 256  # requests that may wait besides those that run
    speculation: bool = True  # guess tokens where that pays, by prompt lookup and a draft model
    read_limit: float = 0.0  # bytes per second that the machine can read; 0: not known


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller must know to check requests before sending them, and what the engine runs with."""

    context: int  # tokens of prompt and output together
    vocab_size: int
    max_sequences: int
    max_requests: int  # running and waiting
    num_blocks: int
    threads: int
    isa: str  # level of the kernels
    embeds: bool  # makes embeddings of prompts instead of continuing them
    weight_bytes: int  # of memory for the packed weights, those of a draft model included
    cache_bytes: int  # of memory for their KV caches, taken from the system as it is used


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot. Names without a unit are counts; those ending in ``_total`` only grow."""

    running: int = 0
    queued: int = 0
    kv_blocks: int = 0
    kv_blocks_held: int = 0  # by running requests
    kv_blocks_cached: int = 0  # kept for reuse only
    requests_total: int = 0
    preemptions_total: int = 0
    prompt_tokens_total: int = 0  # of requests that have ended
    cached_tokens_total: int = 0  # of these, found in the prefix cache
    output_tokens_total: int = 0
    steps_total: int = 0
    step_seconds_total: float = 0.0
    step_tokens_total: int = 0  # prompt tokens, decodes and guesses computed, recomputation included
    drafted_tokens_total: int = 0  # guesses that steps have checked
    accepted_tokens_total: int = 0  # of these, those that came true
    model_drafted_tokens_total: int = 0  # guesses of the draft model among those checked
    model_accepted_tokens_total: int = 0
    model_draft_seconds_total: float = 0.0  # that the draft model has taken, between steps
    read_bytes_total: int = 0  # that the steps had to read, see StepRunner.step_bytes
    read_bytes_per_second: float = 0.0  # in the newest steps
    read_limit_bytes_per_second: float = 0.0  # of the machine; 0: not known
    read_share: float = 0.0  # the one over the other


class Engine:
    """Drives a runner. Not thread-safe."""

    def __init__(
        self,
        runner: StepRunner,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
        spill: Spill | None = None,
        draft: DraftRunner | None = None,
    ) -> None:
        """``spill``: where KV blocks outlive the engine; closed with it. ``draft``: of a smaller model that
        guesses tokens.
        """
        self._spill = spill
        self._runner = runner
        self._clock = clock
        self._draft = None
        if draft is not None:
            share = draft.weight_bytes / max(runner.weight_bytes, 1)
            self._draft = DraftModel(draft, clock, share)
        self._scheduler = Scheduler(
            runner,
            target_itl=config.target_itl,
            max_queue=config.max_queue,
            drafter=Drafter(runner.max_sequences, self._draft) if config.speculation else None,
            spill=spill,
            clock=clock,
        )
        self._ended: list[Output] = []  # last outputs that no step has returned yet
        self._stats = EngineStats(kv_blocks=runner.num_blocks, read_limit_bytes_per_second=config.read_limit)
        self._read = (0, 0.0)  # read_bytes_total and step_seconds_total of the snapshot before
        self.info = EngineInfo(
            context=self._scheduler.context,
            vocab_size=runner.vocab_size,
            max_sequences=runner.max_sequences,
            max_requests=self._scheduler.admission.limit,
            num_blocks=runner.num_blocks,
            threads=runner.threads,
            isa=runner.isa,
            embeds=runner.embeds,
            weight_bytes=runner.weight_bytes + (draft.weight_bytes if draft else 0),
            cache_bytes=runner.cache_bytes + (draft.cache_bytes if draft else 0),
        )

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would compute or return anything."""
        return bool(self._scheduler.running or self._scheduler.waiting or self._ended)

    def add(self, request: Request) -> None:
        """Queue a request. Raises BadRequest if it can never run, QueueFull if too many are inside."""
        self._scheduler.add(request)
        self._stats.requests_total += 1

    def cancel(self, request_id: str) -> None:
        """Free what the request holds, at once; the next step returns its last output. Unknown ids are
        ignored.
        """
        output = self._scheduler.cancel(request_id)
        if output is not None:
            self._ended.append(output)

    def step(self) -> list[Output]:
        """Compute one step for all running requests; at most one output per request."""
        batch = self._scheduler.schedule()
        outputs, self._ended = self._ended, []
        if batch is not None:
            start = self._clock()
            self._runner.run(batch.tokens, batch.query_lens, batch.past_lens, batch.slots, batch.logits_rows)
            outputs += self._embed(batch) if self._runner.embeds else self._choose(batch)
            self._measure(batch, self._clock() - start)
        self._count(outputs)
        return outputs

    def _embed(self, batch: Batch) -> list[Output]:
        """The last output of every sequence whose prompt ends in this step."""
        self._scheduler.computed(batch)
        if not batch.turns:
            return []
        vectors = self._runner.embed([turn.row for turn in batch.turns])
        return [
            self._scheduler.embedded(turn.sequence, vector.astype("<f4").tobytes())
            for turn, vector in zip(batch.turns, vectors, strict=True)
        ]

    def _choose(self, batch: Batch) -> list[Output]:
        """The tokens of a step, one output per sequence. Each chooses from its first row, and goes on to the
        next one as long as it chooses what was guessed: a guess decides which rows are used, never what is
        chosen from them.
        """
        scheduler = self._scheduler
        scheduler.computed(batch)
        outputs: dict[str, Output] = {}
        turns, ahead = batch.turns, 0
        while turns:
            turns, (tokens, logprobs, tops), failed = self._sample(turns, ahead)
            for turn, error in failed:
                output = scheduler.fail(turn.sequence, error)
                outputs[output.id] = join_outputs(outputs.get(output.id), output)
            going_on = []
            for turn, token, logprob, top in zip(
                turns, tokens.tolist(), logprobs.tolist(), tops, strict=True
            ):
                output = scheduler.accept(
                    turn.sequence, token, None if top is None else [TokenLogprobs(logprob, top)]
                )
                outputs[output.id] = join_outputs(outputs.get(output.id), output)
                if output.finish_reason is None and turn.draft[ahead : ahead + 1] == [token]:
                    scheduler.confirm(turn.sequence)
                    going_on.append(turn)
            self._stats.accepted_tokens_total += len(going_on)
            self._stats.model_accepted_tokens_total += sum(turn.by_model for turn in going_on)
            turns, ahead = going_on, ahead + 1
        return list(outputs.values())

    def _sample(
        self, turns: list[Turn], ahead: int
    ) -> tuple[list[Turn], SampleResult, list[tuple[Turn, str]]]:
        """Who chooses, and what, from the row that is ``ahead`` of their first; and for whom nothing is left
        to choose, with the error.
        """
        failed: list[tuple[Turn, str]] = []
        try:
            return turns, self._sample_rows(turns, ahead), failed
        except ValueError as error:
            picks = set(getattr(error, "picks", ()))
            if not picks:
                raise
            states = {i: turns[i].sequence.state for i in sorted(picks)}
            failed = [(turns[i], getattr(s, "failure", None) or str(error)) for i, s in states.items()]
        kept = [turn for i, turn in enumerate(turns) if i not in picks]
        return kept, self._sample_rows(kept, ahead), failed

    def _sample_rows(self, turns: list[Turn], ahead: int) -> SampleResult:
        return self._runner.sample(
            [turn.row + ahead for turn in turns], [turn.sequence.state for turn in turns]
        )

    def _measure(self, batch: Batch, seconds: float) -> None:
        self._scheduler.measured(batch, seconds)
        self._stats.drafted_tokens_total += batch.drafted
        self._stats.model_drafted_tokens_total += batch.drafted_by_model
        self._stats.steps_total += 1
        self._stats.step_seconds_total += seconds
        self._stats.step_tokens_total += len(batch.tokens)
        read = self._runner.step_bytes(batch.query_lens, batch.past_lens, batch.logits_rows)
        self._stats.read_bytes_total += read

    def _count(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.usage is not None:
                self._stats.prompt_tokens_total += output.usage.prompt_tokens
                self._stats.cached_tokens_total += output.usage.cached_tokens
            self._stats.output_tokens_total += len(output.token_ids)

    def use_threads(self, count: int) -> None:
        """Run steps on that many of the threads that the engine was loaded with, from the next one on."""
        self._runner.use_threads(count)

    def stats(self) -> EngineStats:
        """The current numbers; the object is reused by the next call."""
        stats, scheduler = self._stats, self._scheduler
        stats.running = len(scheduler.running)
        stats.queued = scheduler.waiting
        stats.kv_blocks_held = scheduler.cache.held
        stats.kv_blocks_cached = scheduler.cache.idle
        stats.preemptions_total = scheduler.preemptions
        if self._draft is not None:
            stats.model_draft_seconds_total = self._draft.seconds
        read, seconds = self._read
        if stats.step_seconds_total > seconds:
            rate = (stats.read_bytes_total - read) / (stats.step_seconds_total - seconds)
            stats.read_bytes_per_second = rate
            stats.read_share = rate / (stats.read_limit_bytes_per_second or math.inf)
            self._read = (stats.read_bytes_total, stats.step_seconds_total)
        return stats

    @contextmanager
    def lend(self, tokens: int) -> Iterator[int]:
        """A slot and KV blocks for ``tokens`` tokens outside of any request, for evaluation while idle."""
        if self.has_work:
            raise BadRequest("the engine is busy; wait until its requests have ended")
        cache = self._scheduler.cache
        blocks = [cache.allocate() for _ in range(blocks_for(tokens))]
        self._runner.tables[0, : len(blocks)] = blocks
        try:
            yield 0
        finally:
            cache.release(blocks)

    def close(self) -> None:
        """Write to disk what is still to be written there."""
        if self._spill is not None:
            self._spill.close()

    def check(self) -> None:
        """Raise AssertionError unless blocks, slots, queues and counts add up. For idle moments and tests."""
        self._scheduler.check()
        if self._draft is not None:
            self._draft.check()
