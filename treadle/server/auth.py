"""Who may call. Every route needs a key except those in ``OPEN_PATHS``; new routes are closed by default."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from treadle.core import TreadleError
from treadle.keys.records import Key
from treadle.server.errors import ApiError

OPEN_PATHS = frozenset({"/health"})


def is_loopback(host: str) -> bool:
    """Whether a host name or address (no port) can only be this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, keys: tuple[str, ...]) -> None:
    """Refuse to serve other machines without a key."""
    if not keys and not is_loopback(host):
        raise TreadleError(
            f"--host {host} is reachable from other machines, so an API key is required: "
            "give one with --api-key or TREADLE_API_KEY, or listen on 127.0.0.1"
        )


class Keys:
    """The configured keys, kept as SHA-256 digests. ``find`` takes the same time for every wrong key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = {self._digest(key): f"key-{number}" for number, key in enumerate(keys, 1)}

    def __bool__(self) -> bool:
        return bool(self._digests)

    @staticmethod
    def _digest(key: str) -> bytes:
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

    def find(self, key: str) -> str | None:
        """The id of a key, or None if it is unknown."""
        wanted = self._digest(key)
        found = None
        for digest, name in self._digests.items():
            if hmac.compare_digest(digest, wanted):
                found = name
        return found


class Auth:
    """ASGI middleware: lets a request through with a valid key and stores the key in ``state["key"]``.

    Without any key the server is open, but only to programs on this machine: a request made by a web page of
    another origin, or under a foreign host name (DNS rebinding), is refused.
    """

    def __init__(self, app: ASGIApp, keys: Keys, origins: tuple[str, ...]) -> None:
        self.app = app
        self.keys = keys
        self.origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                name = self._identify(Headers(scope=scope))
                scope.setdefault("state", {})["key"] = Key(id=name, name=name)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _identify(self, headers: Headers) -> str:
        if not self.keys:
            self._check_local(headers)
            return "local"
        presented = self._presented(headers)
        if not presented:
            raise ApiError(
                401,
                "an API key is required: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="missing_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        found = [self.keys.find(key) for key in presented]
        if None in found or len(set(found)) != 1 or found[0] is None:
            headers_out = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
            raise ApiError(401, "the API key is not valid", code="invalid_api_key", headers=headers_out)
        return found[0]

    @staticmethod
    def _presented(headers: Headers) -> list[str]:
        """Every key of the request, whichever header carries it; a second one cannot smuggle the first
        past."""
        keys = [value.strip() for value in headers.getlist("x-api-key")]
        for value in headers.getlist("authorization"):
            scheme, _, key = value.partition(" ")
            keys.append(key.strip() if scheme.lower() == "bearer" else "")
        return keys

    def _check_local(self, headers: Headers) -> None:
        host = _hostname("//" + headers.get("host", "localhost"))
        origin = headers.get("origin")
        local_origin = origin is None or is_loopback(_hostname(origin))
        allowed_origin = local_origin or "*" in self.origins or origin in self.origins
        if not is_loopback(host) or not allowed_origin:
            raise ApiError(
                403,
                "this server has no API key and therefore answers only programs on its own machine; "
                "start it with --api-key to open it, or --cors-origin for a web page",
                code="not_local",
            )


def _hostname(url: str) -> str:
    """The host of a URL; empty if there is none, or if it is no URL."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
