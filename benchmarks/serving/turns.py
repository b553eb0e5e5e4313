"""The second turn of a long conversation: how much of the first turn's waiting is left."""

from __future__ import annotations

import random
import subprocess
import sys
from statistics import median

from benchmarks.serving.bars import Bar
from benchmarks.serving.servers import Meter, Programs, Running
from benchmarks.serving.users import WORKLOAD, target_of
from treadle.bench.http_client import Connection
from treadle.bench.serve import Exchange, Target, exchange, request_body
from treadle.bench.workload import TokensPerWord, words

_ANSWER = 32  # tokens
Conversation = list[dict[str, str]]


async def second_turn(programs: Programs, tokens: int, conversations: int) -> list[Bar]:
    """Ours, then ours restarted on what it has spilled, then the peer."""
    spill = _can_spill()
    context = str(max(tokens + 512, 2048))
    folder = programs.logs / "kv"
    options = ["--context", context, *(["--kv-spill", str(folder)] if spill else [])]
    with programs.ours(*options) as ours:
        first, second, asked, foreign = await _converse(ours, tokens, conversations)
    bars = _bars("Treadle", first, second, foreign, most=10)
    if spill:
        with programs.ours(*options) as ours:
            target, rate = await target_of(ours)
            meter = Meter()
            rng = random.Random(99)
            again = [await _turn(target, chat[:-1] + _question(rate, rng, 30)) for chat in asked]
            times = [_ttft(e) for e in again]
        detail = {"ttft_s": times, "cached_tokens": [e.cached_tokens for e in again]}
        share = 100 * median(times) / median(_ttft(e) for e in first)
        name = "second turn after a restart, Treadle: TTFT, % of the first turn's"
        bars.append(Bar(name, share, None, 20, meter.foreign(), detail))
    with programs.peer(1, int(context), unified=False) as peer:
        if peer is not None:
            first, second, _, foreign = await _converse(peer, tokens, conversations)
            bars += _bars("llama-server", first, second, foreign, most=None)
    return bars


def _can_spill() -> bool:
    text = subprocess.run(
        [sys.executable, "-m", "treadle.cli", "serve", "--help"], capture_output=True, text=True, check=True
    ).stdout
    return "--kv-spill" in text


async def _converse(
    server: Running, tokens: int, conversations: int
) -> tuple[list[Exchange], list[Exchange], list[Conversation], float]:
    target, rate = await target_of(server)
    rng = random.Random(5)
    meter = Meter()
    first, second, asked = [], [], []
    for _ in range(conversations):
        chat = _question(rate, rng, tokens)
        first.append(await _turn(target, chat))
        chat = [*chat, {"role": "assistant", "content": first[-1].text}, *_question(rate, rng, 30)]
        second.append(await _turn(target, chat))
        asked.append(chat)
    return first, second, asked, meter.foreign()


def _question(rate: TokensPerWord, rng: random.Random, tokens: int) -> Conversation:
    return [{"role": "user", "content": words(rate.words(tokens), rng)}]


async def _turn(target: Target, chat: Conversation) -> Exchange:
    connection = Connection(target.url)
    done = await exchange(connection, target, request_body(target, WORKLOAD, chat, _ANSWER))
    await connection.close()
    if done.error:
        raise SystemExit(f"{target.url}: {done.error}")
    return done


def _ttft(e: Exchange) -> float:
    return e.arrivals[0] - e.sent


def _bars(
    name: str, first: list[Exchange], second: list[Exchange], foreign: float, most: float | None
) -> list[Bar]:
    one, two = ([_ttft(e) for e in turn] for turn in (first, second))
    detail = {
        "first_s": one,
        "second_s": two,
        "prompt_tokens": [e.prompt_tokens for e in second],
        "cached_tokens": [e.cached_tokens for e in second],
    }
    return [
        Bar(f"first turn, {name}: TTFT, s", median(one), foreign=foreign),
        Bar(
            f"second turn, {name}: TTFT, % of the first turn's",
            100 * median(b / a for a, b in zip(one, two, strict=True)),
            None,
            most,
            foreign,
            detail,
        ),
    ]
