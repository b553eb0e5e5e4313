"""Cases A01 to A07 and A15: wrong requests are refused by name, in both modes, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def refused(
    server: Any, body: Any, param: str, status: int = 400, path: str = "/v1/chat/completions"
) -> dict[str, Any]:
    response = server.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert param in error["message"]
    assert server.post(
        "/v1/completions", json={"model": server.model, "prompt": "a", "max_tokens": 1}
    ).is_success
    return error


@pytest.mark.parametrize("stream", [False, True])
def test_empty_messages(server: Any, stream: bool) -> None:
    refused(server, {"model": server.model, "messages": [], "stream": stream}, "messages")


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", [1]], [10**9], [-1], None, 5])
def test_bad_prompt(server: Any, prompt: Any) -> None:
    refused(
        server, {"model": server.model, "prompt": prompt, "max_tokens": 4}, "prompt", path="/v1/completions"
    )


ITEMS = {
    "prompt[1]: must be a string, a token id or a list of token ids; got 5.5": ["a", 5.5],
    "prompt[0][1]: must be a valid integer": [[1, "a"]],
    "prompt[1]: must be greater than or equal to 0; got -1": [5, -1],
}


@pytest.mark.parametrize("message", ITEMS)
def test_wrong_items_are_told_by_what_they_almost_are(server: Any, message: str) -> None:
    body = {"model": server.model, "prompt": ITEMS[message]}
    assert message in refused(server, body, "prompt", path="/v1/completions")["message"]


WRONG = [
    ("stream", "true"), ("max_tokens", "256"), ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 1.5),
    ("max_completion_tokens", 0), ("n", 0), ("n", True), ("temperature", -0.1), ("temperature", 2.5),
    ("temperature", "1"), ("top_p", 0), ("top_p", 1.5), ("stop", [1, 2]), ("stop", ["a"] * 33), ("stop", ""),
    ("messages", "hi"), ("messages", [{"role": "alien", "content": "x"}]), ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": "x", "colour": 1}]), ("seed", 1.5), ("top_k", -2), ("min_p", 2),
    ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("logit_bias", {"x": 1}),
    ("logit_bias", {"99999999": 1}), ("logit_bias", {"5": 101}), ("stop_token_ids", [10**8]),
    ("min_tokens", 5000),
    ("top_logprobs", 5), ("logprobs", 3), ("stream_options", {"include_usage": True}), ("priority", "high"),
    ("response_format", {"type": "xml"}), ("tools", []), ("tool_choice", "auto"), ("best_of", 2),
    ("parallel_tool_calls", False), ("tools", [TOOL] * 2), ("tools", [{"type": "function"}]),
    ("tools", [{"type": "web_search"}]), ("functions", [{"name": "f"}]),
    ("reasoning_effort", "huge"), ("reasoning", {"max_tokens": -1}), ("reasoning", {"enabled": True}),
    ("reasoning", {"effort": "none", "enabled": True}), ("reasoning", {"exclude": True}),
    ("thinking_token_budget", 1.5), ("thinking_budget_tokens", -2), ("service_tier", "flex"),
    ("echo", True), ("no_such_field", 1), ("model", 7),
]  # fmt: skip


MESSAGES = {
    "a string or a list of parts": [{"role": "user", "content": 5}],
    "a string or a list of parts; got an object": [{"role": "user", "content": {"type": "text"}}],
    "messages[0].content[0]: must be an object": [{"role": "user", "content": ["x"]}],
    "messages[1]: must be an object": [*HELLO, "hi"],
    "messages: must be a list": {"role": "user", "content": "hi"},
}


@pytest.mark.parametrize("said", MESSAGES)
def test_the_allowed_kinds_of_content_are_said(server: Any, said: str) -> None:
    error = refused(server, {"model": server.model, "messages": MESSAGES[said]}, "messages")
    assert said in error["message"]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_wrong_value_is_named(server: Any, field: str, value: Any) -> None:
    refused(server, {"model": server.model, "messages": HELLO, field: value}, field)


HARMLESS = {
    "user": "u1", "metadata": {"a": "b"}, "service_tier": "auto", "store": False, "safety_identifier": "s",
    "response_format": {"type": "text"}, "tools": None, "temperature": None, "stream": False,
    "prompt_cache_key": "k", "reasoning_effort": "high", "reasoning": {"max_tokens": 100},
    "thinking_token_budget": 5, "thinking_budget_tokens": -1, "verbosity": "medium", "mirostat": 0,
    "bad_words": [], "include_reasoning": True,
}  # fmt: skip


def test_harmless_fields_are_accepted(server: Any) -> None:
    body = {"model": server.model, "messages": HELLO, "max_tokens": 1, **HARMLESS}
    assert server.post("/v1/chat/completions", json=body).is_success


def test_unknown_model_is_not_answered_by_another(server: Any) -> None:
    before = server.get("/v1/models").json()
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
    )
    for path, extra in bodies:
        error = refused(server, {"model": "no-such-model", **extra}, "model", 404, path)
        assert server.model in error["message"]
        assert error["code"] == "model_not_found"
    assert server.get("/v1/models").json() == before
    assert server.get("/v1/models/" + server.model).json()["id"] == server.model
    assert server.get("/v1/models/no-such-model").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_longer_than_context(server: Any, stream: bool) -> None:
    messages = [{"role": "user", "content": "word " * 5000}]
    error = refused(server, {"model": server.model, "messages": messages, "stream": stream}, "messages")
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_limit_beyond_context_names_the_numbers(server: Any, stream: bool) -> None:
    body = {"model": server.model, "messages": HELLO, "max_tokens": 2048, "stream": stream}
    error = refused(server, body, "max_tokens")
    assert "2048" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_limit_the_answer_ends_where_the_context_does(server: Any, stream: bool) -> None:
    prompt = [1] * 2040
    body = {"model": server.model, "prompt": prompt, "ignore_eos": True, "stream": stream, "temperature": 0}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    answer = server.post("/v1/completions", json=body)
    assert answer.is_success, answer.text
    pieces = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    records = [json.loads(piece) for piece in pieces] if stream else [answer.json()]
    assert [c["finish_reason"] for r in records for c in r["choices"] if c["finish_reason"]] == ["length"]
    assert records[-1]["usage"]["total_tokens"] == 2048


BAD_BYTES = {
    "half a character": b'{"model":"%s","messages":[{"role":"user","content":"\xe6\xad"}]}',
    "lone surrogate": b'{"model":"%s","messages":[{"role":"user","content":"\\ud83d"}]}',
    "NUL": b'{"model":"%s","messages":[{"role":"user","content":"a\\u0000b"}]}',
    "deep nesting": b'{"model":"%s","messages":' + b"[" * 64 + b"]" * 64 + b"}",
    "very deep nesting": b"[" * 100_000,
    "cut off": b'{"model":"%s","messages":[{"ro',
    "not an object": b"[1]",
    "NaN": b'{"model":"%s","temperature":NaN}',
    "empty": b"",
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_bad_bytes(server: Any, name: str) -> None:
    raw = BAD_BYTES[name].replace(b"%s", server.model.encode())
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        response = server.post(path, content=raw, headers={"content-type": "application/json"})
        assert response.status_code == 400, name
        assert response.json()["error"]["message"]
    assert server.get("/health").is_success


def test_body_limit(server: Any) -> None:
    body = b'{"model":"x","messages":[{"role":"user","content":"' + b"a" * 20_000_000 + b'"}]}'
    for content in (body, iter([body[:10_000_000], body[10_000_000:]])):  # with and without Content-Length
        try:
            response = server.post("/v1/chat/completions", content=content)
        except (httpx.WriteError, httpx.ReadError):
            continue  # the server hung up on an unbounded upload
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
    assert server.get("/health").is_success


def test_unknown_paths_and_methods(server: Any) -> None:
    assert server.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert server.get("/v1/nothing").status_code == 404
    wrong = server.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert "POST" in wrong.headers["allow"]
    assert "GET" in wrong.json()["error"]["message"]


def test_request_ids(server: Any) -> None:
    assert server.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(server.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]) == 32
    assert server.get("/v1/nothing").headers["x-request-id"]
