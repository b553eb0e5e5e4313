"""What keys may do on a running server: limits, quotas, models, revocation, usage, the first key, the log.
Cases J05, J06 and J09."""

from __future__ import annotations

import json
import signal
import ssl
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.keys.server import CHAT, Server, eventually, serving, treadle_key
from treadle.server.routes import OPERATIONS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("running") / "data"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, log_format="json") as server:
        yield server


def make(server: Server, folder: Path, name: str, *options: str) -> str:
    secret = treadle_key(folder, "create", name, *options)
    eventually(lambda: server.get("/version", None).status_code == 401)  # open until it knows of a first key
    eventually(lambda: server.get("/version", secret).is_success)
    return secret


def usage(folder: Path, key: str) -> list[int]:
    """Requests, errors, prompt and completion tokens of a key, all models together."""
    rows = [row for row in json.loads(treadle_key(folder, "usage", "--format", "json")) if row["key"] == key]
    columns = ("requests", "errors", "prompt_tokens", "completion_tokens")
    return [sum(row[column] for row in rows) for column in columns]


def test_open_until_the_first_key_is_made(server: Server, folder: Path) -> None:
    assert server.ask(None).is_success
    secret = make(server, folder, "opener")
    eventually(lambda: server.ask(None).status_code == 401)
    assert server.ask(secret).is_success


def test_requests_per_minute(server: Server, folder: Path) -> None:
    key = make(server, folder, "few", "--requests-per-minute", "2")
    answers = [server.ask(key) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"2"}
    assert answers[0].headers["x-ratelimit-reset-requests"] == "30s"
    error = answers[2].json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert "few" in error["message"] and "2 requests per minute" in error["message"]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}])
    assert server.get("/v1/models", key).is_success  # asks no model


def test_tokens_per_minute(server: Server, folder: Path) -> None:
    key = make(server, folder, "brief", "--tokens-per-minute", "30")
    first, second, third = (server.ask(key) for _ in range(3))  # 2 + 20 tokens each
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert first.headers["x-ratelimit-limit-tokens"] == "30"
    assert int(third.headers["x-ratelimit-remaining-tokens"]) == 0
    assert "30 tokens per minute" in third.json()["error"]["message"]


def test_concurrent(server: Server, folder: Path) -> None:
    key = make(server, folder, "single", "--concurrent", "1")
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", headers={"x-api-key": key}, json={**CHAT, "stream": True}
    ) as running:
        lines = running.iter_lines()
        next(lines)
        refused = server.ask(key)
        assert refused.status_code == 429 and "1 concurrent requests" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert [line for line in lines if line][-1] == "data: [DONE]"
    eventually(lambda: server.ask(key).is_success)


def test_monthly_quota(server: Server, folder: Path) -> None:
    key = make(server, folder, "poor", "--monthly-tokens", "40")
    assert [server.ask(key).status_code for _ in range(3)] == [200, 200, 429]
    refused = server.ask(key)
    assert refused.json()["error"]["code"] == refused.json()["error"]["type"] == "insufficient_quota"
    assert "44 of its 40 tokens" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false" and int(refused.headers["retry-after"]) > 0
    treadle_key(folder, "change", "poor", "--monthly-tokens", "100")
    eventually(lambda: server.ask(key).is_success)


def test_models_allowed(server: Server, folder: Path) -> None:
    key = make(server, folder, "elsewhere", "--model", "another")
    refused = server.ask(key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert server.get("/v1/models", key).json()["data"] == []
    assert server.get("/v1/models/toy", key).status_code == 404
    alias = make(server, folder, "alias", "--model", "t:1")
    assert server.ask(alias).is_success and server.ask(alias, model="t:1").is_success
    assert [card["id"] for card in server.get("/v1/models", alias).json()["data"]] == ["toy"]


BODIES: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "toy", "prompt": "a"},
    "/v1/embeddings": {"model": "toy", "input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/responses": {"model": "toy", "input": "a"},
    "/v1/messages": {**CHAT, "max_tokens": 3},
    "/v1/messages/count_tokens": CHAT,
    "/v1/models/{name:path}": None,
}


