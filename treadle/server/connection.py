"""An HTTP/1.1 connection that bounds what a client may send before anybody has looked at its key."""

from __future__ import annotations

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from treadle.server.body import BROKEN
from treadle.server.errors import ApiError
from treadle.server.middleware import id_of_request

MAX_HEAD = 65536  # bytes of request line and headers
HEAD_SECONDS = 30.0  # for them to arrive
IDLE_SECONDS = 75  # between two requests; proxies keep connections for 60 and must not be the last to know


class Connection(HttpToolsProtocol):
    """Uvicorn's protocol with limits on the head of a request, and errors with the body of the API."""

    _timer: asyncio.TimerHandle | None = None
    _broken = False  # nothing more can be read
    _head: int | None = 0  # bytes received of a head that is not complete; None: it is

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start waiting for the first head."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and refuse a head that is too large."""
        if self._broken:
            return
        self._unset_keepalive_if_required()
        if self._head is not None:
            self._head += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserInvalidMethodError:
            self._refuse(
                400, "the request does not begin with a method of HTTP; GET, POST and DELETE are used here"
            )
        except (UnicodeError, httptools.HttpParserError):
            if not self._break_body("the body is not valid HTTP/1.1: its chunks are malformed"):
                self._refuse(400, "the request is not valid HTTP/1.1")
        if self._head is not None and self._head > MAX_HEAD:
            self._refuse_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. What is incomplete is answered; who still waits for an answer to a
        complete request must keep the connection open."""
        if self._broken:
            return True
        if self.scheme == "https":
            return False  # TLS has no half-closed connections
        if self._head is not None and self.headers is not None:
            self._refuse(400, "the request ended before its headers did")
        return self._break_body("the body ended early: the client closed its side of the connection")

    def _break_body(self, why: str) -> bool:
        """Give the body that is being received an end, at which its reader learns ``why``, and take nothing
        more. Returns whether there is such a body and its answer has not begun."""
        cycle = self.cycle
        if cycle is None or not cycle.more_body or cycle.response_started or self.pipeline:
            return False
        if self._head is not None:
            return False
        self._broken = True
        cycle.scope["state"][BROKEN] = why
        cycle.keep_alive = cycle.more_body = False
        cycle.message_event.set()
        return True

    def _feed(self, data: bytes) -> None:
        """Parse ``data``. An offer to go on with another protocol (``Upgrade: h2c``, which Java's client
        makes with every first request) is ignored, as RFC 9110, 7.8 allows. The parser takes one with an
        offer to be without a body, so it is given the head once more, without the offer."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                method = self.parser.get_method()
                if method == b"CONNECT":  # this is no proxy
                    raise httptools.HttpParserError from None
                version = self.parser.get_http_version().encode()
                lines = [method + b" " + self.url + b" HTTP/" + version]
                lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
                data = b"\r\n".join([*lines, b"", data[offer.args[0] :]])
                self.parser = httptools.HttpRequestParser(self)
            else:
                return

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._head = 0
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def on_headers_complete(self) -> None:
        """The head is complete; what follows is bounded by whoever reads it."""
        if self.parser.should_upgrade():
            return  # it comes again
        self._stop_waiting()
        self._head = None
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD:
            self._refuse_head()  # it came in one piece
        elif self._hosts() != 1 and self.parser.get_http_version() == "1.1":
            self._refuse(400, f"HTTP/1.1 wants one Host header; got {self._hosts()}")
        else:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is complete."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _hosts(self) -> int:
        return sum(name == b"host" for name, _ in self.headers)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        self._refuse(408, f"the request line and headers did not arrive within {HEAD_SECONDS:g} s")

    def _refuse_head(self) -> None:
        self._refuse(431, f"the request line and headers are larger than {MAX_HEAD} bytes")

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else an answer is being written
            body = bytes(ApiError(status, message, code="invalid_http").response().body)
            given = dict(self.headers or ()).get(b"x-request-id", b"").decode("latin-1")
            head = "content-type: application/json\r\nconnection: close\r\n"
            head += f"x-request-id: {id_of_request(given)}\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()
