"""What a client, the network or the system may do to a server that is at work. Each scenario drives the real
program over real sockets and ends with ``at_rest``: nothing is held, every place can be taken again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from treadle.bench.noise import tree_seconds

SLOTS, QUEUE = 64, 16  # requests that run together, and that may wait (``--max-queue``)
_PATIENCE = 120.0  # seconds for what takes as long as the machine needs


@dataclass
class Faulty:
    """The server under test."""

    url: str
    pid: int
    model: str
    keys: tuple[str, ...]  # used in turn: one may not take all places
    requests: Iterator[int] = field(default_factory=itertools.count)

    def key(self) -> str:
        return self.keys[next(self.requests) % len(self.keys)]

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def engine(self) -> int:
        """Process id of the engine."""
        (pid,) = (pid for pid in tree_seconds(self.pid) if pid != self.pid)
        return pid

    def body(self, prompt: str = "One, two,", tokens: int = 200, **more: Any) -> dict[str, Any]:
        """A streamed completion of exactly ``tokens`` tokens, the same every time."""
        fixed = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return {**fixed, "stream": True, "ignore_eos": True, **more}


@dataclass
class Answer:
    """A request being answered: what has come, and when."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)
    finish: str | None = None
    error: dict[str, Any] | None = None
    error_at: float = 0.0
    done: bool = False  # ``[DONE]`` has come
    raw: bytes = b""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    async def head(self) -> Answer:
        """Read status and headers."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}
        return self

    async def read(self) -> Answer:
        """Read to the end of the connection."""
        await self.head()
        pending = b""
        while data := await self.reader.read(65536):
            self.raw += data
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._take(line)
        self.writer.close()
        return self

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data: [DONE]"):
            self.done = True
        elif line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                self.error, self.error_at = event["error"], time.monotonic()
            for choice in event.get("choices", []):
                self.pieces.append(choice["text"])
                self.finish = choice["finish_reason"] or self.finish

    def leave(self, reset: bool) -> None:
        """Close the connection, with a reset or without."""
        if reset:
            raw = self.writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.close()


async def connect(server: Faulty, receive_buffer: int | None = None) -> Answer:
    """A connection that has not said anything yet."""
    raw = socket.socket()
    raw.setblocking(False)
    if receive_buffer:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(raw, server.address)
    return Answer(*await asyncio.open_connection(sock=raw, limit=4096 if receive_buffer else 1 << 20))


def request_bytes(server: Faulty, body: dict[str, Any], length: int | None = None) -> bytes:
    """A request after whose answer the connection ends. ``length``: what Content-Length says."""
    payload = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
    lines += [f"Authorization: Bearer {server.key()}"]
    lines += ["Content-Type: application/json", f"Content-Length: {length or len(payload)}", "", ""]
    return "\r\n".join(lines).encode() + payload


async def ask(server: Faulty, body: dict[str, Any]) -> Answer:
    """Send a request; the answer is still to be read."""
    answer = await connect(server)
    answer.writer.write(request_bytes(server, body))
    await answer.writer.drain()
    return answer


async def whole(server: Faulty, body: dict[str, Any]) -> Answer:
    """Send a request and read its answer to the end."""
    return await (await ask(server, body)).read()


async def get(server: Faulty, path: str) -> Answer:
    """A GET, read to the end."""
    answer = await connect(server)
    lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
    lines += [f"Authorization: Bearer {server.keys[0]}", "", ""]
    answer.writer.write("\r\n".join(lines).encode())
    return await answer.read()


async def metrics(server: Faulty) -> Counter[str]:
    """Every series, summed over its labels."""
    found: Counter[str] = Counter()
    for line in (await get(server, "/metrics")).raw.decode().splitlines():
        if line.startswith("treadle_"):
            name, value = line.rsplit(" ", 1)
            found[name.partition("{")[0]] += float(value)  # type: ignore[assignment]
    return found


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """Wait for it, but not for ever."""
    end = time.monotonic() + _PATIENCE
    while not await condition():
        assert time.monotonic() < end, f"waited in vain for {condition.__name__}"
        await asyncio.sleep(0.05)


async def ready(server: Faulty) -> None:
    """Wait until ``/health`` says so."""

    async def healthy() -> bool:
        return (await get(server, "/health")).status == 200

    await until(healthy)


async def at_rest(server: Faulty, restarts: float) -> None:
    """Nothing runs or is held; the engine has not died more than ``restarts`` times, also not in the check of
    its own counts that it makes when idle; and as many requests as ever can be taken and run.
    """
    names = ("running", "queued", "kv_blocks_held")

    async def nothing_left() -> bool:
        found = await metrics(server)
        return (
            not any(found[f"treadle_engine_{name}"] for name in names)
            and not found["treadle_requests_running"]
        )

    await ready(server)
    await until(nothing_left)
    await asyncio.sleep(1.5)
    assert (await metrics(server))["treadle_engine_restarts_total"] == restarts
    answers = await asyncio.gather(*(ask(server, server.body(tokens=1500)) for _ in range(SLOTS + QUEUE)))
    heads = await asyncio.gather(*(answer.head() for answer in answers))
    assert {answer.status for answer in heads} == {200}
    refused = await whole(server, server.body())
    assert refused.status == 429, "one more than there are places"

    async def slots_taken() -> bool:
        found = await metrics(server)
        return found["treadle_engine_running"] == SLOTS and found["treadle_engine_queued"] == QUEUE

    await until(slots_taken)
    for answer in answers:
        answer.leave(reset=False)
    await until(nothing_left)
    assert (await whole(server, server.body(tokens=3))).finish == "length"


# ---------------------------------------------------------------------- scenarios


async def killed(server: Faulty, times: int) -> None:
    """The engine is killed while answers are being written, by SIGKILL, again and again."""
    before = (await metrics(server))["treadle_engine_restarts_total"]
    for _ in range(times):
        answers = await asyncio.gather(*(ask(server, server.body(tokens=1500)) for _ in range(24)))
        readers = [asyncio.create_task(answer.read()) for answer in answers]
        plain = asyncio.create_task(whole(server, server.body(tokens=1500, stream=False)))

        async def streaming(answers: list[Answer] = answers) -> bool:
            return sum(len(answer.pieces) > 3 for answer in answers) >= 16

        await until(streaming)
        os.kill(server.engine(), signal.SIGKILL)
        killed_at = time.monotonic()
        async with asyncio.timeout(_PATIENCE):
            await asyncio.gather(*readers)
            refused = await plain
        for answer in answers:
            assert answer.status == 200 and not answer.done and answer.finish is None
            assert answer.error is not None and answer.error["code"] == "engine_error"
            assert answer.error_at - killed_at < 1.0, "the limit that the product promises"
        assert refused.status == 500 and b"engine_error" in refused.raw
        now = await whole(server, server.body(tokens=3))
        assert now.status in (200, 503)
        if now.status == 503:
            assert int(now.headers["retry-after"]) > 0
        await ready(server)
        assert (await whole(server, server.body(tokens=3))).finish == "length"
    await at_rest(server, before + times)


async def many_at_once(server: Faulty, count: int, tokens: int) -> None:
    """More requests at once than are ever taken: the rest is refused properly, the others are answered."""
    restarts = (await metrics(server))["treadle_engine_restarts_total"]
    expected = await whole(server, server.body(tokens=tokens))
    async with asyncio.timeout(_PATIENCE * 4):
        answers = await asyncio.gather(*(whole(server, server.body(tokens=tokens)) for _ in range(count)))
    statuses = Counter(answer.status for answer in answers)
    assert set(statuses) <= {200, 429} and statuses[429] > 0, statuses
    assert statuses[200] >= SLOTS + QUEUE
    for answer in answers:
        if answer.status == 200:
            assert (answer.text, answer.finish, answer.done) == (expected.text, "length", True)
        else:
            assert int(answer.headers["retry-after"]) > 0
            assert json.loads(answer.raw)["error"]["code"] == "queue_full"
    await at_rest(server, restarts)


async def vanishing(server: Faulty, count: int, seed: int = 1) -> None:
    """Clients leave at every point of a request, half of them with a reset; one stays and notices nothing."""
    restarts = (await metrics(server))["treadle_engine_restarts_total"]
    rng = random.Random(seed)
    alone = await whole(server, server.body("Once upon a time", 150))
    stays = asyncio.create_task(whole(server, server.body("Once upon a time", 150)))

    async def client(number: int) -> None:
        answer = await connect(server)
        prompt = "again and " * rng.randrange(1, 300)
        payload = request_bytes(
            server, server.body(prompt, 1000, stream=rng.random() < 0.7, n=rng.randrange(1, 4))
        )
        match number % 5:
            case 0:  # without a word
                pass
            case 1:  # in the headers
                answer.writer.write(payload[: rng.randrange(1, 90)])
            case 2:  # in the body
                answer.writer.write(payload[: rng.randrange(150, len(payload))])
            case 3:  # queued, or while the prompt is read
                answer.writer.write(payload)
                await asyncio.sleep(rng.random() * 0.2)
            case _:  # in the answer
                answer.writer.write(payload)
                await asyncio.wait([asyncio.create_task(answer.reader.read(2000))], timeout=1 + rng.random())
        await asyncio.sleep(rng.random() * 0.3)
        answer.leave(reset=rng.random() < 0.5)

    await asyncio.gather(*(client(number) for number in range(count)))
    assert (await stays).text == alone.text
    await at_rest(server, restarts)


async def cut_bodies(server: Faulty) -> None:
    """Bodies that end too early are refused where the client can be told, and else forgotten."""
    restarts = (await metrics(server))["treadle_engine_restarts_total"]
    body = server.body("word " * 2000, 5)
    payload = request_bytes(server, body)
    text = json.dumps(body).encode()
    for size in (1, len(text) // 2, len(text) - 1):  # whole HTTP, half JSON
        answer = await connect(server)
        head, _, _ = request_bytes(server, body, length=size).partition(b"\r\n\r\n")
        answer.writer.write(head + b"\r\n\r\n" + text[:size])
        await answer.read()
        assert answer.status == 400 and json.loads(answer.raw)["error"]["type"] == "invalid_request_error"
    for size in (len(payload) - 1, len(payload) - 5000):  # the sending side closes
        answer = await connect(server)
        answer.writer.write(payload[:size])
        answer.writer.write_eof()
        assert b" 200 " not in await answer.reader.read()
        answer.leave(reset=False)
    chunked = payload.replace(b"Content-Length: %d" % len(text), b"Transfer-Encoding: chunked")
    head, _, _ = chunked.partition(b"\r\n\r\n")
    for chunks in (b'5\r\n{"pro', b"zz\r\nnot a size", b"ffffffffffffffffffff\r\n{"):
        answer = await connect(server)
        answer.writer.write(head + b"\r\n\r\n" + chunks)
        answer.writer.write_eof()
        assert b" 200 " not in await answer.reader.read()
        answer.leave(reset=False)
    await at_rest(server, restarts)


async def slow_readers(server: Faulty, count: int, tokens: int) -> None:
    """Clients that do not read delay nobody, and get everything once they do."""
    restarts = (await metrics(server))["treadle_engine_restarts_total"]
    big = {"logprobs": 5, "n": 4}  # many bytes per token: more than the system's buffers take
    slow = [await connect(server, receive_buffer=4096) for _ in range(count)]
    for answer in slow:
        answer.writer.write(request_bytes(server, server.body("Count:", tokens, **big)))
    before = (await metrics(server))["treadle_engine_output_tokens_total"]
    quick = await whole(server, server.body(tokens=50))
    assert quick.finish == "length"

    async def computed() -> bool:
        found = await metrics(server)
        return found["treadle_engine_output_tokens_total"] - before >= 4 * count * tokens

    await until(computed)
    done = await asyncio.gather(*(answer.read() for answer in slow))
    reference = await whole(server, server.body("Count:", tokens, **big))
    for answer in done:
        assert answer.done and answer.error is None
        assert len(answer.text) == len(reference.text)
    await at_rest(server, restarts)