def test_no_route_answers_with_a_model_that_the_key_may_not_use(server: Server, folder: Path) -> None:
    stranger = make(server, folder, "stranger", "--model", "another")
    friend = make(server, folder, "friend", "--model", "toy")
    for operation in OPERATIONS:
        if not operation.needs_model:
            continue
        for key, allowed in ((stranger, False), (friend, True)):
            answer = httpx.request(
                operation.method,
                server.url + operation.path.replace("{name:path}", "toy"),
                headers={"x-api-key": key},
                json=BODIES[operation.path],
            )
            error = answer.json().get("error")
            if allowed:
                assert answer.status_code in (200, 400), operation.path
                assert error is None or "generates text" in error["message"]
            else:
                assert (answer.status_code, error["type"]) == (404, "not_found_error"), operation.path
                assert "served: none" in error["message"]


def test_revoked_and_rotated_without_a_restart(server: Server, folder: Path) -> None:
    old = make(server, folder, "turning")
    new = treadle_key(folder, "rotate", "turning")
    eventually(lambda: server.ask(new).is_success)
    assert "replaced" in server.ask(old).json()["error"]["message"]
    treadle_key(folder, "revoke", "turning")
    eventually(lambda: server.ask(new).status_code == 401)


def test_usage_equals_what_the_answers_said(server: Server, folder: Path) -> None:
    keys = {name: make(server, folder, name) for name in ("ann", "bob")}
    sums = dict.fromkeys(keys, 0)
    for name, key in keys.items():
        for count in range(5):
            said = server.ask(key, max_tokens=3 + count).json()["usage"]
            sums[name] += said["total_tokens"]
    assert server.ask(keys["bob"], n=0).status_code == 400
    assert server.ask(keys["bob"], stream=True).is_success
    eventually(lambda: usage(folder, "bob")[0] == 7)
    assert usage(folder, "ann") == [5, 0, 10, sums["ann"] - 10]
    assert usage(folder, "bob") == [7, 1, 12, sums["bob"] - 10 + 20]
    listed = {entry["name"]: entry for entry in json.loads(treadle_key(folder, "list", "--json"))}
    assert listed["ann"]["month_tokens"] == sums["ann"]
    assert listed["ann"]["created"] <= listed["ann"]["last_used"] <= listed["bob"]["last_used"]
    assert str(listed["bob"]["last_used"])[:16].replace("T", " ") in treadle_key(folder, "list")
    csv = treadle_key(folder, "usage", "--format", "csv", "--by-day").splitlines()
    assert csv[0] == "day,key,id,model,requests,errors,prompt_tokens,cached_tokens,completion_tokens"
    assert any(line.split(",")[1] == "ann" for line in csv)


@pytest.mark.parametrize("stream", [True, False])
def test_what_a_client_does_not_wait_for_counts(server: Server, folder: Path, stream: bool) -> None:
    key = make(server, folder, f"hasty-{stream}", "--concurrent", "1")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            server.url + "/v1/chat/completions",
            headers={"x-api-key": key},
            json={**CHAT, "stream": stream, "n": 5},
            timeout=httpx.Timeout(5, read=0.004 if stream else 0.1),  # tokens come every 0.01 s
        )
    eventually(lambda: usage(folder, f"hasty-{stream}")[0] == 1)
    _, _, prompt, completion = usage(folder, f"hasty-{stream}")
    assert prompt == 2 and 0 <= completion < 100
    assert stream or completion > 0
    assert server.ask(key).is_success  # its place is free again


def test_the_log_names_keys_and_never_shows_them(server: Server, folder: Path) -> None:
    key = make(server, folder, "logged")
    server.ask(key, stream=True)
    eventually(lambda: any(line.get("key") == "logged" and line["status"] == 200 for line in server.lines()))
    (line,) = [x for x in server.lines() if x.get("key") == "logged" and x["path"].startswith("/v1")]
    assert line["model"] == "toy" and line["completion_tokens"] == 20 and line["client"] == "127.0.0.1"
    assert 0 < line["ttft"] < line["duration"]
    assert len(line["request_id"]) == 32 and line["time"].endswith("Z") and line["level"] == "info"
    assert "sk-treadle" not in server.log


