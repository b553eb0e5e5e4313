"""The offline benchmark asks for exactly the steps it reports, on a runner that notes them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from treadle.bench.costs import Limits, ModelCosts
from treadle.bench.offline import OfflineBench, OfflinePlan, Result, offline_table, result_line
from treadle.core import TreadleError
from treadle.engine.kv.pool import BLOCK

COSTS = ModelCosts(weight_bytes=1000, layer_ops=1000, output_ops=500, kv_values=10, arithmetic="int8")
LIMITS = Limits(bytes_per_s=1e6, int8_ops_per_s=1e7, float_ops_per_s=1e6)


class NotingRunner:
    """Checks every step against what StepRunner demands."""

    max_tokens = 64
    max_sequences = 4
    context = 512
    num_blocks = 40
    vocab_size = 100
    eos_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.tables = np.zeros((4, 16), np.int32)
        self.steps: list[tuple[list[int], list[int], list[int]]] = []

    def run(self, tokens, query_lens, past_lens, slots, logits_rows) -> None:  # type: ignore[no-untyped-def]
        assert all(a.dtype == np.int32 for a in (tokens, query_lens, past_lens, slots, logits_rows))
        assert len(tokens) == query_lens.sum() <= self.max_tokens
        assert 0 <= tokens.min() <= tokens.max() < self.vocab_size
        used = [
            self.tables[s, : -(-(q + p) // BLOCK)]
            for s, q, p in zip(slots, query_lens, past_lens, strict=True)
        ]
        every = np.concatenate(used)
        assert len(set(every)) == len(every), "sequences must not share blocks"
        assert every.max() < self.num_blocks
        self.steps.append((query_lens.tolist(), past_lens.tolist(), logits_rows.tolist()))


def _bench() -> tuple[OfflineBench, NotingRunner]:
    runner = NotingRunner()
    return OfflineBench(runner, COSTS, LIMITS), runner  # type: ignore[arg-type]


def test_prefill_goes_in_chunks_and_wants_one_row_of_logits() -> None:
    bench, runner = _bench()
    (result,) = bench.run(OfflinePlan(prefill=(150,), batches=(), repeats=2), lambda _: None)
    assert runner.steps[1:4] == [([64], [0], []), ([64], [64], []), ([22], [128], [21])]
    assert len(runner.steps) == 1 + 2 * 3
    assert result.tokens_per_s.count == 2
    assert result.limit_tokens_per_s == pytest.approx(150 / ((150 * 1000 + 500) / 1e7))


def test_decode_fills_the_context_of_every_sequence_first() -> None:
    bench, runner = _bench()
    plan = OfflinePlan(prefill=(), contexts=(60,), batches=(3,), steps=4)
    (result,) = bench.run(plan, lambda _: None)
    assert runner.steps[:3] == [([60], [0], [59])] * 3
    assert runner.steps[3:] == [([1] * 3, [60 + i] * 3, [0, 1, 2]) for i in range(5)]
    assert (result.tokens, result.batch, result.tokens_per_s.count) == (60, 3, 4)
    # Reading 1000 bytes of weights and 3 x 60 x 10 numbers of 2 bytes; computing is faster.
    assert result.limit_tokens_per_s == pytest.approx(3 / (4600 / 1e6))


def test_large_batches_run_at_the_smallest_context_only() -> None:
    plan = OfflinePlan(contexts=(2048, 0), batches=(8, 1))
    assert plan.decode_cases() == [(0, 1), (0, 8), (2048, 1)]
    crossed = OfflinePlan(contexts=(2048, 0), batches=(8, 1), cross=True)
    assert crossed.decode_cases() == [(0, 1), (0, 8), (2048, 1), (2048, 8)]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (OfflinePlan(prefill=(600,), batches=()), "600 tokens in one sequence, the engine holds 512"),
        (
            OfflinePlan(prefill=(), contexts=(400,), batches=(4,)),
            "1792 tokens of KV cache, the engine holds 1280",
        ),
        (OfflinePlan(prefill=(), contexts=(0,), batches=(9,), steps=2), "batch of 9 is more than 4"),
    ],
)
def test_what_does_not_fit_is_refused_in_numbers(plan: OfflinePlan, message: str) -> None:
    bench, runner = _bench()
    with pytest.raises(TreadleError, match=message):
        bench.run(plan, lambda _: None)
    assert not runner.steps


def test_results_print_and_become_json() -> None:
    bench, _ = _bench()
    seen: list[Result] = []
    results = bench.run(OfflinePlan(prefill=(40,), contexts=(0,), batches=(1, 2), steps=2), seen.append)
    assert results == seen
    assert offline_table(results).count("\n") == 4
    assert result_line(results[0]).startswith("prefill 40: ")
    assert msgspec.json.decode(msgspec.json.encode(results), type=list[Result]) == results


def test_float_models_are_held_against_the_float_peak() -> None:
    costs = msgspec.structs.replace(COSTS, arithmetic="float")
    assert costs.prefill_seconds(10, LIMITS) == pytest.approx(10500 / 1e6)
    assert costs.decode_seconds(1, 0, 2, LIMITS) == pytest.approx(1500 / 1e6)
