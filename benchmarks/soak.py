"""Mixed load with random cancels on one server, for a long time: does memory grow, does anything break?

    python -m benchmarks.soak [MODEL] --minutes 30 --users 12 --out soak

The users do, in random order: conversations that grow and share a beginning, streamed and whole answers,
several choices, logprobs, structured answers, stop strings, long prompts, requests that must be refused; and
they leave at any moment, politely or with a reset. Every few seconds the memory of both processes and the
metrics are noted.

At the end the load stops, and nothing may be left: no request, no KV block held, no restart of the engine, no
traceback in the log. Memory is compared by the median slope of the second half of the samples: before
that, KV blocks are used for the first time and allocators find their size. Tokenizers remember their first
10,000 words and the bytes of every token, 1 to 3 MiB in all; that is filled before the load begins.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import socket
import statistics
import string
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.servers import Running, free_port, serve, temporary_folder
from treadle.bench.http_client import Connection, HttpError
from treadle.bench.noise import tree_seconds
from treadle.bench.report import markdown_table
from treadle.bench.serve import Target, first_model
from treadle.bench.workload import words
from treadle.machine import resident_memory

_EVERY = 5.0  # seconds between samples
_CLEAN = (
    "treadle_engine_running",
    "treadle_engine_queued",
    "treadle_engine_kv_blocks_held",
    "treadle_requests_running",
    "treadle_engine_restarts_total",
)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_REFUSED: tuple[dict[str, Any], ...] = (
    {"max_tokens": -1},
    {"temperature": "hot"},
    {"messages": []},
    {"model": "no-such-model"},
    {"messages": [{"role": "user", "content": "word " * 50_000}]},
)


@dataclass(frozen=True)
class Sample:
    """Anonymous memory in bytes at ``seconds`` after the start, and the metrics."""

    seconds: float
    server: int
    engine: int
    metrics: dict[str, float]


@dataclass
class Tally:
    """What happened so far."""

    done: Counter[str] = field(default_factory=Counter)  # by what was asked and how it ended
    surprises: list[str] = field(default_factory=list)


class User:
    """One user, who does one thing after the other until ``until``."""

    def __init__(self, number: int, target: Target, tally: Tally, until: float) -> None:
        self._rng = random.Random(number)
        self._url, self._model, self._tally, self._until = target.url, target.model, tally, until
        self._shared = words(150, random.Random(0))

    async def run(self) -> None:
        """Until the time is over. What must not happen is noted as a surprise."""
        kinds: list[Callable[[], Coroutine[Any, Any, str]]] = [
            self._conversation, self._conversation, self._stream, self._whole, self._choices, self._logprobs,
            self._schema, self._stop, self._long, self._refused, self._cut_body,
        ]  # fmt: skip
        while time.monotonic() < self._until:
            kind = self._rng.choice(kinds)
            name = kind.__name__.strip("_")
            try:
                ended = await asyncio.wait_for(kind(), 600)
            except (HttpError, OSError, EOFError, ValueError, TimeoutError) as error:
                busy = "HTTP 429" in str(error)
                ended = "busy" if busy else "failed"
                if not busy:
                    self._tally.surprises.append(f"{name}: {type(error).__name__}: {error}"[:300])
            self._tally.done[f"{name}, {ended}"] += 1
            await asyncio.sleep(self._rng.expovariate(4))

    def _body(self, prompt: int, answer: int, **more: Any) -> dict[str, Any]:
        content = words(prompt, self._rng)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": answer,
        }
        return body | {"ignore_eos": True, "temperature": self._rng.choice([0, 0.8])} | more

    async def _read(self, body: dict[str, Any], leave: float = 0.3) -> tuple[str, str]:
        """(how it ended, text) of a streamed answer, which is left with this chance at a random moment."""
        leaves_after = self._rng.randrange(1, 40) if self._rng.random() < leave else sys.maxsize
        connection = Connection(self._url)
        pieces: list[str] = []
        ended = False
        try:
            async with aclosing(connection.events("/v1/chat/completions", body | {"stream": True})) as events:
                async for event in events:
                    if "error" in event:
                        raise HttpError(str(event["error"]))
                    for choice in event["choices"]:
                        pieces.append(choice["delta"].get("content") or "")
                        ended = ended or choice["finish_reason"] is not None
                    if len(pieces) > leaves_after:
                        return "left", "".join(pieces)
        finally:
            await connection.close()
        if not ended:
            raise HttpError("the stream ended without finish_reason")
        return "complete", "".join(pieces)

    async def _post(self, body: dict[str, Any]) -> str:
        """A whole answer, or leave while it is computed, with a reset."""
        payload = json.dumps(body).encode()
        leaves = self._rng.random() < 0.3
        reader, writer = await self._send(payload, len(payload))
        try:
            if leaves:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1), self._rng.random())
                return "reset" if self._reset(writer) else "left"
            answer = await reader.read()
        finally:
            writer.close()
        status = int(answer.split(b" ", 2)[1])
        if status != 200:
            raise HttpError(f"HTTP {status}: {answer[-300:].decode(errors='replace')}")
        return "complete"

    async def _send(self, payload: bytes, length: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self._url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + payload)
        return reader, writer

    def _reset(self, writer: asyncio.StreamWriter) -> bool:
        """Make the close to come a reset, every second time."""
        if self._rng.random() < 0.5:
            return False
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return True

    async def _conversation(self) -> str:
        messages = [{"role": "system", "content": self._shared}]
        ended = "complete"
        for _ in range(self._rng.randrange(1, 6)):
            messages.append({"role": "user", "content": words(self._rng.randrange(5, 60), self._rng)})
            ended, text = await self._read(self._body(1, self._rng.randrange(1, 80), messages=messages), 0.1)
            if ended == "left":
                break
            messages.append({"role": "assistant", "content": text})
        return ended

    async def _stream(self) -> str:
        return (await self._read(self._body(self._rng.randrange(1, 200), self._rng.randrange(1, 150))))[0]

    async def _whole(self) -> str:
        return await self._post(self._body(self._rng.randrange(1, 100), self._rng.randrange(1, 80)))

    async def _choices(self) -> str:
        return (await self._read(self._body(40, 40, n=self._rng.randrange(2, 5))))[0]

    async def _logprobs(self) -> str:
        return await self._post(self._body(20, 30, logprobs=True, top_logprobs=5))

    async def _schema(self) -> str:
        format_ = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
        body = self._body(20, 120, response_format=format_)
        del body["ignore_eos"]
        return (await self._read(body))[0]

    async def _stop(self) -> str:
        return (await self._read(self._body(20, 200, stop=["e", "the"])))[0]

    async def _long(self) -> str:
        return (await self._read(self._body(self._rng.randrange(300, 1200), 20), 0.5))[0]

    async def _refused(self) -> str:
        wrong = self._rng.choice(_REFUSED)
        try:
            await self._post(self._body(3, 4) | wrong)
        except HttpError as error:
            if "HTTP 400" in str(error) or "HTTP 404" in str(error):
                return "refused"
            raise
        return "left"

    async def _cut_body(self) -> str:
        payload = json.dumps(self._body(100, 10)).encode()
        _, writer = await self._send(payload[: self._rng.randrange(len(payload))], len(payload))
        await writer.drain()
        await asyncio.sleep(self._rng.random())
        self._reset(writer)
        writer.close()
        return "cut"


async def meet_words(url: str) -> None:
    """Show the tokenizer more words than it remembers, and every token: its tables are full from now on."""
    rng = random.Random(1)
    new = ["".join(rng.choices(string.ascii_lowercase, k=rng.randrange(3, 12))) for _ in range(20_000)]
    connection = Connection(url)
    for i in range(0, len(new), 100):
        await connection.post("/tokenize", {"prompt": " ".join(new[i : i + 100])})
    for i in range(0, 48 * 1024, 1024):
        await connection.post("/detokenize", {"tokens": list(range(i, i + 1024))})
    await connection.close()


async def metrics(url: str) -> dict[str, float]:
    """Every series, summed over its labels."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    text = (await reader.read()).partition(b"\r\n\r\n")[2].decode()
    writer.close()
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("treadle_"):
            series, value = line.rsplit(" ", 1)
            name = series.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


