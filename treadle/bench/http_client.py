"""A streaming HTTP/1.1 client small enough not to disturb what it measures on the same cores.

One request per connection object at a time; connections are kept and used again, as the OpenAI clients do.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import msgspec

from treadle.core import TreadleError

_LINE_LIMIT = 1 << 20  # bytes of one header or event line


class HttpError(Exception):
    """The server answered with something else than 200, or with something that is not HTTP."""


class Connection:
    """One TCP (or TLS) connection to ``base_url``, for example ``http://127.0.0.1:8000``."""

    def __init__(self, base_url: str, key: str | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TreadleError(f"{base_url!r} is no server address; write for example http://127.0.0.1:8000")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n"
        if key:
            self._headers += f"Authorization: Bearer {key}\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def close(self) -> None:
        """Drops the connection; the next request opens a new one."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def get(self, path: str) -> Any:
        """The decoded JSON answer to a GET. Raises as ``events``."""
        return await self._whole("GET", path, b"")

    async def post(self, path: str, body: object) -> Any:
        """The decoded JSON answer to ``body`` as JSON. Raises as ``events``."""
        return await self._whole("POST", path, msgspec.json.encode(body))

    async def events(self, path: str, body: object) -> AsyncGenerator[Any, None]:
        """Posts ``body`` as JSON and yields the decoded ``data:`` of each server-sent event but ``[DONE]``.

        Raises HttpError, OSError or asyncio.IncompleteReadError; the connection is then closed. Close the
        generator (``contextlib.aclosing``) when leaving it early: the server then sees a client that left.
        """
        pending = b""
        async with aclosing(self._exchange("POST", path, msgspec.json.encode(body))) as pieces:
            async for piece in pieces:
                *lines, pending = (pending + piece).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        yield msgspec.json.decode(data)

    async def _whole(self, method: str, path: str, body: bytes) -> Any:
        async with aclosing(self._exchange(method, path, body)) as pieces:
            answer = b"".join([piece async for piece in pieces])
        return msgspec.json.decode(answer)

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """Sends one request and yields the pieces of the answer's body."""
        complete = False
        try:
            head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
            head += f"Content-Length: {len(body)}\r\n\r\n"
            reader, status, headers = await self._send(head.encode() + body)
            pieces = _read_body(reader, headers)
            if status != 200:
                text = b"".join([piece async for piece in pieces]).decode(errors="replace")
                raise HttpError(f"HTTP {status}: {text[:300]}")
            async for piece in pieces:
                yield piece
            complete = headers.get("connection", "").lower() != "close"
        finally:
            if not complete:
                await self.close()

    async def _send(self, request: bytes) -> tuple[asyncio.StreamReader, int, dict[str, str]]:
        """Sends on the open connection; if the server has closed it meanwhile, once more on a new one."""
        if self._streams is not None:
            try:
                return await self._send_once(*self._streams, request)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                if getattr(error, "partial", b""):
                    raise
                await self.close()
        self._streams = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls, limit=_LINE_LIMIT
        )
        return await self._send_once(*self._streams, request)

    async def _send_once(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
    ) -> tuple[asyncio.StreamReader, int, dict[str, str]]:
        writer.write(request)
        await writer.drain()
        return reader, *await _read_head(reader)


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status_line = (await reader.readuntil(b"\r\n")).decode("latin-1").split(" ", 2)
    if len(status_line) < 2 or not status_line[0].startswith("HTTP/1.") or not status_line[1].isdigit():
        raise HttpError(f"not an HTTP answer: {' '.join(status_line)[:80]!r}")
    headers = {}
    while (line := (await reader.readuntil(b"\r\n")).decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return int(status_line[1]), headers


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
            pass
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        headers["connection"] = "close"  # the body ends with the connection
        while piece := await reader.read(65536):
            yield piece
