"""Reading a request body: bounded in size and depth, valid UTF-8, valid JSON."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from treadle.server.errors import ApiError

MAX_DEPTH = 32
SILENCE = 60.0  # seconds that a client may send nothing in the middle of a body
LARGE = 8192  # bytes; what a larger body needs is done on a thread, so that running streams do not wait

T = TypeVar("T")

_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)
_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


async def aside(size: int, work: Callable[[], T]) -> T:
    """The result of ``work`` on a body of ``size`` bytes, from a thread if that is large."""
    return work() if size < LARGE else await asyncio.to_thread(work)


def parse_json(raw: bytes) -> Any:
    """Strict JSON: no NaN, no lone surrogates, no NUL characters, at most ``MAX_DEPTH`` levels."""
    if not raw.strip():
        raise ApiError(400, "the body is empty; send a JSON object", code="invalid_json")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _depth(raw) > MAX_DEPTH:
        raise ApiError(400, f"the JSON body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")
    if b"\\u0000" in raw and _ESCAPED_NUL.search(raw):
        raise ApiError(
            400, "the body holds the character U+0000, which no text needs; remove it", code="invalid_json"
        )
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from None


def _depth(raw: bytes) -> int:
    depth = deepest = 0
    for match in _BRACKETS.finditer(raw):
        match match[0]:
            case b"[" | b"{":
                depth += 1
                deepest = max(deepest, depth)
            case b"]" | b"}":
                depth -= 1
    return deepest


async def read(request: Request, limit: int) -> bytes:
    """The raw body. Raises ApiError 413 beyond ``limit`` bytes, 408 for a client that no longer sends: its
    request would count among those of its key for ever."""
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"Content-Encoding: {encoding[:50]} is not supported; send the body as it is"
        raise ApiError(400, message, code="invalid_http")
    chunks: list[bytes] = []
    size = 0
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(SILENCE) as patience:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
                patience.reschedule(clock() + SILENCE)
    except ClientDisconnect:
        raise ApiError(400, "the body ended early", code="invalid_json") from None
    except TimeoutError:
        message = f"nothing more of the body came for {SILENCE:g} s"
        raise ApiError(408, message, code="invalid_http", headers={"Connection": "close"}) from None
    return b"".join(chunks)
