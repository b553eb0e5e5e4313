"""Server-sent events: the bytes of chunks, and the response that carries them.

A chunk differs from the one before only in its delta, so everything around the delta is encoded once per
choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from treadle.server.errors import ApiError

log = logging.getLogger("treadle.server")

DONE = b"data: [DONE]\n\n"
COMMENT = b":\n\n"

_encode = msgspec.json.Encoder().encode
T = TypeVar("T")


def event(content: Any) -> bytes:
    """One event whose data is ``content`` as JSON."""
    return b"data: " + _encode(content) + b"\n\n"


def typed_event(content: dict[str, Any]) -> bytes:
    """One event whose name is the ``type`` of ``content``."""
    return b"event: %b\n%b" % (content["type"].encode(), event(content))


def error_event(error: ApiError) -> bytes:
    """The event that ends a failed stream; no ``[DONE]`` follows it."""
    return event(error.body())


class Chunks:
    """Chunks of one answer. ``head`` holds the constant fields; ``usage`` adds ``"usage": null`` to every
    chunk."""

    def __init__(self, head: dict[str, Any], count: int, usage: bool) -> None:
        self._head = head
        opening = b"data: " + _encode(head)[:-1] + b',"choices":[{"index":%d,'
        self._openings = [opening % index for index in range(count)]
        tail = b',"usage":null}\n\n' if usage else b"}\n\n"
        self._running = b',"finish_reason":null}]' + tail
        self._plain = b',"logprobs":null' + self._running
        self._tail = tail

    def delta(self, index: int, field: bytes, text: str, logprobs: Any = None) -> bytes:
        """A chat chunk that adds ``text`` to one field of the message."""
        encoded = _encode(text)
        if field == b"reasoning_content":
            encoded += b',"reasoning":' + encoded
        body = self._openings[index] + b'"delta":{"' + field + b'":' + encoded + b"}"
        return body + (
            self._plain if logprobs is None else b',"logprobs":' + _encode(logprobs) + self._running
        )

    def calls(self, index: int, calls: list[dict[str, Any]], logprobs: Any = None) -> bytes:
        """A chat chunk that adds to the tool calls of the message."""
        body = self._openings[index] + b'"delta":{"tool_calls":' + _encode(calls) + b"}"
        return body + (
            self._plain if logprobs is None else b',"logprobs":' + _encode(logprobs) + self._running
        )

    def role(self, index: int) -> bytes:
        """The first chunk of a chat choice."""
        return self._openings[index] + b'"delta":{"role":"assistant","content":""}' + self._plain

    def text(self, index: int, text: str, logprobs: Any = None) -> bytes:
        """A chunk of the legacy completion call."""
        body = self._openings[index] + b'"text":' + _encode(text)
        return body + (
            self._plain if logprobs is None else b',"logprobs":' + _encode(logprobs) + self._running
        )

    def finish(self, index: int, reason: str, chat: bool) -> bytes:
        """The last chunk of a choice."""
        empty = b'"delta":{}' if chat else b'"text":""'
        end = b',"logprobs":null,"finish_reason":' + _encode(reason) + b"}]"
        return self._openings[index] + empty + end + self._tail

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The extra chunk of ``stream_options.include_usage``."""
        return event({**self._head, "choices": [], "usage": usage})


class EventStream:
    """ASGI response that sends ``events``, ``idle`` while they are silent, and stops them when the client
    leaves. ``failed`` makes the event that tells of an unexpected error."""

    headers = (
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    )

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        keep_alive: float,
        idle: bytes = COMMENT,
        failed: Callable[[ApiError], bytes] = error_event,
    ) -> None:
        self._events = events
        self._keep_alive = keep_alive
        self._idle = idle
        self._failed = failed
        self._sent = 0.0  # loop time of the last bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": 200, "headers": list(self.headers)})
        comments = asyncio.create_task(self._comment(send)) if self._keep_alive else None
        try:
            if await while_connected(receive, self._pump(send)):
                if comments is not None:
                    comments.cancel()
                await send({"type": "http.response.body", "body": b""})
        finally:
            if comments is not None:
                comments.cancel()

    async def _pump(self, send: Send) -> bool:
        now = asyncio.get_running_loop().time
        try:
            async with contextlib.aclosing(self._events) as events:
                async for data in events:
                    self._sent = now()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception:
            log.exception("a stream failed")
            error = ApiError(500, "the server failed in the middle of this answer", code="internal_error")
            await send({"type": "http.response.body", "body": self._failed(error), "more_body": True})
        return True

    async def _comment(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        self._sent = now()
        while True:
            await asyncio.sleep(max(self._sent + self._keep_alive - now(), 0.01))
            if now() - self._sent >= self._keep_alive:
                self._sent = now()
                await send({"type": "http.response.body", "body": self._idle, "more_body": True})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``, or None after cancelling it because the client left. The body must be read
    already."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        watch.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