async def sample(server: Running, start: float) -> Sample:
    """Memory and metrics now."""
    children = [pid for pid in tree_seconds(server.pid) if pid != server.pid]
    with contextlib.suppress(OSError):
        memory, engine = resident_memory(server.pid), sum(map(resident_memory, children))
        return Sample(time.monotonic() - start, memory, engine, await metrics(server.url))
    return Sample(time.monotonic() - start, 0, 0, {})


async def load(server: Running, users: int, minutes: float) -> tuple[Tally, list[Sample]]:
    """The whole load, and afterwards a moment in which everything must come to rest."""
    await meet_words(server.url)
    tally, samples, start = Tally(), [], time.monotonic()
    until = start + 60 * minutes
    target = Target(server.url, await first_model(server.url, None))
    tasks = [asyncio.create_task(User(i, target, tally, until).run()) for i in range(users)]
    while not all(task.done() for task in tasks):
        samples.append(await sample(server, start))
        await asyncio.wait(tasks, timeout=_EVERY)
        if len(samples) % 24 == 0:
            print(progress(tally, samples[-1]), flush=True)
    for task in tasks:
        task.result()
    await asyncio.sleep(3)  # for the engine's check of its own counts when idle
    samples.append(await sample(server, start))
    return tally, samples


def progress(tally: Tally, now: Sample) -> str:
    """One line."""
    mib = 2**20
    return (
        f"{now.seconds / 60:.1f} min: {tally.done.total()} requests, {len(tally.surprises)} surprises, "
        f"server {now.server / mib:.1f} MiB, engine {now.engine / mib:.1f} MiB"
    )


