"""Who may call what. Every route needs a key of the right scope; what is not listed needs ``admin``.

- ``/health`` needs no key.
- ``/v1/*`` needs the scope ``inference``, whatever is added there.
- The routes of ``SCOPES`` need what stands there; every other route, also a new one, needs ``admin``.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from treadle.keys.records import LOCAL, Key
from treadle.keys.ring import Keyring, Refused
from treadle.server.errors import ApiError

OPEN = "open"  # no key
ANY = "any"  # any key
SCOPES = {
    "/health": OPEN,
    "/ready": ANY,
    "/version": ANY,
    "/openapi.json": ANY,
    "/metrics": "metrics",
    "/tokenize": "inference",
    "/detokenize": "inference",
}


_FOR = re.compile(r'\bfor="?([^";,\s]*)', re.IGNORECASE)


def scope_of(path: str) -> str:
    """What a request to ``path`` needs: ``OPEN``, ``ANY`` or a scope."""
    return SCOPES.get(path) or ("inference" if path.startswith("/v1/") else "admin")


def is_loopback(host: str) -> bool:
    """Whether a host name or address (no port) can only be this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Auth:
    """ASGI middleware: lets a request through with a key of the right scope and stores it in
    ``state["key"]``.

    Without any key the server is open, but only to programs on this machine: a request made by a web page of
    another origin, under a foreign host name (DNS rebinding) or through a proxy for others is refused.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, origins: tuple[str, ...]) -> None:
        self.app = app
        self.keyring = keyring
        self.origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (needed := scope_of(scope["path"])) != OPEN:
            try:
                key = self._identify(Headers(scope=scope))
                scope["state"]["key"] = key
                if needed not in (ANY, *key.scopes) and _exists(scope):
                    raise _out_of_scope(key, needed)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _identify(self, headers: Headers) -> Key:
        if self.keyring.open:
            self._check_local(headers)
            return LOCAL
        presented = _presented(headers)
        if not presented:
            raise ApiError(
                401,
                "an API key is required: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="missing_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        try:
            keys = {key.id: key for key in map(self.keyring.find, presented)}
            if len(keys) > 1:
                raise Refused("the request carries several API keys; send one")
        except Refused as error:
            headers_out = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
            raise ApiError(401, str(error), code="invalid_api_key", headers=headers_out) from None
        return next(iter(keys.values()))

    def _check_local(self, headers: Headers) -> None:
        host = _hostname("//" + headers.get("host", "localhost"))
        origin = headers.get("origin")
        local_origin = origin is None or is_loopback(_hostname(origin))
        allowed_origin = local_origin or "*" in self.origins or origin in self.origins
        if not is_loopback(host) or not allowed_origin or not all(map(is_loopback, _forwarded_for(headers))):
            raise ApiError(
                403,
                "this server has no API key and therefore answers only programs on its own machine; "
                "make a key with `treadle key create` to open it, or use --cors-origin for a web page",
                code="not_local",
            )


def _forwarded_for(headers: Headers) -> list[str]:
    """For whom proxies have forwarded the request, as far as they say so."""
    lists = [*headers.getlist("x-forwarded-for"), *headers.getlist("x-real-ip")]
    found = [part.strip() for value in lists for part in value.split(",")]
    for value in headers.getlist("forwarded"):  # RFC 7239
        nodes = _FOR.findall(value)
        found += [_hostname("//" + node) for node in nodes] or [""]
    return found


def _presented(headers: Headers) -> list[str]:
    """Every key of the request, whichever header carries it; a second one cannot smuggle the first past."""
    keys = [value.strip() for value in headers.getlist("x-api-key")]
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        keys.append(key.strip() if scheme.lower() == "bearer" else "")
    return keys


def _exists(scope: Scope) -> bool:
    """Whether there is a route. Who has a key is told that there is none."""
    return any(route.matches(scope)[0] is not Match.NONE for route in scope["app"].routes)


def _out_of_scope(key: Key, needed: str) -> ApiError:
    has = ", ".join(sorted(key.scopes)) or "none"
    return ApiError(
        403,
        f"this route needs a key with the scope {needed}; the key {key.name} has: {has}",
        code="insufficient_scope",
        headers={"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{needed}"'},
    )


def _hostname(url: str) -> str:
    """The host of a URL; empty if there is none, or if it is no URL."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
