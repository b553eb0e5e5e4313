"""Cases E01 and E02 over HTTP: one BOS, and templates that refuse, on real tokenizers and templates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.server.conftest import KEY, Api, running
from tests.server.scripted import ScriptedEngine, byte_tokenizer
from tests.text.conftest import r1, r1_metadata, r1_oracle
from treadle.config import Config
from treadle.server.service import Served
from treadle.server.text import ModelText
from treadle.text.tokenizer import Tokenizer

__all__ = ["r1", "r1_metadata", "r1_oracle"]

STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role in ('user', 'tool')) != (loop.index0 is even) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m.content == 'undefined' %}{{ m.nothing.at_all }}{% endif %}"
    "{% if m.content == 'inside' %}{{ m.__class__.__mro__ }}{% endif %}"
    "{% if m.content == 'large' %}{{ 'a' * 9999999999 }}{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}"
)


def served(text: ModelText, engine: ScriptedEngine) -> Any:
    async def load() -> list[Served]:
        return [Served(name="toy", text=text, engine=engine, context=4096)]

    return running(Config(api_key=(KEY,)), load)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("strict"), STRICT, ["<|end|>"])
    engine = ScriptedEngine()
    engine.token_ids = tokenizer.encode("Hello")
    with served(ModelText(tokenizer), engine) as api:
        yield api


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


REFUSED = {
    "two users": ([user("a"), user("b")], "must alternate"),
    "system": ([{"role": "system", "content": "s"}, user("a")], "System role not supported"),
    "assistant first": ([{"role": "assistant", "content": "a"}, user("a")], "must alternate"),
    "result without a call": (
        [user("a"), {"role": "tool", "content": "5", "tool_call_id": "c"}],
        "alternate",
    ),
    "undefined": ([user("undefined")], ""),
    "inside": ([user("inside")], ""),
    "large": ([user("large")], ""),
}
ROUTES: dict[str, Any] = {
    "/v1/chat/completions": {},
    "/tokenize": {},
    "/v1/messages": {"max_tokens": 5},
    "/v1/messages/count_tokens": {},
    "/v1/responses": {},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_template_refuses(strict: Api, case: str) -> None:
    messages, told = REFUSED[case]
    for path, more in ROUTES.items():
        field = "input" if path == "/v1/responses" else "messages"
        if messages[-1]["role"] == "tool" and path.startswith(("/v1/messages", "/v1/responses")):
            continue  # they have results of another form
        for stream in (False, True) if "count" not in path and path != "/tokenize" else (None,):
            body = {"model": "toy", field: messages, **more, **({} if stream is None else {"stream": stream})}
            answer = strict.post(path, json=body)
            assert answer.status_code == 400, (path, stream, answer.text)
            assert answer.headers["content-type"] == "application/json"
            message = answer.json()["error"]["message"]
            assert told in message and message, path
            for leaked in ("{{", "{%", "jinja", "Traceback", 'File "', "__mro__", "<class"):
                assert leaked not in answer.text, path
    good = strict.post("/v1/chat/completions", json={"model": "toy", "messages": [user("hi")]})
    assert good.json()["choices"][0]["message"]["content"] == "Hello"


def test_chats_of_r1_have_one_bos(r1: Tokenizer, r1_oracle: PreTrainedTokenizerFast) -> None:
    engine = ScriptedEngine()
    engine.token_ids = r1.encode("x")
    with served(ModelText(r1), engine) as api:
        messages = [
            user("Sag „hallo“ zu 北京!"),
            {"role": "assistant", "content": "hallo"},
            user("Noch einmal"),
        ]
        ids = r1_oracle.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert isinstance(ids, list) and ids.count(r1.bos_id) == 1 and ids[0] == r1.bos_id
        think = r1.encode("<think>\n", specials=True)  # what the newer template of the same model adds
        told = api.post("/tokenize", json={"messages": messages}).json()["tokens"]
        assert told == ids + think
        assert api.post("/v1/chat/completions", json={"model": "toy", "messages": messages}).is_success
        assert list(engine.requests[-1].prompt_ids) == told
        text = api.post("/tokenize", json={"prompt": "hallo"}).json()["tokens"]
        assert text == [r1.bos_id, *r1_oracle.encode("hallo", add_special_tokens=False)]
        assert api.post("/v1/completions", json={"model": "toy", "prompt": "hallo"}).is_success
        assert list(engine.requests[-1].prompt_ids) == text
