"""Who gets how much, on a clock that moves only with the steps: fairness, priorities and the step budget."""

from __future__ import annotations

from statistics import median

import pytest

from tests.engine.engine_model import Results, expected, make_engine, prompt, request
from treadle.engine.engine import EngineConfig


def cost(decodes: int, prefill: int) -> float:
    """A machine with 20 ms per step and 2 ms per decode, 5 ms per prompt token."""
    return 0.02 + 0.002 * decodes + 0.005 * prefill


@pytest.mark.parametrize("decodes", [4, 16])
def test_long_prompt_among_decodes_keeps_their_latency(decodes: int) -> None:
    engine, runner = make_engine(max_sequences=20, max_tokens=512, context=4096, num_blocks=400, cost=cost)
    for i in range(decodes):
        engine.add(request(f"r{i}", prompt(i, 20), 700))
    results = Results(engine)
    while len(results.step()) < decodes or runner.steps[-1] != [1] * decodes:
        pass
    alone = cost(decodes, 0)
    engine.add(request("long", prompt(99, 2000), 5))
    gaps = []
    while "long" not in results.tokens:
        before = runner.now
        got = results.step()
        assert len(got) >= decodes, "no decode misses a step"
        gaps.append(runner.now - before)
    assert median(gaps) < 2 * alone
    assert sum(gaps) < 3 * 2000 * 0.005, "the prompt gets a fair share of the machine"
    results.run()
    assert results.tokens["long"] == expected(prompt(99, 2000), 5)


def test_decodes_stay_under_the_target_latency_while_the_machine_can() -> None:
    engine, runner = make_engine(
        EngineConfig(target_itl=0.07),
        max_sequences=20,
        max_tokens=512,
        context=4096,
        num_blocks=400,
        cost=cost,
    )
    for i in range(10):
        engine.add(request(f"r{i}", prompt(i, 5), 400))
    results = Results(engine)
    while len(results.step()) < 10 or runner.steps[-1] != [1] * 10:
        pass
    engine.add(request("long", prompt(99, 800), 5))
    gaps = []
    while "long" not in results.tokens:
        before = runner.now
        results.step()
        gaps.append(runner.now - before)
    assert median(gaps) <= 0.07


def test_a_burst_of_short_prompts_is_read_at_the_target_latency() -> None:
    def fast(decodes: int, prefill: int) -> float:
        return 0.005 + 0.0005 * decodes + 0.001 * prefill

    engine, runner = make_engine(
        EngineConfig(target_itl=0.1),
        max_sequences=20,
        max_tokens=512,
        context=4096,
        num_blocks=400,
        cost=fast,
    )
    engine.add(request("first", prompt(0, 5), 700))
    results = Results(engine)
    while runner.steps[-10:] != [[1]] * 10:
        results.step()
    began = runner.now
    for i in range(19):
        engine.add(request(f"r{i}", prompt(1 + i, 40), 300))
    gaps = []
    while len(results.tokens) < 20:
        before = runner.now
        results.step()
        gaps.append(runner.now - before)
    assert max(gaps) <= 0.11
    assert runner.now - began < 1.3 * 19 * 40 * 0.001, "most of the machine reads"


def test_nobody_decodes_so_the_prompt_gets_whole_steps() -> None:
    engine, runner = make_engine(max_tokens=128, context=1024)
    engine.add(request("a", prompt(1, 500), 2))
    Results(engine).run()
    assert runner.steps[:5] == [[32], [128], [128], [128], [84]]


@pytest.mark.parametrize("token_seconds", [0.005, 0.02])
def test_no_step_reads_prompts_for_long(token_seconds: float) -> None:
    engine, runner = make_engine(
        max_tokens=512,
        context=4096,
        num_blocks=200,
        cost=lambda decodes, prefill: 0.02 + 0.02 * decodes + token_seconds * prefill,
    )
    engine.add(request("long", prompt(1, 3000), 2))
    results = Results(engine)
    seconds = []
    while "long" not in results.tokens:
        before = runner.now
        results.step()
        seconds.append(runner.now - before)
    assert max(seconds[1:]) < 0.7
    assert sum(seconds) < 1.2 * 3000 * token_seconds, "steps are not needlessly short either"
    engine.add(request("other", prompt(2, 3000), 2))
    results.step()
    engine.cancel("other")
    before = runner.now
    results.run()
    assert runner.now - before < 0.7


