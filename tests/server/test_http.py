"""Requests that are no HTTP/1.1, or break off: each is answered by name, with a request id."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import KEY

POST = (
    f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    "X-Request-Id: mine-1\r\nContent-Type: application/json\r\n"
).encode()
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LENGTH = POST + b"Content-Length: 100\r\n\r\n"


def exchange(server: Any, *pieces: bytes, half_close: bool = False) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of the only answer; the connection must end after it."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        for piece in pieces:
            connection.sendall(piece)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        raw = b""
        while part := connection.recv(65536):
            raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert len(body) == int(headers["content-length"]), raw
    return int(first.split()[1]), headers, json.loads(body)


BROKEN = {
    "bad chunk": (CHUNKED, b'5\r\n{"mod\r\nZZ\r\n'),
    "bad chunk at once": (CHUNKED + b"ZZ\r\n",),
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\r\n\r\n",),
    "unknown method": (b"BREW /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",),
    "no Host": (b"GET /health HTTP/1.1\r\n\r\n",),
    "no Host with a body": (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",),
    "two Hosts": (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",),
}
CUT = {"body": LENGTH + b'{"model":', "chunked body": CHUNKED + b'5\r\n{"mo', "head": b"GET /health HTT"}
SAID = {
    "bad chunk": "chunks", "unknown method": "method", "no Host": "one Host header; got 0",
    "two Hosts": "got 2", "body": "ended early", "chunked body": "ended early", "head": "before its headers",
}  # fmt: skip


@pytest.mark.parametrize("name", [*BROKEN, *CUT])
def test_what_is_no_http_is_answered(server: Any, name: str) -> None:
    pieces = BROKEN[name] if name in BROKEN else (CUT[name],)
    status, headers, body = exchange(server, *pieces, half_close=name in CUT)
    assert (status, body["error"]["code"]) == (400, "invalid_http")
    assert headers["connection"] == "close"
    assert SAID.get(name, "") in body["error"]["message"]
    own = pieces[0].startswith(POST)
    assert headers["x-request-id"] == "mine-1" if own else len(headers["x-request-id"]) == 32
    assert server.get("/health").is_success


def test_large_heads_have_a_request_id(server: Any) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: a\r\nX-Request-Id: mine-2\r\nX-A: " + b"a" * 65000
    status, headers, body = exchange(server, head + b"a" * 1000 + b"\r\n\r\n")
    assert (status, body["error"]["code"], headers["x-request-id"]) == (431, "invalid_http", "mine-2")


def test_http_1_0_needs_no_host(server: Any) -> None:
    status, _, body = exchange(server, b"GET /health HTTP/1.0\r\n\r\n")
    assert (status, body["status"]) == (200, "ready")


def test_the_path_that_is_not_there_is_said_as_it_came(server: Any) -> None:
    head = f"GET //v1/models HTTP/1.1\r\nHost: localhost\r\nx-api-key: {KEY}\r\nConnection: close\r\n\r\n"
    status, _, body = exchange(server, head.encode())
    assert (status, body["error"]["message"]) == (404, "there is no //v1/models here")
