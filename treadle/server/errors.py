"""Errors of the HTTP API. Every one has the body of the OpenAI API: ``{"error": {message, type, param,
code}}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

_TYPES: dict[int | str, str] = {  # by code, else by status
    "insufficient_quota": "insufficient_quota",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A failure with an HTTP status. ``param`` is the top-level field of the body that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The error in the words of an API that has other names for the fields of a chat completion. A plain
        word is replaced only where a message begins with it: further on it is one of a sentence."""
        message = self.message
        for old, new in names.items():
            message = re.sub(rf"\b{old}\b" if "_" in old else rf"^{old}\b", new, message)
        param = names.get(self.param, self.param) if self.param is not None else None
        param = param.partition(".")[0] if param is not None else None
        return ApiError(self.status, message, param=param, code=self.code, headers=self.headers)

    def body(self) -> dict[str, Any]:
        """The JSON object that clients receive, in a response or as an event of a stream."""
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.code or "") or _TYPES.get(self.status, fallback),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The error as a response of its own."""
        return json_response(self.body(), self.status, self.headers)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``content`` encoded by msgspec, which is several times faster than the standard library."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
