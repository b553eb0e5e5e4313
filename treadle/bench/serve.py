"""Drives any OpenAI-compatible server with real HTTP requests and measures what users would feel.

TTFT: request sent to first text. ITL: between two pieces of text. TPOT: first to last text, per token after
the first. E2E: request sent to end of stream. All in seconds.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from treadle.bench.http_client import Connection, HttpError
from treadle.bench.report import markdown_table, percentile
from treadle.bench.workload import TokensPerWord, Workload, shared_message, words
from treadle.core import TreadleError

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Target:
    """The server under test. ``model`` is the id sent with each request."""

    url: str
    model: str
    key: str | None = None
    timeout: float = 600.0  # seconds for one whole request


@dataclass
class Exchange:
    """One request as the client saw it; times are ``time.perf_counter`` seconds."""

    turn: int
    sent: float
    arrivals: list[float]
    end: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds."""

    p50: float
    p90: float
    p99: float
    mean: float


class LevelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One load level against one server."""

    url: str
    users: int | None  # closed loop
    rate: float | None  # open loop, requests per second
    seconds: float
    requests: int
    errors: int
    error_examples: list[str]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompt and output
    user_tokens_per_s: float  # median over requests of tokens after the first per second
    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None
    ttft_by_turn: list[float]  # medians, first turn first


async def first_model(url: str, key: str | None) -> str:
    """The first id in ``/v1/models``. Raises TreadleError when the server cannot be asked."""
    connection = Connection(url, key)
    try:
        return str((await connection.get("/v1/models"))["data"][0]["id"])
    except (
        OSError,
        HttpError,
        asyncio.IncompleteReadError,
        msgspec.DecodeError,
        LookupError,
        TypeError,
    ) as error:
        raise TreadleError(f"{url}/v1/models gives no model: {error}") from error
    finally:
        await connection.close()


async def exchange(connection: Connection, target: Target, body: dict[str, Any], turn: int = 0) -> Exchange:
    """Sends one streaming chat request and waits for its end; failures are noted, never raised."""
    result = Exchange(turn, time.perf_counter(), [])
    pieces: list[str] = []
    try:
        async with (
            asyncio.timeout(target.timeout),
            aclosing(connection.events("/v1/chat/completions", body)) as events,
        ):
            async for event in events:
                if "error" in event:
                    raise HttpError(str(event["error"])[:300])
                _take_event(event, result, pieces)
        if not result.arrivals:
            result.error = "the stream ended without any text"
    except TimeoutError:
        result.error = f"no end of stream within {target.timeout:g} s"
    except (OSError, HttpError, EOFError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"[:300]
    result.end = time.perf_counter()
    result.text = "".join(pieces)
    result.completion_tokens = result.completion_tokens or len(result.arrivals)
    return result


def _take_event(event: dict[str, Any], result: Exchange, pieces: list[str]) -> None:
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        if any(delta.get(field) for field in ("content", "reasoning_content", "reasoning")):
            result.arrivals.append(time.perf_counter())
            pieces.append(delta.get("content") or "")
    if usage := event.get("usage"):
        result.prompt_tokens = usage.get("prompt_tokens") or 0
        result.completion_tokens = usage.get("completion_tokens") or 0
        result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _body(target: Target, workload: Workload, messages: list[dict[str, str]], answer: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "messages": messages,
        "max_tokens": answer,
        "temperature": workload.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if workload.ignore_eos:
        body["ignore_eos"] = True
    return body


async def measure_tokens_per_word(target: Target, workload: Workload) -> TokensPerWord:
    """Asks the server how many tokens 10 and 50 words are. Raises TreadleError when it does not answer."""
    connection = Connection(target.url, target.key)
    rng = random.Random(workload.seed)
    counts = []
    try:
        for count in (10, 50):
            messages = [{"role": "user", "content": words(count, rng)}]
            result = await exchange(connection, target, _body(target, workload, messages, 2))
            if result.error:
                raise TreadleError(f"{target.url} does not answer a first request: {result.error}")
            counts.append(result.prompt_tokens)
    finally:
        await connection.close()
    if counts[1] <= counts[0]:  # a server that reports no usage
        return TokensPerWord()
    per_word = (counts[1] - counts[0]) / 40
    return TokensPerWord(per_word, counts[0] - 10 * per_word)


class _User:
    """One connection that asks one question after the other."""

    def __init__(self, target: Target, workload: Workload, rate: TokensPerWord, number: int) -> None:
        self._target, self._workload, self._rate = target, workload, rate
        self._rng = random.Random(f"{workload.seed}/{number}")
        self._connection = Connection(target.url, target.key)

    async def conversation(self, done: list[Exchange]) -> None:
        """One conversation; every turn is added to ``done`` when it ends, and the first failure ends it."""
        messages = shared_message(self._workload, self._rate)
        for turn in range(self._workload.turns):
            question = words(self._rate.words(self._workload.prompt.draw(self._rng)), self._rng)
            messages.append({"role": "user", "content": question})
            body = _body(self._target, self._workload, messages, self._workload.answer.draw(self._rng))
            result = await exchange(self._connection, self._target, body, turn)
            done.append(result)
            if result.error:
                return
            messages.append({"role": "assistant", "content": result.text})

    async def close(self) -> None:
        await self._connection.close()


async def closed_loop(
    target: Target, workload: Workload, rate: TokensPerWord, users: int, conversations: int
) -> LevelReport:
    """``users`` at once, each asking again once it has its answer, until ``conversations`` are through."""
    done: list[Exchange] = []
    left = iter(range(conversations))

    async def user(number: int) -> None:
        one = _User(target, workload, rate, number)
        for _ in left:
            await one.conversation(done)
        await one.close()

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(users):
            group.create_task(user(number))
    return _summarise(done, time.perf_counter() - start, target, users=users, rate=None)


async def open_loop(
    target: Target, workload: Workload, rate: TokensPerWord, per_second: float, seconds: float
) -> LevelReport:
    """Conversations begin at random (a Poisson process) for ``seconds``, however busy the server is."""
    done: list[Exchange] = []
    arrivals = random.Random(workload.seed)

    async def user(number: int) -> None:
        one = _User(target, workload, rate, number)
        await one.conversation(done)
        await one.close()

    start = time.perf_counter()
    due = start
    async with asyncio.TaskGroup() as group:
        number = 0
        while (due := due + arrivals.expovariate(per_second)) < start + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(user(number))
            number += 1
    return _summarise(done, time.perf_counter() - start, target, users=None, rate=per_second)


def _percentiles(values: list[float]) -> Percentiles | None:
    if not values:
        return None
    p50, p90, p99 = (percentile(values, percent) for percent in _PERCENTILES)
    return Percentiles(p50, p90, p99, sum(values) / len(values))


def _summarise(
    done: list[Exchange], seconds: float, target: Target, users: int | None, rate: float | None
) -> LevelReport:
    good = [e for e in done if e.error is None]
    decoding = [
        (e.arrivals[-1] - e.arrivals[0], e.completion_tokens - 1) for e in good if e.completion_tokens > 1
    ]
    output = sum(e.completion_tokens for e in good)
    prompt = sum(e.prompt_tokens for e in good)
    speeds = [tokens / span for span, tokens in decoding if span > 0]
    turns = range(max((e.turn + 1 for e in good), default=0))
    ttft = [[e.arrivals[0] - e.sent for e in good if e.turn == turn] for turn in turns]
    return LevelReport(
        url=target.url,
        users=users,
        rate=rate,
        seconds=seconds,
        requests=len(done),
        errors=len(done) - len(good),
        error_examples=sorted({e.error for e in done if e.error})[:5],
        prompt_tokens=prompt,
        cached_tokens=sum(e.cached_tokens for e in good),
        completion_tokens=output,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        user_tokens_per_s=percentile(speeds, 50) if speeds else 0.0,
        ttft=_percentiles([value for turn in ttft for value in turn]),
        itl=_percentiles([b - a for e in good for a, b in zip(e.arrivals, e.arrivals[1:], strict=False)]),
        tpot=_percentiles([span / tokens for span, tokens in decoding]),
        e2e=_percentiles([e.end - e.sent for e in good]),
        ttft_by_turn=[percentile(values, 50) for values in ttft if values],
    )


@dataclass(frozen=True)
class Plan:
    """Which load levels to run. Closed loop where ``users`` are given, open loop where ``rates`` are."""

    users: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    conversations_per_user: int = 3
    seconds: float = 60.0  # per open-loop level
    repeats: int = 1


async def run_plan(
    targets: list[Target], workload: Workload, plan: Plan, progress: Callable[[LevelReport], None]
) -> list[LevelReport]:
    """Every level against every target, alternating between the targets within each repeat."""
    measured = [await measure_tokens_per_word(target, workload) for target in targets]
    levels = [(users, None) for users in plan.users] + [(None, rate) for rate in plan.rates]
    reports = []
    for number, (users, per_second) in enumerate(levels):
        for repeat in range(plan.repeats):
            # New words for every run, or it would find its prompts in the prefix cache.
            fresh = replace(workload, seed=workload.seed + 1000 * number + repeat)
            for target, rate in zip(targets, measured, strict=True):
                if users is not None:
                    report = await closed_loop(
                        target, fresh, rate, users, users * plan.conversations_per_user
                    )
                else:
                    report = await open_loop(target, fresh, rate, per_second or 0.0, plan.seconds)
                reports.append(report)
                progress(report)
    return reports


def level_line(report: LevelReport) -> str:
    """One run in a few words, for progress."""
    load = f"{report.users} users" if report.users is not None else f"{report.rate:g} /s"
    return f"{load} on {report.url}: {report.output_tokens_per_s:.1f} token/s, {report.errors} errors"


def serve_table(reports: Sequence[LevelReport]) -> str:
    """A Markdown table, one line per run; milliseconds are p50 / p99."""

    def milliseconds(values: Percentiles | None) -> str:
        return f"{1000 * values.p50:.0f} / {1000 * values.p99:.0f}" if values else "-"

    rows = [
        (
            f"{r.users} users" if r.users is not None else f"{r.rate:g} /s",
            r.url,
            r.requests,
            r.errors,
            f"{r.output_tokens_per_s:.1f}",
            f"{r.user_tokens_per_s:.1f}",
            milliseconds(r.ttft),
            milliseconds(r.itl),
            milliseconds(r.tpot),
            milliseconds(r.e2e),
        )
        for r in reports
    ]
    headers = (
        "load",
        "server",
        "requests",
        "errors",
        "token/s",
        "per user",
        "TTFT ms",
        "ITL ms",
        "TPOT ms",
        "E2E ms",
    )
    return markdown_table(headers, rows)


def compare_table(reports: Sequence[LevelReport], urls: tuple[str, str]) -> str:
    """How many times better the first server is at each load: medians over the repeats."""
    first, second = urls
    rows = []
    for load in dict.fromkeys((r.users, r.rate) for r in reports):
        pair = [[r for r in reports if r.url == url and (r.users, r.rate) == load] for url in (first, second)]
        throughput = [percentile([r.output_tokens_per_s for r in runs], 50) for runs in pair]
        row = [f"{load[0]} users" if load[0] is not None else f"{load[1]:g} /s", _ratio(*throughput)]
        for name in ("ttft", "itl", "e2e"):
            medians = [[value.p50 for r in runs if (value := getattr(r, name))] for runs in pair]
            a, b = (percentile(values, 50) if values else 0.0 for values in medians)
            row.append(_ratio(b, a))
        rows.append(row)
    return markdown_table((f"{first} against {second}", "token/s", "TTFT", "ITL", "E2E"), rows)


def _ratio(better: float, worse: float) -> str:
    return f"{better / worse:.2f}x" if better and worse else "-"
