"""Answers are those of each request alone, whatever runs beside it."""

from __future__ import annotations

import random

import pytest

from tests.engine.engine_model import Results, expected, make_engine, prompt, request
from treadle.engine.engine import EngineConfig
from treadle.engine.interfaces import BadRequest, QueueFull
from treadle.engine.kv.pool import BLOCK


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 200])
@pytest.mark.parametrize("max_tokens", [9, 16, 512])
def test_chunks_do_not_change_the_answer(length: int, max_tokens: int) -> None:
    engine, _ = make_engine(max_tokens=max_tokens)
    engine.add(request("a", prompt(1, length), 40))
    assert Results(engine).run().tokens["a"] == expected(prompt(1, length), 40)


def test_many_at_once() -> None:
    engine, runner = make_engine()
    prompts = {f"r{i}": prompt(i, 1 + 13 * i) for i in range(20)}
    for id, ids in prompts.items():
        engine.add(request(id, ids, 30))
    results = Results(engine).run()
    assert results.tokens == {id: expected(ids, 30) for id, ids in prompts.items()}
    assert max(map(len, runner.steps)) == runner.max_sequences, "requests are batched"


def test_second_turn_reuses_the_first() -> None:
    engine, runner = make_engine()
    first = prompt(1, 150)
    engine.add(request("first", first, 50))
    results = Results(engine).run()
    assert results.last["first"].usage.cached_tokens == 0
    second = first + results.tokens["first"] + prompt(2, 20)
    before = runner.tokens_run
    engine.add(request("second", second, 10))
    results.run()
    # 199 tokens have their KV (the last output was never run): 6 full blocks.
    assert results.last["second"].usage.cached_tokens == 6 * BLOCK
    assert runner.tokens_run - before == len(second) - 6 * BLOCK + 10 - 1
    assert results.tokens["second"] == expected(second, 10)


@pytest.mark.parametrize("length", [32, 64, 65])
def test_same_prompt_again_runs_at_least_one_token(length: int) -> None:
    engine, _ = make_engine()
    results = Results(engine)
    for id in ("a", "b"):
        engine.add(request(id, prompt(3, length), 5))
        results.run()
    assert results.tokens["a"] == results.tokens["b"] == expected(prompt(3, length), 5)
    assert results.last["b"].usage.cached_tokens == (length - 1) // BLOCK * BLOCK


def test_n_answers_cost_one_prefill() -> None:
    engine, runner = make_engine(max_tokens=64)
    ids = prompt(4, 300)
    for i in range(6):
        engine.add(request(f"r{i}", ids, 2))
    results = Results(engine).run()
    assert all(tokens == expected(ids, 2) for tokens in results.tokens.values())
    assert runner.tokens_run == 300 + 5 + 6, "five read the last token only, and all run one of their own"


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 34, 63, 64, 65])
def test_n_answers_go_their_own_ways_from_a_copied_tail(length: int) -> None:
    engine, runner = make_engine(max_sequences=3)
    ids = prompt(length, length)
    for seed in range(7):
        engine.add(request(f"r{seed}", ids, 50, params={"temperature": 1.0, "seed": seed}))
    results = Results(engine).run()
    assert results.tokens == {f"r{seed}": expected(ids, 50, seed=seed) for seed in range(7)}
    assert runner.tokens_run == length + 6 + 7 * 49
    cached = [results.last[f"r{seed}"].usage.cached_tokens for seed in range(7)]
    assert cached == [0] + 6 * [length - 1]
    engine.check()


def test_preempted_answers_of_one_prompt_stay_their_own() -> None:
    engine, _ = make_engine(num_blocks=12, context=384)
    ids = prompt(9, 40)
    for seed in range(6):
        engine.add(request(f"r{seed}", ids, 120, params={"temperature": 1.0, "seed": seed}))
    results = Results(engine).run()
    assert engine.stats().preemptions_total > 0
    assert results.tokens == {f"r{seed}": expected(ids, 120, seed=seed) for seed in range(6)}


@pytest.mark.parametrize(("length", "max_tokens", "kept"), [(200, 32, BLOCK), (31, 16, 0)])
def test_cancelled_prefill_passes_its_full_blocks_on(length: int, max_tokens: int, kept: int) -> None:
    engine, _ = make_engine(max_tokens=max_tokens)
    ids = prompt(5, length)
    engine.add(request("a", ids))
    engine.add(request("b", ids))
    results = Results(engine)
    results.step()
    engine.cancel("a")
    results.run()
    assert results.tokens["b"] == expected(ids, 8)
    assert results.last["b"].usage.cached_tokens == kept


