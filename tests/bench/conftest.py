"""A tiny OpenAI-compatible server in the same event loop, with misbehaviour on request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest


class FakeServer:
    """Counts words as tokens, streams ``max_tokens`` words; ``fail`` chooses what goes wrong."""

    def __init__(self, fail: str = "") -> None:
        self.fail = fail
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.running = 0
        self.most_running = 0
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), reader, writer)
                if self.fail == "close":  # without saying so, as cpp-httplib does
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.headers.append(head)
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        raw = await reader.readexactly(length)
        if head.startswith("GET /v1/models "):
            body = json.dumps({"data": [{"id": "fake"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            return
        self.bodies.append(json.loads(raw))
        if self.fail == "status":
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nbusy")
            return
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._stream(self.bodies[-1], writer)
        finally:
            self.running -= 1

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        prompt = sum(len(message["content"].split()) + 5 for message in body["messages"])
        for index in range(body["max_tokens"]):
            self._event(writer, {"choices": [{"delta": {"content": f"word{index} "}, "finish_reason": None}]})
            await writer.drain()
            await asyncio.sleep(0.001)
            if index == 2 and self.fail == "cut":
                writer.close()
                raise ConnectionError
            if index == 2 and self.fail == "event":
                self._event(writer, {"error": {"message": "the engine died"}})
            if index == 2 and self.fail == "end":  # like a success, but for what is missing
                writer.write(b"0\r\n\r\n")
                return
        self._event(writer, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        if self.fail != "no usage":
            self._event(writer, {"choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        data = f"data: {json.dumps(event)}\n\n".encode()
        half = len(data) // 2  # events and chunks need not begin together
        for piece in (data[:half], data[half:]):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))


@asynccontextmanager
async def _running(fail: str = "") -> AsyncIterator[FakeServer]:
    """The server, listening on a free port of 127.0.0.1."""
    server = FakeServer(fail)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()


@pytest.fixture
def running() -> Callable[..., AbstractAsyncContextManager[FakeServer]]:
    """``async with running(fail) as server:`` in a test's own event loop."""
    return _running
