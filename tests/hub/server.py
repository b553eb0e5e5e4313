"""A file server on 127.0.0.1 with ranges, and with the faults of real ones."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FileServer:
    """Serves ``files`` (path -> content). The faults are used up one answer each, in order.

    ``cuts``: the connection ends after so many bytes of a body. ``statuses``: answered instead of the file.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.statuses: list[int] = []
        self.redirects: dict[str, str] = {}
        self.states_hash = False
        self.etag = True
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.url = ""

    def range_of(self, number: int) -> str | None:
        """The Range header of a request."""
        return self.requests[number][1].get("Range")


def _handler(server: FileServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            server.requests.append((self.path, dict(self.headers)))
            content = server.files.get(self.path, b"")
            if server.statuses:
                return self.answer(server.statuses.pop(0), b"", {})
            if target := server.redirects.get(self.path):
                return self.answer(302, b"", {"Location": target, **self.hash_of(server.files[target])})
            if self.path not in server.files:
                return self.answer(404, b"", {})
            tag = f'"{hashlib.md5(content).hexdigest()}"'
            headers = {"ETag": tag} if server.etag else {}
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if wanted is None or self.headers.get("If-Range", tag) != tag:
                return self.answer(200, content, headers)
            start, size = int(wanted[1]), len(content)
            if start >= size:
                return self.answer(416, b"", {"Content-Range": f"bytes */{size}"})
            return self.answer(
                206, content[start:], {**headers, "Content-Range": f"bytes {start}-{size - 1}/{size}"}
            )

        def hash_of(self, content: bytes) -> dict[str, str]:
            return {"X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"'} if server.states_hash else {}

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if body and server.cuts:
                self.wfile.write(body[: server.cuts.pop(0)])
                self.close_connection = True
            else:
                self.wfile.write(body)

    return Handler


@contextmanager
def serving() -> Iterator[FileServer]:
    """A running server on a free port."""
    server = FileServer()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(server)) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        http.shutdown()
        thread.join()