def test_other_salt_shares_nothing() -> None:
    engine, _ = make_engine()
    results = Results(engine)
    for id, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        engine.add(request(id, prompt(6, 100), cache_salt=salt))
        results.run()
    assert [results.last[id].usage.cached_tokens for id in "abc"] == [0, 0, 96]


def test_cache_forgets_the_oldest_leaf_first() -> None:
    engine, _ = make_engine(num_blocks=10, context=320)
    results = Results(engine)
    for id, seed in (("old", 1), ("new", 2), ("big", 3)):  # 4 + 4 + 4 full blocks in 10
        engine.add(request(id, prompt(seed, 4 * BLOCK + 1), 1))
        results.run()
    for id, seed in (("new again", 2), ("old again", 1)):
        engine.add(request(id, prompt(seed, 4 * BLOCK + 1), 1))
        results.run()
    assert results.last["new again"].usage.cached_tokens == 4 * BLOCK
    assert 0 < results.last["old again"].usage.cached_tokens < 4 * BLOCK, "leaves go first"


def test_preemption_does_not_change_the_answer() -> None:
    engine, runner = make_engine(num_blocks=14, context=448)
    prompts = {f"r{i}": prompt(i, 40 + i) for i in range(6)}
    for id, ids in prompts.items():
        engine.add(request(id, ids, 150))
    results = Results(engine).run()
    assert engine.stats().preemptions_total > 0
    assert results.tokens == {id: expected(ids, 150) for id, ids in prompts.items()}
    for i, state in enumerate(runner.states):
        assert state.accepted == results.tokens[f"r{i}"][:149], "penalties and seeds count every token once"
    assert all(last.usage.cached_tokens == 0 for last in results.last.values()), "recomputation is not reuse"


def test_one_request_may_fill_the_whole_cache() -> None:
    engine, _ = make_engine(num_blocks=4, context=4096)
    engine.add(request("a", prompt(1, 30), None))
    engine.add(request("b", prompt(2, 100), None))
    results = Results(engine).run()
    assert results.tokens["a"] == expected(prompt(1, 30), 4 * BLOCK - 30)
    assert results.tokens["b"] == expected(prompt(2, 100), 28)
    assert {last.finish_reason for last in results.last.values()} == {"length"}


@pytest.mark.parametrize("steps", [0, 1, 3, 12])
def test_cancel_frees_everything_within_a_step(steps: int) -> None:
    engine, _ = make_engine(max_sequences=2, max_tokens=32)
    ids = {"running": prompt(1, 50), "other": prompt(2, 60), "queued": prompt(3, 70)}
    for id in ids:
        engine.add(request(id, ids[id], 40))
    results = Results(engine)
    for _ in range(steps):
        results.step()
    engine.cancel("running")
    engine.cancel("queued")
    engine.check()
    results.step()
    assert {id: last.finish_reason for id, last in results.last.items()} == {
        "running": "cancelled",
        "queued": "cancelled",
    }
    assert results.last["queued"].usage.completion_tokens == 0
    assert engine.stats().running == 1 and engine.stats().queued == 0
    results.run()
    assert results.tokens["other"] == expected(ids["other"], 40)
    assert engine.stats().kv_blocks_held == 0


def test_cancelled_queued_request_never_runs() -> None:
    engine, runner = make_engine(max_sequences=1)
    for id, seed in (("a", 1), ("b", 2), ("c", 3)):
        engine.add(request(id, prompt(seed, 20), 10))
    results = Results(engine)
    results.step()
    engine.cancel("b")
    results.run()
    assert results.tokens["a"] == expected(prompt(1, 20), 10)
    assert results.tokens["c"] == expected(prompt(3, 20), 10)
    assert runner.tokens_run == 2 * (20 + 9)


def test_stop_ids_and_end_of_text() -> None:
    answer = expected(prompt(1, 10), 20)
    stop = next(i for i in range(5, 20) if answer[i] not in answer[:i])
    engine, _ = make_engine(eos_ids=frozenset({answer[stop]}))
    results = Results(engine)
    engine.add(request("eos", prompt(1, 10), 20))
    engine.add(request("ignored", prompt(1, 10), 20, params={"ignore_eos": True}))
    engine.add(
        request("stop", prompt(1, 10), 20, params={"stop_token_ids": (answer[2],), "ignore_eos": True})
    )
    results.run()
    assert results.tokens["eos"] == answer[:stop]
    assert results.last["eos"].finish_reason == "stop" and results.last["eos"].stop_token == answer[stop]
    assert results.last["eos"].usage.completion_tokens == stop
    assert results.tokens["ignored"] == answer and results.last["ignored"].finish_reason == "length"
    assert results.tokens["stop"] == answer[: answer.index(answer[2])]