def test_decodes_never_starve_under_steady_arrivals() -> None:
    engine, _ = make_engine(max_sequences=20, max_tokens=256, context=2048, num_blocks=1000, cost=cost)
    for i in range(8):
        engine.add(request(f"r{i}", prompt(i, 20), 200))
    results = Results(engine)
    while len(results.step()) < 8:
        pass
    for arrival in range(6):
        engine.add(request(f"long{arrival}", prompt(50 + arrival, 300), 3))
        for _ in range(12):
            got = results.step()
            assert {f"r{i}" for i in range(8)} <= set(got)
    results.run()
    assert len(results.tokens["long5"]) == 3


def test_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine, _ = make_engine(max_tokens=64, context=2048, num_blocks=100)
    engine.add(request("long", prompt(1, 1500), 1))
    results = Results(engine)
    results.step()
    engine.add(request("short", prompt(2, 30), 1))
    results.step()
    assert "short" in results.last
    results.run()
    assert results.tokens["long"] == expected(prompt(1, 1500), 1)


def test_long_prompt_does_not_starve_behind_short_ones() -> None:
    engine, _ = make_engine(max_tokens=64, max_sequences=4, context=2048, num_blocks=100)
    engine.add(request("long", prompt(1, 960), 1))
    results = Results(engine)
    for i in range(35):
        engine.add(request(f"s{i}", prompt(2 + i, 60), 1))
        results.step()
    assert "long" in results.last, "half of each step is its own"


def test_prompts_of_a_busy_user_do_not_delay_another() -> None:
    engine, _ = make_engine(max_tokens=64, context=2048, num_blocks=100)
    for i in range(3):
        engine.add(request(f"ann{i}", prompt(i, 400), 1, user="ann"))
    results = Results(engine)
    results.step()
    engine.add(request("bob", prompt(9, 420), 1, user="bob"))
    assert results.run().order.index("bob") <= 1


def test_lower_priority_number_goes_first() -> None:
    engine, _ = make_engine(max_sequences=1)
    for i, priority in enumerate((2, 1, 0, 1)):
        engine.add(request(f"r{i}", prompt(i, 10), 3, priority=priority))
    assert Results(engine).run().order == ["r2", "r1", "r3", "r0"]


def test_urgent_request_displaces_one_that_runs() -> None:
    engine, _ = make_engine(max_sequences=1)
    engine.add(request("slow", prompt(1, 40), 100, priority=5))
    results = Results(engine)
    for _ in range(20):
        results.step()
    engine.add(request("urgent", prompt(2, 40), 5))
    results.run()
    assert results.order == ["urgent", "slow"]
    assert results.tokens["slow"] == expected(prompt(1, 40), 100)


def test_one_user_cannot_keep_all_places() -> None:
    engine, _ = make_engine(EngineConfig(max_queue=100), max_sequences=4, num_blocks=200)
    for i in range(30):
        engine.add(request(f"ann{i}", prompt(i, 20), 200, user="ann"))
    results = Results(engine)
    for _ in range(30):
        results.step()
    for i in range(4):
        engine.add(request(f"bob{i}", prompt(100 + i, 20), 20, user="bob"))
    results.run()
    assert set(results.order[:4]) == {"bob0", "bob1", "bob2", "bob3"}, "bob does not wait for ann"
    for i in range(30):
        assert results.tokens[f"ann{i}"] == expected(prompt(i, 20), 200)
    assert engine.stats().preemptions_total <= 4, "places do not go back and forth"


def test_users_share_the_engine_evenly_under_load() -> None:
    engine, _ = make_engine(EngineConfig(max_queue=200), max_sequences=4, num_blocks=200)
    for i in range(40):
        engine.add(request(f"ann{i}", prompt(i, 30), 20, user="ann"))
    for i in range(10):
        engine.add(request(f"bob{i}", prompt(100 + i, 30), 20, user="bob"))
    results = Results(engine).run()
    done = results.order[:20]
    assert 8 <= sum(id.startswith("bob") for id in done) <= 12


@pytest.mark.parametrize("max_queue", [12])
def test_one_user_cannot_fill_the_queue(max_queue: int) -> None:
    engine, _ = make_engine(EngineConfig(max_queue=max_queue), max_sequences=4)
    accepted = 0
    for i in range(30):
        try:
            engine.add(request(f"ann{i}", [1, 2, i], 2, user="ann"))
            accepted += 1
        except Exception as error:
            assert "this user" in str(error)
    assert accepted == 12
    engine.add(request("bob", [1, 2], 2, user="bob"))
    assert len(Results(engine).run().tokens) == 13
