"""Errors in the shape of the Messages API: ``{"type": "error", "error": {type, message}, "request_id"}``."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(status: int, message: str) -> dict[str, Any]:
    """The JSON object that clients receive, in a response or as an event of a stream."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesErrors:
    """ASGI middleware around everything else: whoever refuses a request to the Messages API, clients get the
    error in its shape, and the request id in the header ``request-id``, too."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or not (path == PATH or path.startswith(PATH + "/")):
            await self.app(scope, receive, send)
            return
        start: Message | None = None  # of an error, until its body is there
        parts: list[bytes] = []

        async def send_translated(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["request-id"] = headers.get("x-request-id", "")
                if message["status"] >= 400:
                    start = message
                    return
            elif start is not None:
                parts.append(message.get("body", b""))
                if message.get("more_body"):
                    return
                body = _translated(start, b"".join(parts))
                MutableHeaders(scope=start)["content-length"] = str(len(body))
                await send(start)
                message = {"type": "http.response.body", "body": body}
            await send(message)

        await self.app(scope, receive, send_translated)


def _translated(start: Message, raw: bytes) -> bytes:
    if not raw:
        return raw  # the client is gone
    body = error_body(start["status"], msgspec.json.decode(raw)["error"]["message"])
    body["request_id"] = MutableHeaders(scope=start)["request-id"]
    return msgspec.json.encode(body)
