"""Every route is refused to who may not use it, by a real server over real sockets. Case J01."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.keys.server import Server, eventually, serving, treadle_key
from treadle.server.auth import ANY, OPEN, scope_of
from treadle.server.routes import routes

PATHS = sorted({route.path.replace("{name:path}", "toy").replace("{id}", "resp_1") for route in routes()})
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
KEYS = {
    "inference": ("inference",),
    "metrics": ("metrics",),
    "admin": ("admin",),
    "revoked": ("inference", "metrics", "admin"),
    "expired": ("inference", "metrics", "admin"),
}


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, str]]]:
    """A server, and the keys by name."""
    folder = tmp_path_factory.mktemp("refused") / "data"
    with serving(folder) as server:
        keys = {}
        for name, scopes in KEYS.items():
            options = [option for scope in scopes for option in ("--scope", scope)]
            expires = ["--expires", "1s"] if name == "expired" else []
            keys[name] = treadle_key(folder, "create", name, *options, *expires)
        eventually(lambda: server.get("/version", keys["revoked"]).is_success)
        treadle_key(folder, "revoke", "revoked")
        eventually(lambda: server.get("/version", keys["revoked"]).status_code == 401)
        eventually(lambda: server.get("/version", keys["expired"]).status_code == 401)
        yield server, keys


def headers_of(case: str, keys: dict[str, str]) -> dict[str, str]:
    good = keys["inference"]
    return {
        "no key": {},
        "wrong key": {"Authorization": "Bearer sk-treadle-" + "0" * 64},
        "half a key": {"Authorization": f"Bearer {good[:-1]}"},
        "empty key": {"Authorization": "Bearer", "x-api-key": ""},
        "more than a key": {"Authorization": f"Bearer {good} {good}"},
        "wrong scheme": {"Authorization": f"Basic {good}"},
        "no scheme": {"Authorization": good},
        "wrong header": {"api-key": good},
        "cookie": {"Cookie": f"key={good}"},
        "a second, wrong one": {"Authorization": f"Bearer {good}", "x-api-key": "sk"},
        "two keys": {"Authorization": f"Bearer {good}", "x-api-key": keys["metrics"]},
        "revoked": {"Authorization": f"Bearer {keys['revoked']}"},
        "revoked, other header": {"x-api-key": keys["revoked"]},
        "expired": {"Authorization": f"Bearer {keys['expired']}"},
        "in the query": {},
    }[case]


CASES = ["no key", "wrong key", "half a key", "empty key", "more than a key", "wrong scheme", "no scheme"]
CASES += ["wrong header", "cookie", "a second, wrong one", "two keys", "revoked", "revoked, other header"]
CASES += ["expired", "in the query"]
TRICKS = [
    "/v1/models/",
    "//v1/models",
    "/V1/models",
    "/nothing",
    "/docs",
    "/health/",
    "//health",
    "/%2e/health",
]


@pytest.mark.parametrize("case", CASES)
def test_every_route_is_refused(refusing: tuple[Server, dict[str, str]], case: str) -> None:
    server, keys = refusing
    query = {"key": keys["inference"], "api_key": keys["inference"]} if case == "in the query" else None
    with httpx.Client(headers=headers_of(case, keys), params=query) as client:
        for path in [path for path in PATHS if scope_of(path) != OPEN] + TRICKS:
            for method in METHODS:
                answer = client.request(method, server.url + path)
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"].startswith("Bearer")
                if method != "HEAD":
                    error = answer.json()["error"]
                    assert error["message"] and error["type"] == "authentication_error", (method, path)


@pytest.mark.parametrize("scope", ["inference", "metrics", "admin"])
@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
def test_scopes(refusing: tuple[Server, dict[str, str]], scope: str, header: str) -> None:
    server, keys = refusing
    value = f"Bearer {keys[scope]}" if header == "Authorization" else keys[scope]
    with httpx.Client(headers={header: value}) as client:
        for path in PATHS:
            for method in METHODS:
                answer = client.request(method, server.url + path)
                if scope_of(path) in (OPEN, ANY, scope):
                    assert answer.status_code not in (401, 403, 500), (method, path)
                else:
                    assert answer.status_code == 403, (method, path)
                    assert "insufficient_scope" in answer.headers["www-authenticate"]
                    if method != "HEAD":
                        error = answer.json()["error"]
                        assert error["type"] == "permission_error" and scope_of(path) in error["message"]
        assert client.get(server.url + "/nothing").status_code == 404


def test_what_is_not_listed_needs_admin() -> None:
    assert {scope_of(path) for path in PATHS} == {OPEN, ANY, "inference", "metrics"}
    for path in ("/admin/keys", "/metrics/", "/", "", "/v2/models", "/v1", "/unload"):
        assert scope_of(path) == "admin"
    assert scope_of("/v1/whatever/is/added") == "inference"