def test_logprobs_come_with_their_tokens() -> None:
    engine, _ = make_engine()
    engine.add(request("a", prompt(1, 10), 3, params={"logprobs": 1}))
    engine.add(request("b", prompt(2, 10), 3))
    while engine.has_work:
        for output in engine.step():
            if output.logprobs is None or output.id == "b":
                assert output.logprobs is None and output.id == "b"
            else:
                assert [(lp.logprob, lp.top) for lp in output.logprobs] == [
                    (-0.5, [(output.token_ids[0], -0.5)])
                ]


def test_requests_that_cannot_run_are_refused() -> None:
    engine, _ = make_engine(context=100)
    engine.add(request("a", [1]))
    for ids, words in (([], "empty"), ([1] * 100, "100 tokens"), ([1, 1000], "1000"), ([-1], "-1")):
        with pytest.raises(BadRequest, match=words):
            engine.add(request("b", ids))
    with pytest.raises(BadRequest, match="unique"):
        engine.add(request("a", [1]))
    with pytest.raises(BadRequest, match="max_tokens"):
        engine.add(request("b", [1], 0))
    with pytest.raises(BadRequest, match="temperature"):
        engine.add(request("b", [1], params={"temperature": -1.0}))
    engine.add(request("b", [1] * 99, None))
    results = Results(engine).run()
    assert len(results.tokens["b"]) == 1 and results.last["b"].finish_reason == "length"


def test_nothing_left_to_choose_ends_only_that_request() -> None:
    engine, _ = make_engine()
    engine.add(request("good", prompt(1, 40)))
    engine.add(request("bad", prompt(2, 64), params={"logit_bias": {1: 1.0}}))
    engine.add(request("fine", prompt(3, 40)))
    results = Results(engine).run()
    assert results.last["bad"].finish_reason == "error" and "nothing is left" in str(
        results.last["bad"].error
    )
    assert results.tokens["good"] == expected(prompt(1, 40), 8)
    assert results.tokens["fine"] == expected(prompt(3, 40), 8)


def test_five_hundred_at_once_with_a_bounded_queue() -> None:
    engine, _ = make_engine(EngineConfig(max_queue=100))
    accepted = []
    for i in range(500):
        try:
            engine.add(request(f"r{i}", prompt(i % 50, 20 + i % 50), 4))
            accepted.append(i)
        except QueueFull as error:
            assert "108" in str(error)
    assert len(accepted) == 108
    results = Results(engine).run()
    for i in accepted:
        assert results.tokens[f"r{i}"] == expected(prompt(i % 50, 20 + i % 50), 4)
    engine.add(request("later", [1, 2, 3]))
    results.run()
    assert engine.stats().queued == engine.stats().running == 0


@pytest.mark.parametrize("seed", range(12))
def test_mixed_load_with_cancels(seed: int) -> None:
    """Random prompts (many with a common beginning), users, priorities and cancels in a small cache."""
    rng = random.Random(seed)
    engine, _ = make_engine(
        EngineConfig(max_queue=200),
        num_blocks=rng.choice([12, 20, 60]),
        max_sequences=rng.choice([1, 3, 8]),
        max_tokens=rng.choice([9, 40, 128]),
        context=384,
    )
    begins = [prompt(100 + i, rng.randrange(20, 150)) for i in range(3)]
    wanted: dict[str, tuple[list[int], int]] = {}
    cancelled: set[str] = set()
    results = Results(engine)
    for i in range(60):
        ids = rng.choice([[], *begins]) + prompt(i, rng.randrange(1, 100))
        count = rng.choice([1, 5, 40, 120])
        wanted[f"r{i}"] = (ids, count)
        user, priority = rng.choice(["", "ann", "bob"]), rng.choice([0, 0, 0, 1, -1])
        engine.add(request(f"r{i}", ids, count, user=user, priority=priority))
        for _ in range(rng.choice([0, 0, 1, 10])):
            results.step()
        engine.check()
        if rng.random() < 0.3:
            victim = f"r{rng.randrange(i + 1)}"
            engine.cancel(victim)
            if victim not in results.last:
                cancelled.add(victim)
    results.run()
    assert set(results.last) == set(wanted)
    for id, (ids, count) in wanted.items():
        if results.last[id].finish_reason == "cancelled":
            assert id in cancelled
            count = len(results.tokens.get(id, []))
        assert results.tokens.get(id, []) == expected(ids, count), id
    stats = engine.stats()
    assert stats.kv_blocks_held == stats.running == stats.queued == 0
    assert stats.output_tokens_total == sum(map(len, results.tokens.values()))