def slope(samples: list[Sample], of: Callable[[Sample], int]) -> float:
    """Bytes per hour: the median slope over all pairs of samples of the second half, which one step of an
    allocator does not bend (Theil 1950, Sen 1968)."""
    half = [s for s in samples if s.seconds >= samples[-1].seconds / 2 and of(s)]
    if len(half) < 2:
        return 0.0
    pairs = itertools.combinations(half, 2)
    return 3600 * statistics.median((of(b) - of(a)) / (b.seconds - a.seconds) for a, b in pairs)


def findings(tally: Tally, samples: list[Sample], log: str) -> tuple[str, list[str]]:
    """The report, and what is wrong."""
    last, mib = samples[-1].metrics, 2**20
    wrong = [f"{name} is {last.get(name)} after the load" for name in _CLEAN if last.get(name) != 0]
    wrong += [f"{len(tally.surprises)} surprises, first: {tally.surprises[0]}"] if tally.surprises else []
    wrong += ["there is a traceback in the log"] if "Traceback" in log else []
    memory = []
    sizes: dict[str, Callable[[Sample], int]] = {"server": lambda s: s.server, "engine": lambda s: s.engine}
    for name, of in sizes.items():
        values = [of(s) / mib for s in samples if of(s)]
        middle, grows = values[len(values) // 2], slope(samples, of) / mib
        row = [*(f"{value:.1f}" for value in (values[0], middle, values[-1], max(values))), f"{grows:+.2f}"]
        memory.append([name, *row])
        if grows > max(2.0, 0.02 * middle):
            wrong.append(f"the memory of the {name} grows by {grows:.1f} MiB per hour")
    happened = [(name, str(count)) for name, count in sorted(tally.done.items())]
    head = ("anonymous memory, MiB", "begin", "middle", "end", "most", "per hour, second half")
    text = "\n\n".join([markdown_table(head, memory), markdown_table(("what", "times"), happened)])
    return text, wrong


def main() -> None:
    """Load a server; exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="[the built-in one]")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--kv-memory", default="64M", help="small: all of it is used soon [%(default)s]")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    options = parser.parse_args()
    with temporary_folder() as folder:
        port, log = free_port(), Path(folder) / "log"
        command = [sys.executable, "-m", "treadle.cli", "serve", *([options.model] if options.model else [])]
        command += ["--port", str(port), "--kv-memory", options.kv_memory, "--context", "2048"]
        with serve(command, port, log) as server:
            tally, samples = asyncio.run(load(server, options.users, options.minutes))
        report, wrong = findings(tally, samples, log.read_text())
    minutes = samples[-1].seconds / 60
    verdict = "\n".join(f"WRONG: {line}" for line in wrong) or "nothing is wrong"
    text = f"{tally.done.total()} requests in {minutes:.1f} minutes\n\n{report}\n\n{verdict}\n"
    print(text)
    if options.out:
        options.out.with_suffix(".md").write_text(text, encoding="utf-8")
        record = {"wrong": wrong, "surprises": tally.surprises[:50], "samples": [asdict(s) for s in samples]}
        options.out.with_suffix(".json").write_text(json.dumps(record), encoding="utf-8")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
