"""HTTP/1.1 as it comes over the wire: kept connections, endless heads, what is no HTTP; and TLS files."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.keys.server import CHAT, Server, serving
from tests.server.conftest import Start, scripted
from treadle.core import TreadleError
from treadle.server.connection import MAX_HEAD
from treadle.server.tls import Tls

__all__ = ["scripted"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("wire") / "data", api_key=["k"]) as server:
        yield server


def connected(server: Server) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def answer(wire: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next answer, as far as its Content-Length says."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = wire.recv(65536)
        assert part, data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += wire.recv(65536)
    return int(first.split()[1]), headers, body


def test_a_connection_is_kept_also_after_errors(server: Server) -> None:
    with connected(server) as wire:
        for key, status in (("k", 200), ("wrong", 401), ("k", 200)):
            wire.sendall(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\n\r\n".encode())
            assert answer(wire)[0] == status
        body = b'{"model": 5}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: %s\r\nContent-Length: %d\r\n\r\n"
        for key, status in (("k", 400), ("wrong", 401), ("k", 400)):  # a body that nobody reads is skipped
            wire.sendall(head % (key.encode(), len(body)) + body)
            assert answer(wire)[0] == status


@pytest.mark.parametrize("fill", [b"X-Fill: %s\r\n" % (b"y" * 200), b"y" * 200])
def test_a_head_without_end_is_refused(server: Server, fill: bytes) -> None:
    with connected(server) as wire:
        wire.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + (b"" if b"X-Fill" in fill else b"Z: "))
        try:
            for _ in range(5 * MAX_HEAD // len(fill)):
                wire.sendall(fill)
            status, _, body = answer(wire)
        except (ConnectionResetError, BrokenPipeError):
            return  # refused while we were still sending
        assert status == 431 and json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS, where there is none
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(server: Server, raw: bytes) -> None:
    with connected(server) as wire:
        wire.sendall(raw)
        status, headers, body = answer(wire)
        assert status in (400, 401), body
        assert json.loads(body)["error"]["message"] and headers["content-type"] == "application/json"
    assert server.get("/health", None).is_success


OFFERS = {
    "of java.net.http.HttpClient": b"Connection: Upgrade, HTTP2-Settings\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n",
    "of a web socket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
}


@pytest.mark.parametrize("name", OFFERS)
@pytest.mark.parametrize("way", ["whole", "in pieces", "chunked"])
def test_an_offer_of_another_protocol_is_ignored(server: Server, name: str, way: str) -> None:
    body = json.dumps(CHAT).encode()
    length = b"Transfer-Encoding: chunked" if way == "chunked" else b"Content-Length: %d" % len(body)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: k\r\n%s%s\r\n\r\n" % (
        OFFERS[name],
        length,
    )
    if way == "chunked":
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    with connected(server) as wire:
        for _ in range(2):
            if way == "in pieces":
                for start in range(0, len(head) + len(body), 50):
                    wire.sendall((head + body)[start : start + 50])
            else:
                wire.sendall(head + body)
            status, _, answered = answer(wire)
            assert status == 200, answered
            assert json.loads(answered)["choices"][0]["message"]["content"] == "x" * 20
        wire.sendall(head + body + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        both = b""
        while not both.endswith(b'{"status":"ready"}'):
            part = wire.recv(65536)
            assert part, both
            both += part
        assert both.count(b"HTTP/1.1 200 OK") == 2
    assert "WebSocket" not in server.log


def test_a_body_that_does_not_come_is_given_up(scripted: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.server.body.SILENCE", 0.3)
    api = scripted()
    host, _, port = api.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as wire:
        key = api.headers["authorization"].encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: %s\r\nContent-Length: 99\r\n\r\n{"
        wire.sendall(head % key)
        status, _, body = answer(wire)
        assert (status, json.loads(body)["error"]["code"]) == (408, "invalid_http")
        assert wire.recv(1) == b""  # closed


def test_compressed_bodies_are_refused_by_name(server: Server) -> None:
    with connected(server) as wire:
        wire.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-api-key: k\r\nContent-Encoding: gzip\r\n"
            b"Content-Length: 3\r\n\r\n\x1f\x8b\x08"
        )
        status, _, body = answer(wire)
        assert status == 400 and "Content-Encoding: gzip" in json.loads(body)["error"]["message"]


def test_request_ids(server: Server) -> None:
    good = server.get("/health", None, **{"X-Request-Id": "abc-1.2_3:4"})
    assert good.headers["x-request-id"] == "abc-1.2_3:4"
    for wrong in ("", "a b", "x" * 129, '"><script>'):
        given = server.get("/health", None, **{"X-Request-Id": wrong})
        assert len(given.headers["x-request-id"]) == 32


def test_files_of_tls(tmp_path: Path) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=tmp_path)

    curve = ("-pkeyopt", "ec_paramgen_curve:prime256v1")
    make = ("req", "-x509", "-newkey", "ec", *curve, "-subj", "/CN=x", "-days", "2")
    openssl(*make, "-nodes", "-keyout", "a.key", "-out", "a.pem")
    openssl(*make, "-nodes", "-keyout", "b.key", "-out", "b.pem")
    openssl(*make, "-passout", "pass:secret", "-keyout", "c.key", "-out", "c.pem")
    (tmp_path / "both.pem").write_text((tmp_path / "a.pem").read_text() + (tmp_path / "a.key").read_text())
    (tmp_path / "text").write_text("no PEM")
    Tls(str(tmp_path / "a.pem"), str(tmp_path / "a.key"))
    Tls(str(tmp_path / "both.pem"), None)
    wrong = [
        ("a.pem", "b.key", "does not belong"),
        ("c.pem", "c.key", "has a password"),
        ("text", "a.key", "no certificate"),
        ("a.pem", None, "no certificate and private key"),
        ("missing.pem", None, "--tls-cert: cannot read"),
        ("a.pem", "missing.key", "--tls-key: cannot read"),
    ]
    for cert, key, message in wrong:
        with pytest.raises(TreadleError, match=message):
            Tls(str(tmp_path / cert), str(tmp_path / key) if key else None)