def test_first_key_on_an_address_that_others_reach(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with serving(folder, host="0.0.0.0") as server:
        file = folder / "first-key"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        key = file.read_text().strip()
        assert str(file) in server.log and key not in server.log
        assert server.ask(None).status_code == 401
        assert server.ask(key).is_success and server.get("/metrics", key).is_success
    with serving(folder, host="0.0.0.0") as server:  # usage and key are still there, and no second first key
        assert file.read_text().strip() == key and str(file) not in server.log
        assert server.ask(key).is_success
        treadle_key(folder, "revoke", "first")
        eventually(lambda: server.ask(key).status_code == 401)
        assert server.ask(None).status_code == 401
    assert usage(folder, "first")[0] >= 2


def test_two_servers_share_a_quota(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    key = treadle_key(folder, "create", "shared", "--monthly-tokens", "44")
    with serving(folder) as one, serving(folder) as two:
        assert one.ask(key).is_success and one.ask(key).is_success
        eventually(lambda: two.ask(key, max_tokens=1).status_code == 429)


def test_a_store_that_breaks_while_serving(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    key = treadle_key(folder, "create", "k")
    with serving(folder) as server:
        (folder / "treadle.db").rename(folder / "away")
        eventually(lambda: "is gone" in server.log)
        assert server.ask(key).is_success  # keys stay as they were, closed for others
        assert server.ask(None).status_code == 401
        (folder / "away").rename(folder / "treadle.db")
        eventually(lambda: "can be used again" in server.log)
        eventually(lambda: usage(folder, "k")[0] >= 1)


def test_the_engine_is_told_whose_request_it_is(tmp_path: Path) -> None:
    """Fairness: a key with one request is not held up by the waiting requests of another; here by the place
    that no key may take, the last quarter."""
    folder = tmp_path / "data"
    keys = [treadle_key(folder, "create", name) for name in ("many", "one")]
    with serving(folder, first=1.5) as server:
        statuses: list[int] = []

        def flood() -> None:
            statuses.append(server.ask(keys[0], n=100).status_code)

        threads = [threading.Thread(target=flood) for _ in range(9)]  # of 1000 places, 750 for one key
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200] * 7 + [429] * 2
        assert server.ask(keys[1], n=100).is_success


def test_tls_root_path_and_proxies(tmp_path: Path) -> None:
    cert, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-keyout", str(private), "-out", str(cert)], check=True, capture_output=True)
    settings: dict[str, Any] = {
        "tls_cert": str(cert),
        "tls_key": str(private),
        "root_path": "/llm",
        "api_key": ["k"],
    }
    with serving(tmp_path / "data", log_format="json", trusted_proxies=["127.0.0.1"], **settings) as server:
        assert server.url.startswith("https://127.0.0.1")
        forwarded = {"x-api-key": "k", "X-Forwarded-For": "6.6.6.6, 10.1.2.3"}
        trust = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(verify=trust, headers=forwarded) as client:
            for path in (
                "/v1/models",
                "/llm/v1/models",
            ):  # a proxy may remove the prefix
                assert client.get(server.url + path).is_success
            assert client.get(server.url + "/llm/v1/models", headers={"x-api-key": "x"}).status_code == 401
            assert client.get(server.url + "/llm/llm/v1/models").status_code == 404
            assert client.get(server.url + "/openapi.json").json()["servers"] == [{"url": "/llm"}]
            server.process.send_signal(signal.SIGHUP)
            eventually(lambda: "certificate was read again" in server.log)
            assert client.get(server.url + "/v1/models").is_success
        assert {line["client"] for line in server.lines() if "client" in line} == {"10.1.2.3"}


def test_forwarded_addresses_are_not_believed_by_default(tmp_path: Path) -> None:
    with serving(tmp_path / "data", log_format="json", api_key=["k"]) as server:
        server.get("/version", "k", **{"X-Forwarded-For": "6.6.6.6"})
        eventually(lambda: any("client" in line for line in server.lines()))
        assert {line["client"] for line in server.lines() if "client" in line} == {"127.0.0.1"}
