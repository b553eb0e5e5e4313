"""Keys, cross-origin rules and the states of starting. Cases J01, J04 and I01."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.server.conftest import KEY, Api, Start
from tests.server.scripted import ByteText, ScriptedEngine
from treadle.config import Config
from treadle.core import TreadleError
from treadle.server.app import create_app
from treadle.server.auth import is_loopback
from treadle.server.service import Served


async def none() -> list[Served]:
    return []


async def never() -> Served:
    raise TreadleError("no such file: x.gguf")


ROUTES = sorted(route.path for route in create_app(Config(), none, "0").routes)  # type: ignore[attr-defined]
WRONG_KEYS: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": KEY},
    {"Authorization": f"Basic {KEY}"},
    {"Authorization": "Bearer"},
    {"x-api-key": "wrong"},
    {"x-api-key": ""},
    {"api-key": KEY},
    {"Cookie": f"key={KEY}"},
    {"Authorization": f"Bearer {KEY}", "x-api-key": "wrong"},
    {"Authorization": "Bearer wrong", "x-api-key": KEY},
]


@pytest.mark.parametrize("headers", WRONG_KEYS)
def test_every_route_needs_the_key(scripted: Start, headers: dict[str, str]) -> None:
    paths = [path.replace("{name:path}", "toy") for path in ROUTES if path != "/health"]
    paths += ["/v1/models/", "//v1/models", "/V1/models", "/nothing", "/openapi.json", "/health/", "//health"]
    with Api(scripted().url, "toy", key=None) as api:
        for path in paths:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"):
                response = api.request(method, api.url + path, headers=headers)
                assert response.status_code == 401, (method, path)
                assert method == "HEAD" or response.json()["error"]["message"]
        assert api.get("/health", headers=headers).json() == {"status": "ready"}


@pytest.mark.parametrize(
    "headers",
    [{"Authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"X-API-Key": "second"}],
)
def test_every_form_of_a_good_key(scripted: Start, headers: dict[str, str]) -> None:
    api = scripted(api_key=(KEY, "second"))
    assert httpx.get(api.url + "/v1/models", headers=headers).is_success


def test_without_key_only_this_machine(scripted: Start) -> None:
    api = scripted(api_key=())
    assert api.get("/v1/models").is_success
    assert api.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    assert api.get("/v1/models", headers={"origin": "http://evil.example"}).status_code == 403
    assert api.get("/v1/models", headers={"origin": "null"}).status_code == 403
    for headers in ({"host": "["}, {"host": "[::1"}, {"origin": "http://["}, {"origin": "http://[x]"}):
        answer = api.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_local"), headers
    assert api.get("/v1/models", headers={"x-forwarded-for": "127.0.0.1"}).is_success
    assert api.get("/v1/models", headers={"x-forwarded-for": "127.0.0.1, 10.0.0.7"}).status_code == 403
    proxies = {
        "x-real-ip": ("127.0.0.1", "10.0.0.7"),
        "forwarded": ('for="[::1]:5000";proto=http, for=127.0.0.1', "for=127.0.0.1, For=10.0.0.7"),
    }
    for name, (own, foreign) in proxies.items():
        assert api.get("/v1/models", headers={name: own}).is_success
        assert api.get("/v1/models", headers={name: foreign}).status_code == 403
    assert api.get("/v1/models", headers={"forwarded": "for=unknown"}).status_code == 403
    for host in ("0.0.0.0", "192.168.1.5", "::", "example.org"):
        assert not is_loopback(host)
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        assert is_loopback(host)


def cors(response: httpx.Response) -> str | None:
    value: str | None = response.headers.get("access-control-allow-origin")
    return value


def test_cors_is_off_by_default(scripted: Start) -> None:
    api = scripted()
    origin = {"origin": "https://app.example", "access-control-request-headers": "authorization"}
    assert cors(api.get("/v1/models", headers=origin)) is None
    preflight = httpx.options(api.url + "/v1/models", headers=origin)
    assert preflight.status_code == 401
    assert cors(preflight) is None


def test_listed_origin_on_preflight_answers_streams_and_errors(scripted: Start) -> None:
    api = scripted(cors_origin=("https://app.example",))
    origin = {"origin": "https://app.example"}
    preflight = httpx.options(
        api.url + "/v1/models", headers={**origin, "access-control-request-headers": "authorization"}
    )
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    answers = [
        preflight,
        api.get("/v1/models", headers=origin),
        api.post("/v1/chat/completions", json=body, headers=origin),
        api.post("/v1/chat/completions", json={}, headers=origin),
        httpx.get(api.url + "/v1/models", headers=origin),
    ]
    for answer in answers:
        assert cors(answer) == "https://app.example"
        assert "access-control-allow-credentials" not in answer.headers
        assert "Origin" in answer.headers["vary"]
    assert cors(api.get("/v1/models", headers={"origin": "https://other.example"})) is None
    assert (
        httpx.options(api.url + "/v1/models", headers={"origin": "https://other.example"}).status_code == 401
    )


def busy(api: Api) -> httpx.Response:
    response = api.post("/v1/chat/completions", json={"model": "toy"})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    return response


def test_states_of_starting(scripted: Start) -> None:
    go = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def slow() -> Served:
        loops.append(asyncio.get_running_loop())
        await go.wait()
        return Served(name="toy", text=ByteText(), engine=ScriptedEngine(), context=256)

    api = scripted(load=slow)
    assert api.get("/health").json() == {"status": "loading"}
    assert api.get("/health").status_code == 503
    assert api.get("/version").json() == {"version": "1.2.3"}
    assert busy(api).json()["error"]["code"] == "model_loading"
    assert api.get("/v1/models").status_code == 503
    loops[0].call_soon_threadsafe(go.set)
    for _ in range(100):
        if api.get("/health").is_success:
            break
    model = {"id": "toy", "state": "ready", "error": None}
    assert api.get("/ready").json() == {"status": "ready", "error": None, "models": [model]}


def test_failed_start_and_dead_engine(scripted: Start) -> None:
    api = scripted(load=never)
    assert api.get("/health").json() == {"status": "failed"}
    assert api.get("/ready").json() == {"status": "failed", "error": "no such file: x.gguf", "models": []}
    assert busy(api).json()["error"]["code"] == "model_failed"
    engine = ScriptedEngine()
    living = scripted(engine)
    assert living.get("/health").is_success
    engine.state = "restarting"
    assert living.get("/health").json() == {"status": "loading"}
    assert busy(living).json()["error"]["code"] == "model_loading"
    engine.state, engine.error = "failed", "the engine died 5 times in a row"
    ready: dict[str, Any] = living.get("/ready").json()
    assert (ready["status"], ready["error"]) == ("failed", "the engine died 5 times in a row")
    assert busy(living).json()["error"]["code"] == "model_failed"


def test_models(scripted: Start) -> None:
    api = scripted()
    card = api.get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("toy", "model", 256)
    assert api.get("/v1/models/t:1").json()["id"] == "toy"
