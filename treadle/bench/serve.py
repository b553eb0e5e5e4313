"""Drives any OpenAI-compatible server with real HTTP requests and measures what users would feel.

TTFT: request sent to first text. ITL: between two pieces of text. TPOT: first to last text, per token after
the first. E2E: request sent to end of stream. All in seconds. What is counted: treadle.bench.serve_report.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from treadle.bench.http_client import Connection, HttpError
from treadle.bench.serve_report import Level, LevelReport, summarise_level
from treadle.bench.workload import Length, TokensPerWord, Workload, shared_message, words
from treadle.core import TreadleError

_WARM_UP_TOKENS = 16  # of a warm-up answer
_WARM_UP_SEED = 500_000  # away from the seeds of the runs: nothing of theirs gets into a prefix cache
_OPEN_WARM_UP = 4  # requests before an open-loop level; before a closed one as many as users


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
    asked: int = 0  # tokens of answer
    arrivals: list[float] = field(default_factory=list)  # of pieces of text
    end: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    has_usage: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0  # pieces of text where the server sends no usage
    error: str | None = None


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


async def exchange(
    connection: Connection, target: Target, body: dict[str, Any], turn: int = 0, due: float | None = None
) -> Exchange:
    """Sends one streaming chat request and waits for its end; failures are noted, never raised. ``due``: when
    it should have been sent, from where its times count.
    """
    result = Exchange(turn, time.perf_counter() if due is None else due, body["max_tokens"])
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
        if result.finish_reason is None:
            result.error = "the stream ended without finish_reason"
        elif not result.arrivals:
            result.error = "the stream ended without any text"
    except TimeoutError:
        result.error = f"no end of stream within {target.timeout:g} s"
    except (OSError, HttpError, EOFError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"[:300]
    result.end = time.perf_counter()
    result.text = "".join(pieces)
    if not result.has_usage:
        result.completion_tokens = len(result.arrivals)
    return result


def _take_event(event: dict[str, Any], result: Exchange, pieces: list[str]) -> None:
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning")):
            result.arrivals.append(time.perf_counter())
            pieces.append(delta.get("content") or "")
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
    if usage := event.get("usage"):
        result.has_usage = True
        result.prompt_tokens = usage.get("prompt_tokens") or 0
        result.completion_tokens = usage.get("completion_tokens") or 0
        result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def request_body(
    target: Target, workload: Workload, messages: list[dict[str, str]], answer: int
) -> dict[str, Any]:
    """A streaming chat request for ``answer`` tokens."""
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
    """Asks the server how many tokens 20 and 220 words are. Raises TreadleError when it does not answer."""
    connection = Connection(target.url, target.key)
    rng = random.Random(workload.seed)
    counts = []
    try:
        for count in (20, 220):
            messages = [{"role": "user", "content": words(count, rng)}]
            result = await exchange(connection, target, request_body(target, workload, messages, 2))
            if result.error:
                raise TreadleError(f"{target.url} does not answer a first request: {result.error}")
            counts.append(result.prompt_tokens)
    finally:
        await connection.close()
    if counts[1] <= counts[0]:  # a server that reports no usage
        return TokensPerWord()
    per_word = (counts[1] - counts[0]) / 200
    return TokensPerWord(per_word, counts[0] - 20 * per_word)


class _User:
    """One connection that asks one question after the other."""

    def __init__(self, target: Target, workload: Workload, rate: TokensPerWord, number: int) -> None:
        self._target, self._workload, self._rate = target, workload, rate
        self._rng = random.Random(f"{workload.seed}/{number}")
        self._connection = Connection(target.url, target.key)

    async def conversation(self, done: list[Exchange], due: float | None = None) -> None:
        """One conversation; every turn is added to ``done`` when it ends, and the first failure ends it."""
        messages = shared_message(self._workload, self._rate)
        for turn in range(self._workload.turns):
            question = words(self._rate.words(self._workload.prompt.draw(self._rng)), self._rng)
            messages.append({"role": "user", "content": question})
            answer = self._workload.answer.draw(self._rng)
            body = request_body(self._target, self._workload, messages, answer)
            result = await exchange(self._connection, self._target, body, turn, None if turn else due)
            done.append(result)
            if result.error:
                return
            messages.append({"role": "assistant", "content": result.text})

    async def close(self) -> None:
        await self._connection.close()


async def warm_up(target: Target, workload: Workload, rate: TokensPerWord, requests: int) -> int:
    """Sends that many short requests at once, with words of their own, and forgets them. Returns how many."""
    workload = replace(
        workload,
        prompt=Length.parse("32"),
        answer=Length.parse(str(_WARM_UP_TOKENS)),
        turns=1,
        shared_prefix=0,
        seed=workload.seed + _WARM_UP_SEED,
    )
    await _run_users(target, workload, rate, requests, iter(range(requests)))
    return requests


async def _run_users(
    target: Target, workload: Workload, rate: TokensPerWord, users: int, conversations: Iterator[int]
) -> list[Exchange]:
    done: list[Exchange] = []

    async def user(number: int) -> None:
        one = _User(target, workload, rate, number)
        for _ in conversations:
            await one.conversation(done)
        await one.close()

    async with asyncio.TaskGroup() as group:
        for number in range(users):
            group.create_task(user(number))
    return done


async def closed_loop(
    target: Target, workload: Workload, rate: TokensPerWord, users: int, conversations: int
) -> LevelReport:
    """``users`` at once, each asking again once it has its answer, until ``conversations`` are through."""
    warm = await warm_up(target, workload, rate, users)
    start, cpu = time.perf_counter(), time.process_time()
    done = await _run_users(target, workload, rate, users, iter(range(conversations)))
    return _report(target, done, (users, None), warm, start, cpu)


async def open_loop(
    target: Target, workload: Workload, rate: TokensPerWord, per_second: float, seconds: float
) -> LevelReport:
    """Conversations begin at random (a Poisson process) for ``seconds``, however busy the server is. Times
    count from when a conversation was due, should this client be late.
    """
    warm = await warm_up(target, workload, rate, _OPEN_WARM_UP)
    done: list[Exchange] = []
    arrivals = random.Random(workload.seed)

    async def user(number: int, due: float) -> None:
        one = _User(target, workload, rate, number)
        await one.conversation(done, due)
        await one.close()

    start, cpu = time.perf_counter(), time.process_time()
    due = start
    async with asyncio.TaskGroup() as group:
        number = 0
        while (due := due + arrivals.expovariate(per_second)) < start + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(user(number, due))
            number += 1
    return _report(target, done, (None, per_second), warm, start, cpu)


def _report(
    target: Target,
    done: list[Exchange],
    load: tuple[int | None, float | None],
    warm: int,
    start: float,
    cpu: float,
) -> LevelReport:
    seconds = time.perf_counter() - start
    level = Level(target.url, *load, seconds, warm, (time.process_time() - cpu) / seconds)
    return summarise_level(level, done)


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
