"""Guessed tokens make answers faster and never different."""

from __future__ import annotations

import random
from array import array

import pytest

from tests.engine.engine_model import VOCAB, Results, expected, make_engine, prompt, request, run_mixed
from treadle.engine.engine import EngineConfig
from treadle.engine.spec.lookup import Lookup

STEP, ROW = 0.02, 0.003  # seconds: a step waits for memory, a row more costs little


def cost(decodes: int, prefill: int) -> float:
    """Of the toy runner, which counts a decode with guesses as prefill."""
    return STEP + ROW * (decodes + prefill)


def test_habits_are_guessed_and_save_time() -> None:
    seconds, steps = {}, {}
    for speculation in (True, False):
        engine, runner = make_engine(
            EngineConfig(speculation=speculation), habit=True, cost=cost, max_sequences=16
        )
        engine.add(request("a", prompt(1, 30), 400))
        results = Results(engine).run()
        assert results.tokens["a"] == expected(prompt(1, 30), 400, habit=True)
        seconds[speculation], steps[speculation] = runner.now, len(runner.steps)
        stats = engine.stats()
        assert stats.accepted_tokens_total == 400 - steps[speculation]
        assert stats.accepted_tokens_total <= stats.drafted_tokens_total
        assert stats.output_tokens_total == 400
    assert seconds[True] < 0.7 * seconds[False]
    assert steps[False] == 400 and stats.drafted_tokens_total == 0


def test_copies_are_recognised_soon() -> None:
    """An answer that repeats its prompt: one guess must come true, then they are drafted."""
    lookup = Lookup(tokens := array("i", [*prompt(1, 200), *prompt(1, 200)[:3]]))
    drafted = 0
    for token in prompt(1, 200)[3:20]:
        assert lookup.update() and lookup.draft(1) == [token]
        drafted += lookup.chance(0) > 0.5
        tokens.append(token)
    assert drafted >= 15


def test_a_draft_goes_round_where_it_meets_its_end() -> None:
    lookup = Lookup(array("i", [9, 1, 2, 1, 2, 1]))
    assert lookup.update()
    assert lookup.draft(5) == [2, 1, 2, 1, 2]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], [1, 1, 1], [1, 2, 3, 4, 2, 3]])
def test_nothing_to_guess_from(tokens: list[int]) -> None:
    lookup = Lookup(array("i", tokens))
    assert not lookup.update() and not lookup.update()


def test_random_text_is_hardly_ever_drafted() -> None:
    """Chance matches in text of few different tokens cost at most 3 % of the time."""
    seconds = {}
    for speculation in (True, False):
        engine, runner = make_engine(EngineConfig(speculation=speculation), cost=cost, num_blocks=200)
        rng = random.Random(1)
        for i in range(20):
            ids = [rng.randrange(6) for _ in range(60)]
            engine.add(request(f"r{i}", ids, 200, params={"seed": 3}))
            Results(engine).run()
        seconds[speculation] = runner.now
    assert seconds[True] < 1.03 * seconds[False]


def test_nothing_is_drafted_where_rows_cost_as_much_as_steps() -> None:
    def dear(decodes: int, prefill: int) -> float:
        return 0.001 + 0.02 * (decodes + prefill)

    engine, runner = make_engine(habit=True, cost=dear)
    engine.add(request("a", prompt(1, 30), 400))
    Results(engine).run()
    assert engine.stats().drafted_tokens_total < 40
    assert runner.now < 1.05 * (430 * 0.02 + 0.5)


def test_many_decodes_are_not_speculated() -> None:
    engine, _ = make_engine(habit=True, cost=cost)
    for i in range(8):
        engine.add(request(f"r{i}", prompt(i, 10), 150))
    results = Results(engine)
    while not results.last:
        results.step()
    assert engine.stats().drafted_tokens_total == 0


def test_prompts_that_are_read_leave_no_room_for_guesses() -> None:
    engine, _ = make_engine(habit=True, cost=cost, context=4096, num_blocks=200, max_tokens=32)
    engine.add(request("a", prompt(1, 30), 400))
    results = Results(engine)
    for _ in range(100):
        results.step()
    drafted = engine.stats().drafted_tokens_total
    assert drafted > 0
    engine.add(request("b", prompt(2, 500), 1))
    while "b" not in results.last:
        results.step()
    assert engine.stats().drafted_tokens_total == drafted
    results.run()
    assert engine.stats().drafted_tokens_total > drafted


def test_last_tokens_keep_their_limits() -> None:
    answer = expected(prompt(1, 30), 300, habit=True)
    for count in range(100, 130):
        engine, _ = make_engine(habit=True, cost=cost)
        stop = answer[count + 40 : count + 41]
        engine.add(request("length", prompt(1, 30), count))
        engine.add(request("stop", prompt(1, 30), 300, params={"stop_token_ids": (stop[0],)}))
        results = Results(engine).run()
        assert results.tokens["length"] == answer[:count]
        assert results.last["length"].usage.completion_tokens == count
        assert results.tokens["stop"] == answer[: answer.index(stop[0])]
        assert results.last["stop"].stop_token == stop[0]
        assert results.last["stop"].usage.completion_tokens == answer.index(stop[0])


def test_logprobs_of_guessed_tokens() -> None:
    engine, _ = make_engine(habit=True, cost=cost)
    engine.add(request("a", prompt(1, 30), 200, params={"logprobs": 1}))
    longest = 0
    while engine.has_work:
        for output in engine.step():
            assert output.logprobs is not None
            assert [entry.top[0][0] for entry in output.logprobs] == output.token_ids
            longest = max(longest, len(output.token_ids))
    assert longest > 3


def test_cache_holds_what_was_chosen_not_what_was_guessed() -> None:
    engine, _ = make_engine(habit=True, cost=cost)
    results = Results(engine)
    ids = prompt(1, 30)
    for turn in range(5):
        engine.add(request(f"turn{turn}", ids, 60))
        results.run()
        answer = results.tokens[f"turn{turn}"]
        assert answer == expected(ids, 60, habit=True)
        if turn:
            assert results.last[f"turn{turn}"].usage.cached_tokens >= len(ids) - 10 - 32
        ids = ids + answer + prompt(turn + 10, 10)
    assert engine.stats().accepted_tokens_total > 30


@pytest.mark.parametrize("seed", range(16))
def test_mixed_load_is_the_same_with_guesses(seed: int) -> None:
    """Random prompts, seeds and cancels, in a cache that is too small, with steps of random length."""
    rng = random.Random(seed)

    def noisy(decodes: int, prefill: int) -> float:
        return cost(decodes, prefill) * rng.choice([1, 1, 1, 5])

    engine, _ = make_engine(
        EngineConfig(max_queue=200),
        habit=True,
        cost=noisy,
        num_blocks=rng.choice([12, 20, 60]),
        max_sequences=rng.choice([4, 8, 20]),
        max_tokens=rng.choice([21, 40, 128]),
        context=384,
    )
    results = run_mixed(engine, rng, habit=True)
    assert engine.stats().accepted_tokens_total > 0
    assert all(token < VOCAB for tokens in results.tokens.values() for token in tokens)
