"""Streams under a scripted engine. Cases B07 to B11, C01 on the wire, E02, and failures in both modes."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import KEY, Api, Start
from tests.server.scripted import ByteText, ScriptedEngine
from treadle.engine.client import EngineClient

BODY: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


def chat(api: Api, **options: Any) -> httpx.Response:
    return api.post("/v1/chat/completions", json={**BODY, **options})


def until(condition: Any) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "did not happen within 5 s"
        time.sleep(0.02)


def running(api: Api) -> float:
    lines = api.get("/metrics").text.split("\n")
    return float(next(line.split()[1] for line in lines if line.startswith("treadle_requests_running ")))


def test_headers_that_no_proxy_buffers(scripted: Start) -> None:
    response = chat(scripted(), stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    assert "content-encoding" not in response.headers


def test_chunks_are_sent_one_by_one(scripted: Start) -> None:
    found = [
        json.loads(data) for data in events(chat(scripted(ScriptedEngine("a–b")), stream=True).text)[:-1]
    ]
    assert [c["choices"][0]["delta"] for c in found] == [
        {"role": "assistant", "content": ""}, {"content": "a"}, {"content": "–"}, {"content": "b"}, {},
    ]  # fmt: skip
    assert {(c["id"], c["created"], c["model"]) for c in found} == {
        (found[0]["id"], found[0]["created"], "toy")
    }


def test_comments_while_silent(scripted: Start) -> None:
    api = scripted(ScriptedEngine(first=0.7), keep_alive=0.1)
    text = chat(api, stream=True).text
    assert text.count(":\n\n") >= 3
    assert text.endswith("data: [DONE]\n\n")
    with openai.OpenAI(base_url=api.url + "/v1", api_key=KEY) as client:
        stream = client.chat.completions.create(model="toy", messages=BODY["messages"], stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == "Hello"
    assert ":\n\n" not in chat(scripted(ScriptedEngine(first=0.3), keep_alive=0.0), stream=True).text


def test_engine_failure_in_mid_stream_is_an_error(scripted: Start) -> None:
    api = scripted(ScriptedEngine("0123456789", fail_after=5))
    data = events(chat(api, stream=True).text)
    assert "[DONE]" not in data
    assert json.loads(data[-1])["error"]["message"] == "the engine process died"
    with openai.OpenAI(base_url=api.url + "/v1", api_key=KEY, max_retries=0) as client:
        stream = client.chat.completions.create(model="toy", messages=BODY["messages"], stream=True)
        with pytest.raises(openai.APIError, match="the engine process died"):
            list(stream)
    whole = chat(api)
    assert whole.status_code == 500
    assert whole.json()["error"]["code"] == "engine_error"
    legacy = api.post("/v1/completions", json={"model": "toy", "prompt": "x", "stream": True})
    assert "error" in events(legacy.text)[-1]


def test_engine_exception_does_not_hang_or_leak(scripted: Start) -> None:
    class Broken(ScriptedEngine):
        async def submit(self, request: Any) -> Any:
            raise RuntimeError("secret path /etc/x")
            yield

    api = scripted(Broken())
    for stream in (False, True):
        response = chat(api, stream=stream)
        assert "secret" not in response.text
        assert "error" in response.text
        assert "[DONE]" not in response.text


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_is_cancelled(scripted: Start, stream: bool) -> None:
    engine = ScriptedEngine("x" * 200, delay=0.05)
    api = scripted(engine)
    with pytest.raises(httpx.ReadTimeout):
        api.post(
            "/v1/chat/completions",
            json={**BODY, "stream": stream, "n": 2},
            timeout=0.3 if not stream else 0.04,
        )
    until(lambda: len(engine.cancelled) == 2)
    assert set(engine.cancelled) == {request.id for request in engine.requests}
    until(lambda: running(api) == 0)
    assert api.get("/health").is_success


def test_stop_string_frees_the_engine_at_once(scripted: Start) -> None:
    engine = ScriptedEngine("one two three", delay=0.01)
    api = scripted(engine)
    answer = chat(api, stop=" two").json()
    assert answer["choices"][0]["message"]["content"] == "one"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert engine.cancelled == [engine.requests[0].id]


def test_reasoning_is_apart_in_both_modes(scripted: Start) -> None:
    api = scripted(ScriptedEngine("think|answer"), text=ByteText(reasons=True))
    message = chat(api).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == (
        "think",
        "think",
        "answer",
    )
    deltas = [json.loads(data)["choices"][0]["delta"] for data in events(chat(api, stream=True).text)[:-1]]
    kinds = [next(iter(delta)) for delta in deltas[1:-1]]
    assert kinds == ["reasoning_content"] * 5 + ["content"] * 6
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "think"
    raw = chat(api, reasoning_format="none").json()["choices"][0]["message"]
    assert raw["content"] == "think|answer"
    assert "reasoning_content" not in raw


def test_template_refusal_is_a_400_without_source(scripted: Start) -> None:
    api = scripted()
    for stream in (False, True):
        response = chat(api, messages=[{"role": "user", "content": "refuse"}], stream=stream)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"] == "messages: Conversation roles must alternate user/assistant"
        assert error["param"] == "messages"


def test_history_reaches_the_template_whole(scripted: Start) -> None:
    text = ByteText()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "content": "x", "reasoning": "why"},
        {"role": "user", "content": "q"},
    ]
    assert chat(scripted(text=text), messages=history).is_success
    assert text.conversations[0] == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "content": "x", "reasoning_content": "why"},
        {"role": "user", "content": "q"},
    ]


def test_every_sampling_field_reaches_the_engine(scripted: Start) -> None:
    engine = ScriptedEngine()
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1,
        "min_tokens": 2,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 2**63 - 1, "max_tokens": 9,
        "ignore_eos": True,
    }  # fmt: skip
    more = {
        "logit_bias": {"5": 2},
        "stop_token_ids": [1, 2],
        "priority": 3,
        "cache_salt": "s",
        "logprobs": True,
    }
    assert chat(scripted(engine), n=2, **fields, **more).is_success
    first, second = engine.requests
    for name in fields.keys() - {"seed"}:
        assert getattr(first.params, name) == fields[name]
    assert (first.params.seed, second.params.seed) == (2**63 - 1, -(2**63))
    assert first.params.logit_bias == {5: 2.0}
    assert first.params.stop_token_ids == (1, 2)
    assert first.params.logprobs == 0
    assert (first.priority, first.cache_salt, first.user) == (3, "s", "config-1")


def test_metrics_count_tokens(scripted: Start) -> None:
    api = scripted()
    chat(api)
    text = api.get("/metrics").text
    assert 'treadle_tokens_total{kind="completion"} 5.0' in text
    assert 'treadle_tokens_total{kind="prompt"} 2.0' in text
    assert 'treadle_http_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert "treadle_ttft_seconds_count 1.0" in text
    assert "treadle_itl_seconds_count 4.0" in text
    assert "_created" not in text


def test_log_has_a_line_per_request(scripted: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "treadle.request")
    api = scripted()
    chat(api)
    chat(api, stream=True)
    api.post("/v1/completions", json={"model": "t:1", "prompt": "hi"}, headers={"X-Request-Id": "mine"})
    api.post("/v1/completions", json={"model": "none"})
    api.get("/line%0Abreak")
    api.get("/health")
    fields: list[dict[str, Any]] = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    shown = [(f["path"], f["status"], f["key"], f.get("model"), f.get("completion_tokens")) for f in fields]
    assert shown == [
        ("/v1/chat/completions", 200, "config-1", "toy", 5),
        ("/v1/chat/completions", 200, "config-1", "toy", 5),
        ("/v1/completions", 200, "config-1", "toy", 5),
        ("/v1/completions", 400, "config-1", None, None),
        ("/line%0Abreak", 404, "config-1", None, None),
    ]
    assert [f["prompt_tokens"] for f in fields[:3]] == [2, 2, 2]
    assert all(0 < f["ttft"] <= f["duration"] for f in fields[:3])
    assert fields[2]["request_id"] == "mine"


def test_metrics_of_the_engine_say_what_they_are(scripted: Start) -> None:
    engine = ScriptedEngine()
    engine.stats = EngineClient("", None).stats
    text = scripted(engine).get("/metrics").text
    families = re.findall(r"^# HELP (treadle_engine_\w+) (.+)\n# TYPE \1 (\w+)\n\1\{", text, re.MULTILINE)
    assert {name.removeprefix("treadle_engine_") for name, _, _ in families} == set(engine.stats)
    for name, words, kind in families:
        assert kind == ("counter" if name.endswith("_total") else "gauge")
        assert len(words.split()) > 2
