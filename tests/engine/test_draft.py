"""A draft model makes answers faster where it fits, costs nothing where it does not, never changes them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.engine_model import (
    VOCAB,
    DraftRunner,
    Results,
    expected,
    make_engine,
    prompt,
    request,
    run_mixed,
)
from treadle.engine.engine import Engine, EngineConfig

STEP, ROW, DRAFT = 0.02, 0.001, 0.002  # seconds


def cost(decodes: int, prefill: int) -> float:
    """Of the toy runner, which counts a decode with guesses as prefill."""
    return STEP + ROW * (decodes + prefill)


def draft_cost(decodes: int, prefill: int) -> float:
    return DRAFT + 0.0001 * (decodes + prefill)


def seconds_of(engine: Engine) -> float:
    return engine._clock()


def run(ids: list[int], count: int, draft: DraftRunner | None, **fields: Any) -> tuple[float, Engine]:
    engine, _ = make_engine(draft=draft, cost=cost, max_sequences=16)
    engine.add(request("a", ids, count, **fields))
    results = Results(engine).run()
    seed = fields.get("params", {}).get("seed")
    assert results.tokens["a"] == expected(ids, count, seed=seed)
    return seconds_of(engine), engine


@pytest.mark.parametrize("seed", [None, 11])
def test_a_draft_that_fits_saves_time(seed: int | None) -> None:
    params = {"seed": seed}
    plain, _ = run(prompt(1, 30), 300, None, params=params)
    fast, engine = run(prompt(1, 30), 300, DraftRunner(cost=draft_cost, max_sequences=16), params=params)
    stats = engine.stats()
    assert stats.model_accepted_tokens_total > 0.95 * stats.model_drafted_tokens_total > 200
    assert fast < 0.4 * plain
    assert 0 < stats.model_draft_seconds_total < fast


def test_a_draft_that_is_mostly_right_saves_time() -> None:
    plain, _ = run(prompt(1, 30), 400, None)
    fast, engine = run(prompt(1, 30), 400, DraftRunner(cost=draft_cost, wrong=0.2))
    stats = engine.stats()
    assert 0.35 < stats.model_accepted_tokens_total / stats.model_drafted_tokens_total < 0.7
    assert fast < 0.7 * plain


@pytest.mark.parametrize("what", ["mostly wrong", "as slow as the model", "many rows cost much"])
def test_a_draft_that_does_not_pay_costs_hardly_anything(what: str) -> None:
    def dear(decodes: int, prefill: int) -> float:
        return 0.001 + 0.02 * (decodes + prefill)

    draft = {
        "mostly wrong": DraftRunner(cost=draft_cost, wrong=0.97, num_blocks=200),
        "as slow as the model": DraftRunner(cost=cost, num_blocks=200),
        "many rows cost much": DraftRunner(cost=draft_cost, num_blocks=200),
    }[what]
    seconds = []
    for one in (None, draft):
        engine, _ = make_engine(
            draft=one, cost=dear if "rows" in what else cost, num_blocks=200, context=2048
        )
        for i in range(4):
            engine.add(request(f"r{i}", prompt(i, 30), 1000))
            Results(engine).run()
        seconds.append(seconds_of(engine))
    assert engine.stats().model_drafted_tokens_total < 200
    assert seconds[1] < 1.03 * seconds[0]


def test_it_is_tried_again_until_it_pays() -> None:
    """What is measured under one load says nothing for ever."""
    draft = DraftRunner(cost=draft_cost, wrong=1.0, num_blocks=400, context=4096)
    engine, _ = make_engine(draft=draft, cost=cost, num_blocks=400, context=4096)
    engine.add(request("a", prompt(1, 30), 300))
    Results(engine).run()
    draft._wrong = 0.0
    engine.add(request("b", prompt(2, 30), 3500))
    Results(engine).run()
    assert engine.stats().model_accepted_tokens_total > 1000


def test_many_decodes_are_not_drafted() -> None:
    draft = DraftRunner(cost=draft_cost)
    engine, _ = make_engine(draft=draft, cost=cost)
    for i in range(8):
        engine.add(request(f"r{i}", prompt(i, 10), 100))
    results = Results(engine)
    while not results.last:
        results.step()
    assert draft.steps == []


def test_a_long_prompt_is_read_beside_the_answers_of_others() -> None:
    """In parts, none of which takes longer than a step."""
    draft = DraftRunner(cost=draft_cost, num_blocks=200, context=4096)
    engine, _ = make_engine(draft=draft, cost=cost, num_blocks=400, context=4096)
    engine.add(request("a", prompt(1, 30), 900))
    results = Results(engine)
    for _ in range(20):
        results.step()
    engine.add(request("b", prompt(2, 3000), 300))
    longest, drafted = 0.0, 0.0
    while engine.has_work:
        before = draft.now
        results.step()
        longest = max(longest, draft.now - before)
        drafted = engine.stats().model_drafted_tokens_total
    assert longest < 2 * STEP
    assert sum(sum(lens) for lens in draft.steps if max(lens) > 16) > 2900, "the prompt was read"
    assert drafted > 500
    assert results.tokens["b"] == expected(prompt(2, 3000), 300)


def test_a_second_turn_is_not_read_twice() -> None:
    draft = DraftRunner(cost=draft_cost, num_blocks=200, context=2048)
    engine, _ = make_engine(draft=draft, cost=cost, num_blocks=200, context=2048)
    ids = prompt(1, 800)
    for turn in range(3):
        run_before = draft.tokens_run
        engine.add(request(f"turn{turn}", ids, 100))
        results = Results(engine).run()
        ids = ids + results.tokens[f"turn{turn}"] + prompt(turn + 5, 10)
        if turn:
            assert draft.tokens_run - run_before < 400
    assert engine.stats().model_accepted_tokens_total > 150


def test_prompts_of_one_key_space_are_not_shared_with_another() -> None:
    draft = DraftRunner(cost=draft_cost, num_blocks=200, context=2048)
    engine, _ = make_engine(draft=draft, cost=cost, num_blocks=200, context=2048)
    for i, salt in enumerate(["a", "b"]):
        before = draft.tokens_run
        engine.add(request(f"r{i}", prompt(1, 800), 100, cache_salt=salt))
        Results(engine).run()
        assert draft.tokens_run - before > 800


def test_tokens_that_the_draft_does_not_know_end_its_guesses() -> None:
    """Such as ids that only pad the vocabulary of the model."""
    draft = DraftRunner(cost=draft_cost, rows=950)
    run([token % 950 for token in prompt(1, 30)], 300, draft)  # its run asserts what it is given
    assert draft.steps


def test_a_smaller_context_of_the_draft_ends_its_guesses() -> None:
    draft = DraftRunner(cost=draft_cost, context=128, num_blocks=8)
    _, engine = run(prompt(1, 30), 400, draft)
    assert 50 < engine.stats().model_accepted_tokens_total < 110


def test_lookup_and_draft_take_turns() -> None:
    """Whose guesses are better for a sequence makes them."""
    ids = prompt(1, 30)
    draft = DraftRunner(cost=draft_cost, wrong=0.3, habit=True)
    engine, _ = make_engine(draft=draft, cost=cost, habit=True, max_sequences=16)
    engine.add(request("a", ids, 450))
    results = Results(engine).run()
    assert results.tokens["a"] == expected(ids, 450, habit=True)
    stats = engine.stats()
    assert stats.model_accepted_tokens_total > 20
    assert stats.accepted_tokens_total - stats.model_accepted_tokens_total > 100


@pytest.mark.parametrize("count", range(60, 80))
def test_last_tokens_keep_their_limits(count: int) -> None:
    answer = expected(prompt(1, 30), 300)
    engine, _ = make_engine(draft=DraftRunner(cost=draft_cost), cost=cost)
    stop = answer[count + 40]
    engine.add(request("length", prompt(1, 30), count))
    engine.add(request("stop", prompt(1, 30), 300, params={"stop_token_ids": (stop,)}))
    results = Results(engine).run()
    assert results.tokens["length"] == answer[:count]
    assert results.tokens["stop"] == answer[: answer.index(stop)]
    assert results.last["stop"].stop_token == stop


@pytest.mark.parametrize("seed", range(16))
def test_mixed_load_is_the_same_with_a_draft(seed: int) -> None:
    """Random prompts, seeds and cancels, in caches that are too small, with steps of random length."""
    rng = random.Random(seed)

    def noisy(decodes: int, prefill: int) -> float:
        return cost(decodes, prefill) * rng.choice([1, 1, 1, 5])

    sizes = {"max_sequences": rng.choice([4, 8, 20]), "context": 384}
    habit = rng.random() < 0.5
    draft = DraftRunner(
        **sizes, wrong=rng.choice([0.0, 0.2]), num_blocks=rng.choice([12, 20, 40]), habit=habit,
        max_tokens=64, cost=draft_cost, rows=rng.choice([VOCAB, VOCAB - 1]),
    )  # fmt: skip
    engine, _ = make_engine(
        EngineConfig(max_queue=200), draft, **sizes, cost=noisy, habit=habit,
        num_blocks=rng.choice([12, 20, 60]), max_tokens=rng.choice([21, 40, 128]),
    )  # fmt: skip
    run_mixed(engine, rng, habit=habit)
    assert engine.stats().model_drafted_tokens_total > 0
