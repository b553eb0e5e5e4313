"""Speed of the engine without a server: prefill and decode, each against what the machine allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from treadle.bench.costs import Limits, ModelCosts, limits_of, model_costs
from treadle.bench.machine import measure_machine
from treadle.bench.report import Summary, markdown_table, summarise
from treadle.core import TreadleError
from treadle.engine.interfaces import StepRunner
from treadle.engine.kv.pool import BLOCK
from treadle.weights.gguf import open_gguf

KV_BYTES = 2  # per number in a KV cache in bf16


@dataclass(frozen=True)
class OfflinePlan:
    """Which cases to run. Batches above one run at every context only where ``cross`` is set."""

    prefill: tuple[int, ...] = (128, 512, 2048, 8192)
    contexts: tuple[int, ...] = (0, 2048, 8192)
    batches: tuple[int, ...] = (1, 4, 8, 20, 32)
    cross: bool = False
    steps: int = 32  # decode steps per case
    repeats: int = 3  # prefills per case

    def decode_cases(self) -> list[tuple[int, int]]:
        """(context, batch) pairs, smallest first."""
        return [
            (context, batch)
            for context in sorted(self.contexts)
            for batch in sorted(self.batches)
            if self.cross or batch == min(self.batches) or context == min(self.contexts)
        ]

    def tokens_needed(self) -> int:
        """Tokens of KV cache that the largest case fills."""
        decode = max((batch * self._span(context) for context, batch in self.decode_cases()), default=0)
        return max(decode, *(-(-n // BLOCK) * BLOCK for n in self.prefill), 0)

    def context_needed(self) -> int:
        """Tokens of the longest sequence."""
        return max([*self.prefill, *(context + self.steps + 1 for context, _ in self.decode_cases())])

    def _span(self, context: int) -> int:
        return -(-(context + self.steps + 1) // BLOCK) * BLOCK


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One case. ``share`` is the median over the limit of this machine (1.0: no faster possible)."""

    case: str  # "prefill" or "decode"
    tokens: int  # of the prompt, or already in the context of each sequence
    batch: int
    tokens_per_s: Summary
    limit_tokens_per_s: float
    share: float


class OfflineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything ``treadle bench offline`` measures."""

    model: str
    threads: int
    limits: Limits
    costs: ModelCosts
    results: list[Result]
    kv_dtype: str = "bf16"


class OfflineBench:
    """Runs cases on one loaded model."""

    def __init__(
        self, runner: StepRunner, costs: ModelCosts, limits: Limits, kv_bytes: float = KV_BYTES
    ) -> None:
        """``kv_bytes``: what a number in the KV cache takes."""
        self._runner, self._costs, self._limits, self._kv_bytes = runner, costs, limits, kv_bytes
        self._ids = np.random.default_rng(0).integers(0, runner.vocab_size, runner.max_tokens + 1, np.int32)

    def run(self, plan: OfflinePlan, progress: Callable[[Result], None]) -> list[Result]:
        """All cases of the plan. Raises TreadleError when one does not fit the runner."""
        self._check(plan)
        results = []
        for tokens in plan.prefill:
            results.append(self._prefill_case(tokens, plan.repeats))
            progress(results[-1])
        for context, batch in plan.decode_cases():
            results.append(self._decode_case(context, batch, plan.steps))
            progress(results[-1])
        return results

    def _check(self, plan: OfflinePlan) -> None:
        runner = self._runner
        if plan.context_needed() > runner.context:
            raise TreadleError(
                f"a case needs {plan.context_needed()} tokens in one sequence, "
                f"the engine holds {runner.context}"
            )
        if plan.tokens_needed() > runner.num_blocks * BLOCK:
            raise TreadleError(
                f"a case needs {plan.tokens_needed()} tokens of KV cache, "
                f"the engine holds {runner.num_blocks * BLOCK}"
            )
        if max(plan.batches, default=1) > runner.max_sequences:
            raise TreadleError(
                f"a batch of {max(plan.batches)} is more than {runner.max_sequences} sequences"
            )

    def _prefill_case(self, tokens: int, repeats: int) -> Result:
        self._place(1, tokens)
        self._prefill(0, min(tokens, self._runner.max_tokens))  # warm-up: pages, caches, clock
        seconds = [self._prefill(0, tokens) for _ in range(repeats)]
        limit = tokens / self._costs.prefill_seconds(tokens, self._limits)
        return self._result("prefill", tokens, 1, [tokens / s for s in seconds], limit)

    def _decode_case(self, context: int, batch: int, steps: int) -> Result:
        self._place(batch, context + steps + 1)
        for slot in range(batch if context else 0):
            self._prefill(slot, context)
        seconds = [self._decode(batch, context + step) for step in range(steps + 1)][1:]  # the first warms up
        limit = batch / self._costs.decode_seconds(batch, context, self._kv_bytes, self._limits)
        return self._result("decode", context, batch, [batch / s for s in seconds], limit)

    def _result(self, case: str, tokens: int, batch: int, rates: list[float], limit: float) -> Result:
        summary = summarise(rates)
        return Result(
            case=case,
            tokens=tokens,
            batch=batch,
            tokens_per_s=summary,
            limit_tokens_per_s=limit,
            share=summary.median / limit,
        )

    def _place(self, sequences: int, tokens: int) -> None:
        """Gives slots 0..sequences-1 KV blocks of their own for ``tokens`` tokens each."""
        blocks = -(-tokens // BLOCK)
        for slot in range(sequences):
            self._runner.tables[slot, :blocks] = np.arange(slot * blocks, (slot + 1) * blocks, dtype=np.int32)

    def _prefill(self, slot: int, tokens: int) -> float:
        """Seconds for ``tokens`` tokens in slot ``slot``, in chunks as large as a step may be."""
        start = time.perf_counter()
        for past in range(0, tokens, self._runner.max_tokens):
            count = min(tokens - past, self._runner.max_tokens)
            last = past + count == tokens
            self._step(self._ids[:count], [count], [past], [slot], [count - 1] if last else [])
        return time.perf_counter() - start

    def _decode(self, batch: int, past: int) -> float:
        """Seconds of one step in which each of ``batch`` sequences gets one token and its logits."""
        start = time.perf_counter()
        every = list(range(batch))
        self._step(self._ids[:batch], [1] * batch, [past] * batch, every, every)
        return time.perf_counter() - start

    def _step(
        self,
        tokens: np.ndarray[tuple[int], np.dtype[np.int32]],
        query_lens: list[int],
        past_lens: list[int],
        slots: list[int],
        logits_rows: list[int],
    ) -> None:
        arrays = (np.array(values, np.int32) for values in (query_lens, past_lens, slots, logits_rows))
        self._runner.run(tokens, *arrays)


def measure_offline(
    path: Path,
    threads: int | None,
    plan: OfflinePlan,
    progress: Callable[[Result], None],
    kv_dtype: str = "bf16",
) -> OfflineReport:
    """Measures the machine, loads the model and runs the plan. ``threads`` None: the runner's own choice."""
    from treadle.engine.runner import Runner, RunnerConfig  # not above: cases run on any StepRunner

    costs, _ = model_costs(path)
    context = plan.context_needed()
    config = RunnerConfig(
        threads=threads,
        context=context,
        kv_memory=max(plan.tokens_needed(), -(-context // BLOCK) * BLOCK) * costs.kv_values * KV_BYTES,
        kv_dtype=kv_dtype,
        max_sequences=max([1, *plan.batches]),
    )
    runner = Runner(open_gguf(path), frozenset(), config)
    limits = limits_of(measure_machine(runner.threads))
    bench = OfflineBench(runner, costs, limits, runner.kv_token_bytes / costs.kv_values)
    results = bench.run(plan, progress)
    return OfflineReport(
        model=str(path),
        threads=runner.threads,
        limits=limits,
        costs=costs,
        results=results,
        kv_dtype=kv_dtype,
    )


def result_line(result: Result) -> str:
    """One case in a few words, for progress."""
    rate = f"{result.tokens_per_s.median:.1f} token/s, {100 * result.share:.0f} % of the limit"
    if result.case == "prefill":
        return f"prefill {result.tokens}: {rate}"
    return f"decode {result.batch} at context {result.tokens}: {rate}"


def offline_table(results: Sequence[Result]) -> str:
    """A Markdown table, one line per case."""
    rows = [
        (
            f"prefill {r.tokens}" if r.case == "prefill" else f"decode, context {r.tokens}",
            r.batch,
            f"{r.tokens_per_s.median:.1f}",
            f"±{100 * r.tokens_per_s.spread:.0f} %",
            f"{r.limit_tokens_per_s:.1f}",
            f"{100 * r.share:.0f} %",
        )
        for r in results
    ]
    return markdown_table(("case", "batch", "token/s", "spread", "limit", "share"), rows)
