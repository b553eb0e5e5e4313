"""The load generator against a server that behaves, and against servers that do not."""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import Any

import pytest

from treadle.bench.serve import (
    Plan,
    Target,
    closed_loop,
    first_model,
    measure_tokens_per_word,
    open_loop,
    run_plan,
)
from treadle.bench.serve_report import LevelReport, compare_table, remarks, serve_table
from treadle.bench.workload import Length, TokensPerWord, Workload
from treadle.core import TreadleError

SHORT = Workload(Length.parse("20-30"), Length.parse("5"))
RATE = TokensPerWord(1.0, 5.0)


def _target(server: Any) -> Target:
    return Target(server.url, "fake", key="secret", timeout=5)


def test_closed_loop_counts_what_the_server_says(running: Any) -> None:
    async def run() -> tuple[LevelReport, Any]:
        async with running() as server:
            return await closed_loop(_target(server), SHORT, RATE, users=4, conversations=10), server

    report, server = asyncio.run(run())
    assert (report.requests, report.errors, report.users) == (10, 0, 4)
    assert (report.warm_up, len(server.bodies)) == (4, 14)
    assert (report.short_answers, report.no_usage) == (0, 0)
    assert report.completion_tokens == 50
    assert report.cached_tokens == 30
    assert server.most_running == 4
    assert 200 <= report.prompt_tokens <= 300
    assert report.ttft and report.itl and report.tpot and report.e2e
    assert 0 < report.ttft.p50 <= report.e2e.p50
    assert report.itl.p50 >= 0.001  # the server sleeps a millisecond between words
    assert report.output_tokens_per_s == pytest.approx(50 / report.seconds)
    # What was found in the cache has not been computed.
    assert report.total_tokens_per_s == pytest.approx((report.prompt_tokens - 30 + 50) / report.seconds)
    assert all("Authorization: Bearer secret" in head for head in server.headers)
    assert {body["max_tokens"] for body in server.bodies[:4]} == {16}
    assert {body["max_tokens"] for body in server.bodies[4:]} == {5}
    warm = {body["messages"][0]["content"] for body in server.bodies[:4]}
    assert warm.isdisjoint(body["messages"][0]["content"] for body in server.bodies[4:])


def test_words_are_calibrated_to_the_servers_tokens(running: Any) -> None:
    async def run() -> TokensPerWord:
        async with running() as server:
            assert await first_model(server.url, None) == "fake"
            return await measure_tokens_per_word(_target(server), SHORT)

    rate = asyncio.run(run())
    assert (rate.per_word, rate.fixed) == (1.0, 5.0)
    assert rate.words(105) == 100


def test_turns_grow_and_the_prefix_is_shared(running: Any) -> None:
    workload = Workload(Length.parse("20"), Length.parse("3"), shared_prefix=50, turns=3)

    async def run() -> tuple[LevelReport, Any]:
        async with running() as server:
            return await closed_loop(_target(server), workload, RATE, users=2, conversations=2), server

    report, server = asyncio.run(run())
    assert report.requests == 6
    assert len(report.ttft_by_turn) == 3
    bodies = server.bodies[report.warm_up :]
    assert sorted(len(body["messages"]) for body in bodies) == [2, 2, 4, 4, 6, 6]
    assert len({body["messages"][0]["content"] for body in bodies}) == 1
    assert len({body["messages"][1]["content"] for body in bodies}) == 2  # questions are not shared
    last = max(bodies, key=lambda body: len(body["messages"]))
    assert last["messages"][2] == {"role": "assistant", "content": "word0 word1 word2 "}


@pytest.mark.parametrize(
    ("fail", "message"),
    [("status", "429"), ("cut", "IncompleteRead"), ("event", "the engine died"), ("end", "finish_reason")],
)
def test_failures_are_counted_not_raised(running: Any, fail: str, message: str) -> None:
    async def run() -> LevelReport:
        async with running(fail) as server:
            return await closed_loop(_target(server), SHORT, RATE, users=2, conversations=4)

    report = asyncio.run(run())
    assert (report.requests, report.errors, report.completion_tokens) == (4, 4, 0)
    assert message in report.error_examples[0]
    assert report.ttft is None and report.total_tokens_per_s == 0
    assert any("4 of 4 requests failed" in line for line in remarks([report]))


def test_without_usage_pieces_are_counted_and_said(running: Any) -> None:
    async def run() -> LevelReport:
        async with running("no usage") as server:
            return await closed_loop(_target(server), SHORT, RATE, users=2, conversations=2)

    report = asyncio.run(run())
    assert (report.errors, report.no_usage, report.completion_tokens) == (0, 2, 10)
    assert any("without usage" in line for line in remarks([report]))


def test_a_connection_closed_between_requests_is_opened_again(running: Any) -> None:
    async def run() -> LevelReport:
        async with running("close") as server:
            return await closed_loop(_target(server), SHORT, RATE, users=2, conversations=6)

    report = asyncio.run(run())
    assert (report.requests, report.errors) == (6, 0)


def test_a_server_that_is_not_there() -> None:
    target = Target("http://127.0.0.1:9", "x")
    report = asyncio.run(closed_loop(target, SHORT, RATE, users=1, conversations=1))
    assert report.errors == 1
    with pytest.raises(TreadleError, match=r"127\.0\.0\.1:9"):
        asyncio.run(first_model(target.url, None))
    with pytest.raises(TreadleError, match="no server address"):
        asyncio.run(first_model("localhost:80", None))


def test_open_loop_begins_conversations_at_the_rate(running: Any) -> None:
    async def run() -> LevelReport:
        async with running() as server:
            return await open_loop(_target(server), SHORT, RATE, per_second=200, seconds=0.5)

    report = asyncio.run(run())
    assert report.rate == 200 and report.users is None
    assert 60 <= report.requests <= 140  # Poisson with mean 100: four standard deviations
    assert report.errors == 0


def test_compare_alternates_and_gives_ratios(running: Any) -> None:
    seen: list[str] = []
    calibration = 2

    async def run() -> list[LevelReport]:
        async with running() as a, running() as b:
            plan = Plan(users=(1, 2), conversations_per_user=1, repeats=2)
            reports = await run_plan([_target(a), _target(b)], SHORT, plan, lambda r: seen.append(r.url))
            assert len(a.bodies) > calibration
            assert [x["messages"] for x in a.bodies] == [x["messages"] for x in b.bodies]
            return reports

    reports = asyncio.run(run())
    first, second = seen[0], seen[1]
    assert seen == [first, second] * 4
    assert serve_table(reports).count("\n") == 9
    table = compare_table(reports, (first, second))
    assert "1 users" in table and "2 users" in table and table.count("x") >= 8


def test_lengths() -> None:
    rng = random.Random(0)
    assert {Length.parse("7").draw(rng) for _ in range(9)} == {7}
    assert {Length.parse("3-5").draw(rng) for _ in range(99)} == {3, 4, 5}
    assert 180 < statistics.median(Length.parse("lognormal:200,0.8").draw(rng) for _ in range(2000)) < 220
    for wrong in ("0", "9-3", "", "-4", "lognormal:9", "many"):
        with pytest.raises(TreadleError, match="30-60"):
            Length.parse(wrong)
