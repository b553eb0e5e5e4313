"""Reading a request body: bounded in size and depth, valid UTF-8, valid JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from treadle.server.errors import ApiError

MAX_DEPTH = 32
_DIGITS = 4300  # of integers that Python reads
SILENCE = 60.0  # seconds that a client may send nothing in the middle of a body
BROKEN = "broken"  # in the state of a request whose body came to no good end: why
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
        value = msgspec.json.decode(raw)
    except msgspec.ValidationError:
        raise _too_large(raw) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from None
    _check_keys(raw, value)
    return value


def _check_keys(raw: bytes, value: Any) -> None:
    """Refuse an object of ``raw`` in which a key comes twice; ``value`` has only one of them. Written anew it
    has fewer colons then: so the bodies that are right, whatever they hold, cost one pass of the encoder."""
    colons = raw.count(b":") + raw.count(b"\\u003a") + raw.count(b"\\u003A")
    with contextlib.suppress(OverflowError):  # of integers of hundreds of digits
        if colons == msgspec.json.encode(value).count(b":"):
            return
    repeated: list[tuple[str, dict[str, Any]]] = []

    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            repeated.append((counts.most_common(1)[0][0], made))
        return made

    whole = json.loads(raw, object_pairs_hook=make)
    if repeated:
        name, where = repeated[-1]  # the outermost
        message = f"the body has the key {name[:50]!r} twice in one object; send it once"
        raise ApiError(400, message, param=name[:50] if where is whole else None, code="invalid_json")


def _too_large(raw: bytes) -> ApiError:
    """What is wrong with ``raw``, in which a number is larger than can be held."""

    def integer(text: str) -> int | _Huge:
        return int(text) if len(text) <= _DIGITS else _Huge(text)

    def real(text: str) -> float | _Huge:
        return value if math.isfinite(value := float(text)) else _Huge(text)

    path, number = _find_huge(json.loads(raw, parse_int=integer, parse_float=real), "") or ("", "a number")
    shown = number if len(number) <= 60 else f"{number[:57]}..."
    message = f"{path or 'the body'}: the number {shown} is too large; send one below 1e308"
    return ApiError(400, message, param=re.split(r"[.\[]", path)[0] or None, code="invalid_value")


class _Huge(str):
    """The digits of a number that is too large."""


def _find_huge(value: Any, path: str) -> tuple[str, str] | None:
    """Where the first one is, and what it is."""
    if isinstance(value, _Huge):
        return path, value
    if isinstance(value, dict):
        inner = [(item, f"{path}.{name[:50]}".lstrip(".")) for name, item in value.items()]
    elif isinstance(value, list):
        inner = [(item, f"{path}[{index}]") for index, item in enumerate(value)]
    else:
        return None
    return next(filter(None, (_find_huge(item, at) for item, at in inner)), None)


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
    if (broken := request.scope["state"].get(BROKEN)) is not None:
        raise ApiError(400, broken, code="invalid_http", headers={"Connection": "close"})
    return b"".join(chunks)
