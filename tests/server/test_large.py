"""Large bodies: others are answered meanwhile, and what cannot fit is refused before it costs anything.
Cases A05 and J08."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.conftest import Api, Start
from tests.server.scripted import ByteText, ScriptedEngine
from treadle.server.schema import validate

HELLO = [{"role": "user", "content": "hi"}]


def test_others_are_answered_while_a_long_text_is_tokenised(server: Api) -> None:
    def ask() -> int:
        count: int = server.post("/tokenize", json={"prompt": "word " * 800_000}).json()["count"]
        return count

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        body = {"model": server.model, "messages": HELLO, "stream": True, "max_tokens": 4}
        with Api(server.url, server.model) as other:
            for _ in range(3):
                assert other.get("/health").is_success
                assert "[DONE]" in other.post("/v1/chat/completions", json=body).text
        assert not asking.done()
        assert asking.result(60) >= 800_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 2_000_000}]}),
        ("/v1/completions", {"prompt": "word " * 2_000_000}),
        ("/v1/completions", {"prompt": [1] * 3_000_000}),
    ],
)
def test_what_cannot_fit_is_refused(server: Api, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, json={"model": server.model, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"]
    assert error["param"] == next(iter(body))


MANY = [*HELLO, *([{"role": "assistant", "content": "a"}] * 40_000)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MANY}),
        (
            "/v1/chat/completions",
            {"messages": [*HELLO, {"role": "assistant", "reasoning": "a" * 9000, "content": ""}]},
        ),
        ("/v1/completions", {"prompt": ["a" * 100] * 100}),
        ("/v1/completions", {"prompt": [1] * 30_000}),
        ("/tokenize", {"messages": MANY}),
        ("/tokenize", {"prompt": "a" * 9000}),
        ("/detokenize", {"tokens": [1] * 30_000}),
    ],
)
@pytest.mark.parametrize("step", ["validate", "text"])
def test_large_bodies_leave_the_server_to_others(
    scripted: Start, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], step: str
) -> None:
    """One step of the request waits until another request has been answered."""
    reached, answered = threading.Event(), threading.Event()

    def held(function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **options: Any) -> Any:
            reached.set()
            assert answered.wait(10), "nobody else was answered meanwhile"
            return function(*args, **options)

        return wait

    text = ByteText()
    if step == "validate":
        monkeypatch.setattr("treadle.server.service.validate", held(validate))
    else:
        for name in ("encode", "encode_chat", "decode"):
            monkeypatch.setattr(text, name, held(getattr(text, name)))
    api = scripted(ScriptedEngine(), text=text)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(api.post, path, json={"model": "toy", **body})
        if step == "validate" or body.get("prompt") != [1] * 30_000:  # ids are refused by their number alone
            assert reached.wait(10)
            with Api(api.url, "toy") as other:
                assert other.get("/health").is_success
        answered.set()
        status = asking.result(30).status_code
    assert status in (200, 400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]),
        ("logit_bias", {str(key): 1 for key in range(300)}),
    ],
)
def test_too_many_parts_are_refused(scripted: Start, field: str, value: Any) -> None:
    answer = scripted().post("/v1/chat/completions", json={"model": "toy", "messages": HELLO, field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    if field == "messages":
        message = "messages[0].content: must have at most 4096 items; got an array of 100000"
        assert answer.json()["error"]["message"] == message


def test_a_wrong_item_is_named_wherever_it_is(scripted: Start) -> None:
    api = scripted()
    for index in (0, 1023, 1024, 40_001):
        messages: list[Any] = [*MANY]
        messages.insert(index, {"role": "alien", "content": "x"})
        error = api.post("/v1/chat/completions", json={"model": "toy", "messages": messages}).json()["error"]
        assert error["message"].startswith(f"messages[{index}].role: must be")
    for index in (0, 1024, 5000):
        tokens: list[Any] = [1] * 6000
        tokens[index] = -1
        error = api.post("/detokenize", json={"tokens": tokens}).json()["error"]
        assert error["message"].startswith(f"tokens[{index}]: must be")
    assert api.post("/detokenize", json={"tokens": [65] * 6000}).json() == {"prompt": "A" * 6000}
