"""Many users at once: total token/s through HTTP, of a peer, and of the engine without a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.serving.bars import Bar
from benchmarks.serving.servers import Meter, Programs, Running
from treadle.bench.http_client import Connection
from treadle.bench.serve import (
    Exchange,
    Target,
    exchange,
    first_model,
    measure_tokens_per_word,
    request_body,
    warm_up,
)
from treadle.bench.workload import Length, TokensPerWord, Workload, words

Chats = list[list[dict[str, str]]]
WORKLOAD = Workload(Length.parse("30-60"), Length.parse("256"))


async def target_of(running: Running) -> tuple[Target, TokensPerWord]:
    """How the server is asked, and how long its words are."""
    target = Target(running.url, await first_model(running.url, None), timeout=3600)
    return target, await measure_tokens_per_word(target, WORKLOAD)


async def ask_all(target: Target, chats: Chats, answer: int) -> tuple[float, list[Exchange]]:
    """All at once, each on a connection of its own: seconds until the last has its answer."""
    connections = [Connection(target.url) for _ in chats]
    start = time.perf_counter()
    done = await asyncio.gather(
        *(
            exchange(connection, target, request_body(target, WORKLOAD, chat, answer))
            for connection, chat in zip(connections, chats, strict=True)
        )
    )
    seconds = time.perf_counter() - start
    for connection in connections:
        await connection.close()
    if errors := [e.error for e in done if e.error]:
        raise SystemExit(f"{target.url}: {len(errors)} of {len(chats)} requests failed: {errors[0]}")
    return seconds, done


@contextlib.contextmanager
def offline_engine(model: Path, threads: int) -> Iterator[subprocess.Popen[str]]:
    """``benchmarks.serving.offline``, loaded."""
    command = [sys.executable, "-m", "benchmarks.serving.offline", str(model), str(threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit("the engine without a server could not be loaded; see above")
        yield process
        process.stdin.close()


def ask_offline(process: subprocess.Popen[str], chats: Chats, answer: int) -> dict[str, Any]:
    """Seconds and tokens of one batch."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"chats": chats, "answer": answer}) + "\n")
    process.stdin.flush()
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def total(seconds: float, done: list[Exchange]) -> float:
    """Token/s: output, and the prompt tokens that were computed."""
    tokens = sum(e.prompt_tokens - e.cached_tokens + e.completion_tokens for e in done)
    return tokens / seconds


async def twenty_users(programs: Programs, count: int, answer: int, rounds: int) -> list[Bar]:
    """Every round asks the same new questions of the engine alone, of Treadle and of the peer."""
    found: dict[str, list[float]] = {"offline": [], "ours": [], "peer": []}
    cpu: list[dict[str, float]] = []
    foreign = []
    with (
        offline_engine(programs.model, programs.threads) as engine,
        programs.ours() as ours,
        programs.peer(count, count * (256 + answer), unified=False) as peer,
    ):
        ours_target, rate = await target_of(ours)
        peer_target = (await target_of(peer))[0] if peer else None
        rng = random.Random(7)
        ask_offline(engine, chats_of(count, rng, rate), 8)
        for target in filter(None, (ours_target, peer_target)):
            await warm_up(target, WORKLOAD, rate, count)
        for _ in range(rounds):
            chats = chats_of(count, rng, rate)
            meter = Meter()
            alone = ask_offline(engine, chats, answer)
            found["offline"].append((alone["prompt_tokens"] + alone["completion_tokens"]) / alone["seconds"])
            before, own = ours.cpu(), time.process_time()
            seconds, done = await ask_all(ours_target, chats, answer)
            after = ours.cpu()
            cpu.append(
                {
                    "server": (after[0] - before[0]) / seconds,
                    "engine": (after[1] - before[1]) / seconds,
                    "client": (time.process_time() - own) / seconds,
                }
            )
            found["ours"].append(total(seconds, done))
            if peer_target:
                found["peer"].append(total(*await ask_all(peer_target, chats, answer)))
            foreign.append(meter.foreign())
    return _bars(found, cpu, max(foreign), f"{count} users")


def chats_of(count: int, rng: random.Random, rate: TokensPerWord) -> Chats:
    """New questions of one message each."""
    return [
        [{"role": "user", "content": words(rate.words(WORKLOAD.prompt.draw(rng)), rng)}] for _ in range(count)
    ]


def _bars(found: dict[str, list[float]], cpu: list[dict[str, float]], foreign: float, load: str) -> list[Bar]:
    middle = {name: median(values) for name, values in found.items() if values}
    overheads = [1 - a / b for a, b in zip(found["ours"], found["offline"], strict=True)]
    detail = {"token_per_s": found, "cores_used": cpu}
    bars = [Bar(f"{load}: Treadle, total token/s", middle["ours"], foreign=foreign, detail=detail)]
    if "peer" in middle:
        ratios = [a / b for a, b in zip(found["ours"], found["peer"], strict=True)]
        bars += [
            Bar(f"{load}: llama-server, total token/s", middle["peer"], foreign=foreign),
            Bar(f"{load}: times llama-server", median(ratios), least=3, foreign=foreign),
        ]
    return [
        *bars,
        Bar(f"{load}: engine without server, total token/s", middle["offline"], foreign=foreign),
        Bar("server overhead, % of that", 100 * median(overheads), most=5, foreign=foreign),
    ]
