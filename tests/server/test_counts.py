"""How many prompt tokens came from the cache, and how many choices are taken at once."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.conftest import Api, Start
from tests.server.scripted import ScriptedEngine
from tests.server.test_streams import BODY, chat, events, until
from treadle.engine.interfaces import Admission, QueueFull, TooMany


def counted(api: Api) -> float:
    lines = api.get("/metrics").text.split("\n")
    return float(
        next(line for line in lines if line.startswith('treadle_tokens_total{kind="cached"}')).split()[1]
    )


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_stop_string_keeps_the_count(scripted: Start) -> None:
    engine = ScriptedEngine("one two three", delay=0.01)
    api = scripted(engine)
    engine.cached = [7, 9]
    assert cached(chat(api, stop=" two").json()) == 7
    text = chat(api, stop=" two", stream=True, stream_options={"include_usage": True}).text
    assert '"cached_tokens":9' in events(text)[-2]
    assert counted(api) == 16
    assert len(engine.cancelled) == 2


def test_several_prompts_and_choices(scripted: Start) -> None:
    engine = ScriptedEngine()
    api = scripted(engine)
    engine.cached = [5, 9, 8, 3]
    body = {"model": "toy", "prompt": ["a", "b"], "n": 2}
    assert cached(api.post("/v1/completions", json=body).json()) == 8
    assert counted(api) == 8


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_is_counted(scripted: Start, stream: bool) -> None:
    engine = ScriptedEngine("x" * 200, delay=0.05)
    api = scripted(engine)
    engine.cached = [6, 4]
    with pytest.raises(httpx.ReadTimeout):
        api.post(
            "/v1/chat/completions",
            json={**BODY, "stream": stream, "n": 2},
            timeout=0.04 if stream else 0.3,
        )
    until(lambda: counted(api) == 4)


def test_real_prompts_are_found_again(server: Api) -> None:
    first, second = (f"{word} " * 100 for word in ("alpha", "omega"))
    body = {"model": server.model, "prompt": [first, second], "max_tokens": 4, "ignore_eos": True}
    fresh = server.post("/v1/completions", json=body).json()
    assert cached(fresh) == 0
    each = [server.post("/v1/completions", json={**body, "prompt": p}).json() for p in (first, second)]
    assert min(map(cached, each)) > 0
    again = server.post("/v1/completions", json={**body, "n": 2}).json()
    assert cached(again) == sum(map(cached, each))
    word = each[0]["choices"][0]["text"].split()[0]
    stopped = server.post("/v1/completions", json={**body, "prompt": first, "temperature": 0, "stop": word})
    assert cached(stopped.json()) == cached(each[0])


def test_choices_are_taken_together_or_not_at_all(scripted: Start) -> None:
    engine = ScriptedEngine("x" * 200, delay=0.05)
    engine.admission = Admission(8)
    api = scripted(engine)
    never = chat(api, n=7)
    assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
    assert "at most 6" in never.json()["error"]["message"]
    many = api.post("/v1/completions", json={"model": "toy", "prompt": ["a"] * 7})
    assert (many.status_code, many.json()["error"]["param"]) == (400, "prompt")
    with api.stream("POST", "/v1/chat/completions", json={**BODY, "n": 4, "stream": True}) as running:
        lines = running.iter_lines()
        next(lines)
        busy = chat(api, n=3)
        assert (busy.status_code, busy.json()["error"]["code"]) == (429, "queue_full")
        assert len(engine.requests) == 4
        assert not engine.cancelled


def test_admission_takes_all_or_none() -> None:
    admission = Admission(8)
    with pytest.raises(TooMany, match="at most 6"):
        admission.enter("a", 7)
    admission.enter("a", 4)
    with pytest.raises(QueueFull):
        admission.enter("a", 3)
    with pytest.raises(QueueFull):
        admission.enter("", 5)
    admission.enter("b", 4)
    assert admission.inside == 8
    for user in "aaaabbbb":
        admission.leave(user)
    admission.enter("", 8)
    with pytest.raises(TooMany, match="at most 8"):
        admission.enter("", 9)
