"""A long prompt arrives among running answers: how much slower they become, and whether one starves."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.serving.bars import Bar
from benchmarks.serving.servers import Meter, Programs, Running
from benchmarks.serving.users import WORKLOAD, target_of
from treadle.bench.http_client import Connection, HttpError
from treadle.bench.serve import Target, request_body
from treadle.bench.workload import words

_PATIENCE = 1800.0  # seconds
_LENGTH = 2048  # tokens of a running answer: it must outlast the reading of the long prompt


@dataclass
class Answer:
    """One running answer: when its pieces came."""

    arrivals: list[float] = field(default_factory=list)
    failure: str | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # the first piece is there

    def gaps(self, start: float, end: float) -> list[float]:
        """Between pieces within [start, end], seconds; the silence at its end counts as well."""
        times = [start, *(t for t in self.arrivals if start <= t <= end), end]
        return [b - a for a, b in itertools.pairwise(times)]


async def long_prompt(programs: Programs, decodes: int, tokens: int, watch: float) -> list[Bar]:
    """Ours, then the peer's."""
    bars = []
    context = tokens + 1024  # the length of a text is known to some per cent only
    with programs.ours("--context", str(max(context, _LENGTH + 256)), "--kv-memory", "2G") as ours:
        bars += await _measure("Treadle", ours, decodes, tokens, watch)
    with programs.peer(decodes + 1, context + decodes * (_LENGTH + 256), unified=True) as peer:
        if peer is not None:
            bars += await _measure("llama-server", peer, decodes, tokens, watch)
    return bars


async def _measure(name: str, server: Running, decodes: int, tokens: int, watch: float) -> list[Bar]:
    target, rate = await target_of(server)
    rng = random.Random(11)
    meter = Meter()
    answers = [Answer() for _ in range(decodes)]
    tasks = [
        asyncio.create_task(_answer(target, answer, words(rate.words(45), rng), _LENGTH))
        for answer in answers
    ]
    await _until_running(answers)
    begin = time.perf_counter()
    await asyncio.sleep(watch)
    arrived = time.perf_counter()
    long = Answer()
    reading = asyncio.create_task(_answer(target, long, words(rate.words(tokens), rng), 8))
    await asyncio.wait([reading, asyncio.create_task(long.begun.wait())], return_when=asyncio.FIRST_COMPLETED)
    read = time.perf_counter()
    ended = sum(task.done() for task in tasks)
    foreign = meter.foreign()
    for task in [*tasks, reading]:
        task.cancel()
    await asyncio.gather(*tasks, reading, return_exceptions=True)
    if not long.arrivals:
        raise SystemExit(f"{name}: the long prompt was not answered: {long.failure}")
    calm = [gap for answer in answers for gap in answer.gaps(begin, arrived)[1:-1]]
    busy = [gap for answer in answers for gap in answer.gaps(arrived, read)]
    rates = [len([t for t in a.arrivals if arrived <= t <= read]) / (read - arrived) for a in answers]
    detail: dict[str, Any] = {
        "itl_before_s": median(calm),
        "itl_during_s": median(busy),
        "longest_silence_s": max(busy),
        "pieces_per_s_by_answer": rates,
        "answers_that_ended_early": ended,
        "seconds_of_reading": read - arrived,
    }
    most = 2.0 if name == "Treadle" else None
    title = f"{tokens}-token prompt among {decodes} answers, {name}"
    return [
        Bar(f"{title}: median ITL, times before", median(busy) / median(calm), None, most, foreign, detail),
        Bar(f"{title}: ITL before, ms", 1000 * median(calm)),
        Bar(f"{title}: longest silence of an answer, s", max(busy)),
        Bar(f"{title}: slowest answer over median", min(rates) / median(rates)),
        Bar(f"{title}: time to its first token, s", read - arrived),
    ]


async def _until_running(answers: list[Answer]) -> None:
    end = time.perf_counter() + _PATIENCE
    while any(len(answer.arrivals) < 4 for answer in answers):
        if failures := [answer.failure for answer in answers if answer.failure]:
            raise SystemExit(f"an answer failed: {failures[0]}")
        if time.perf_counter() > end:
            raise SystemExit(f"{len(answers)} answers did not begin within {_PATIENCE:g} s")
        await asyncio.sleep(0.02)


async def _answer(target: Target, answer: Answer, question: str, tokens: int) -> None:
    """Note the pieces of one answer until it ends or is cancelled."""
    connection = Connection(target.url)
    body = request_body(target, WORKLOAD, [{"role": "user", "content": question}], tokens)
    try:
        async with aclosing(connection.events("/v1/chat/completions", body)) as events:
            async for event in events:
                if "error" in event:
                    raise HttpError(str(event["error"]))
                deltas = [choice.get("delta") or {} for choice in event.get("choices") or []]
                if any(d.get("content") or d.get("reasoning_content") for d in deltas):
                    answer.arrivals.append(time.perf_counter())
                    answer.begun.set()
    except (OSError, HttpError, EOFError, ValueError) as error:
        answer.failure = f"{type(error).__name__}: {error}"[:300]
    finally:
        await connection.close()
