"""The legacy completion call and the token routes against the real default model. Cases A02, A08, A12."""

from __future__ import annotations

from typing import Any

import openai
import pytest


def complete(
    client: openai.OpenAI, model: str, prompt: Any = "The capital of France is", **options: Any
) -> Any:
    return client.completions.create(
        model=model, prompt=prompt, **{"temperature": 0, "max_tokens": 8, **options}
    )


def test_text_and_ids_are_the_same_prompt(client: openai.OpenAI, server: Any) -> None:
    ids = server.post("/tokenize", json={"prompt": "The capital of France is"}).json()["tokens"]
    text = complete(client, server.model)
    assert text.object == "text_completion"
    assert "Paris" in text.choices[0].text
    assert complete(client, server.model, ids).choices[0].text == text.choices[0].text
    both = complete(client, server.model, ["The capital of France is", "Two plus two"])
    assert [c.index for c in both.choices] == [0, 1]
    assert both.choices[0].text == text.choices[0].text
    streamed = list(complete(client, server.model, stream=True))
    assert "".join(c.choices[0].text for c in streamed) == text.choices[0].text


def test_default_limit_is_that_of_openai(client: openai.OpenAI, server: Any) -> None:
    answer = client.completions.create(
        model=server.model, prompt="One two three", extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_echo(client: openai.OpenAI, server: Any) -> None:
    plain = complete(client, server.model).choices[0].text
    assert complete(client, server.model, echo=True).choices[0].text == "The capital of France is" + plain
    streamed = list(complete(client, server.model, echo=True, stream=True))
    assert "".join(c.choices[0].text for c in streamed) == "The capital of France is" + plain


def test_logprobs_have_the_legacy_shape(client: openai.OpenAI, server: Any) -> None:
    answer = complete(client, server.model, "something", logprobs=1, max_tokens=3).choices[0]
    found = answer.logprobs
    assert (
        len(found.tokens)
        == len(found.token_logprobs)
        == len(found.top_logprobs)
        == len(found.text_offset)
        == 3
    )
    assert found.text_offset == sorted(found.text_offset)
    assert "".join(found.tokens) == answer.text
    assert found.top_logprobs[0] == {found.tokens[0]: found.token_logprobs[0]}
    chunks = list(complete(client, server.model, "something", logprobs=1, max_tokens=3, stream=True))
    streamed = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [token for part in streamed for token in part.tokens] == found.tokens
    assert [offset for part in streamed for offset in part.text_offset] == found.text_offset


def test_tokens_that_cut_characters(client: openai.OpenAI, server: Any) -> None:
    text = "＆＆龘"
    options: dict[str, Any] = {"logprobs": 5, "max_tokens": 20, "extra_body": {"guided_choice": [text]}}
    answer = complete(client, server.model, "something", **options).choices[0]
    assert answer.text == text
    found = answer.logprobs
    data = [token_data(token) for token in found.tokens]
    assert b"".join(data) == text.encode()
    assert "bytes:\\x" in "".join(found.tokens)
    before = [b"".join(data[:index]) for index in range(len(data))]
    assert found.text_offset == [len(part.decode("utf-8", "ignore")) for part in before]
    for token, top in zip(found.tokens, found.top_logprobs, strict=True):
        assert token in top
        assert len(top) >= 5
    chunks = list(complete(client, server.model, "something", stream=True, **options))
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [offset for part in streamed for offset in part.text_offset] == found.text_offset


def token_data(name: str) -> bytes:
    """The bytes that the OpenAI API writes as ``bytes:\\xef\\xbc``."""
    if not name.startswith("bytes:"):
        return name.encode()
    return name.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1")


@pytest.mark.parametrize(
    "extra", [{"max_completion_tokens": 5}, {"suffix": "x"}, {"best_of": 2}, {"messages": []}]
)
def test_fields_of_other_calls_are_refused(client: openai.OpenAI, server: Any, extra: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match=next(iter(extra))):
        complete(client, server.model, extra_body=extra)


def test_tokenize_and_back(server: Any) -> None:
    text = "Grüße 龘 😸 <|im_end|>"
    answer = server.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert server.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    usage = server.post(
        "/v1/chat/completions",
        json={"model": server.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    ).json()["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "hi"}]}):
        assert server.post("/tokenize", json=body).status_code == 400
    assert server.post("/detokenize", json={"tokens": [10**9]}).json()["error"]["param"] == "tokens"
