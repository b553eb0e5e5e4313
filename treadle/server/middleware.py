"""What surrounds every route: request ids, cross-origin rules, and an answer for every exception.

Plain ASGI, because Starlette's BaseHTTPMiddleware would put a queue between each streamed token and the
socket.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle.server.errors import ApiError
from treadle.server.log import log_request
from treadle.server.metrics import Metrics

log = logging.getLogger("treadle.server")

_EXPOSED = "X-Request-Id, Retry-After, " + ", ".join(
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")


def id_of_request(given: str) -> str:
    """The request id that a client has ``given``, or a new one if that is none."""
    valid = 0 < len(given) <= 128 and _ID_CHARACTERS.issuperset(given)
    return given if valid else secrets.token_hex(16)


class RootPath:
    """Takes a prefix off the path if it is there: some proxies leave it, some remove it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app = app
        self.prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(self.prefix + "/"):
            scope = {**scope, "path": scope["path"].removeprefix(self.prefix)}
        await self.app(scope, receive, send)


class RequestIds:
    """Gives each request an id (``state["request_id"]``, header ``X-Request-Id``), or keeps the one it came
    with.

    Also the last place that sees an exception: it is logged with the id, and answered with a 500 that says no
    more.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = id_of_request(Headers(scope=scope).get("x-request-id", ""))
        scope.setdefault("state", {})["request_id"] = request_id
        fields = {"fields": {"request_id": request_id}}
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # by uvicorn, which closes the connection, too
            log.warning("a request was cut off because the server stops", extra=fields)
        except Exception:
            log.exception("%s %s failed", scope["method"], quote(scope["path"]), extra=fields)
            if started:
                raise
            message = f"the server failed on this request; its log has the details under {request_id}"
            await ApiError(500, message, code="internal_error").response()(scope, receive, send_with_id)


class Cors:
    """Cross-origin rules. Without configured origins no header is ever added, so browsers allow same-origin
    only.

    A listed origin is reflected on preflights, answers, streams and errors alike. Credentials (cookies) are
    never allowed: the API knows keys only.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        self.app = app
        self.origins = frozenset(origin.rstrip("/") for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None or not ("*" in self.origins or origin in self.origins):
            await self.app(scope, receive, send)
            return
        reflected = "*" if "*" in self.origins else origin

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                out["Access-Control-Allow-Origin"] = reflected
                out["Access-Control-Expose-Headers"] = _EXPOSED
                out.add_vary_header("Origin")
            await send(message)

        if scope["method"] == "OPTIONS":
            preflight = {
                "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
                "Access-Control-Allow-Headers": headers.get(
                    "access-control-request-headers", "authorization"
                ),
                "Access-Control-Max-Age": "600",
            }
            await Response(status_code=204, headers=preflight)(scope, receive, send_with_origin)
        else:
            await self.app(scope, receive, send_with_origin)


class RouteMetrics:
    """Counts finished requests by route and status, and logs each. Unknown paths share one label."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, began = 500, time.perf_counter()

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, str(status)).inc()
            log_request(scope, status, began)
