"""Chat with the real default model over real HTTP, through the openai client. Cases A07 to A14, B01 to B07,
E02."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
UNICODE = [{"role": "user", "content": "Repeat exactly: 龘靐齉爩 歪 发 😸👨‍👩‍👧‍👦 🇸🇬 T́"}]


def ask(client: openai.OpenAI, model: str, messages: Any = CAPITAL, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 24, **options}
    return client.chat.completions.create(model=model, messages=messages, **options)


def joined(chunks: list[Any], index: int = 0) -> str:
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index)


def test_capital_of_france(client: openai.OpenAI, server: Any) -> None:
    answer = ask(client, server.model)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"
    assert answer.model == server.model
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_says_the_same_and_has_the_documented_shape(client: openai.OpenAI, server: Any) -> None:
    whole = ask(client, server.model)
    chunks = list(ask(client, server.model, stream=True))
    assert joined(chunks) == whole.choices[0].message.content
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [c.choices[0].finish_reason for c in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1)
    assert reasons[-1] == whole.choices[0].finish_reason
    assert all(c.usage is None for c in chunks)


def test_stream_of_one_token(client: openai.OpenAI, server: Any) -> None:
    chunks = list(ask(client, server.model, stream=True, max_tokens=1))
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]


def test_raw_stream_ends_with_done(server: Any) -> None:
    body = {"model": server.model, "messages": CAPITAL, "max_tokens": 4, "stream": True}
    text = server.post("/v1/chat/completions", json=body).text
    assert text.endswith("data: [DONE]\n\n")
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    for line in lines[:-1]:
        chunk = json.loads(line.removeprefix("data: "))
        assert set(chunk["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"}


@pytest.mark.parametrize(
    "limits", [{"max_completion_tokens": 7}, {"max_completion_tokens": 7, "max_tokens": 50}]
)
def test_max_completion_tokens(client: openai.OpenAI, server: Any, limits: dict[str, int]) -> None:
    answer = ask(client, server.model, **{"max_tokens": None, "extra_body": {"ignore_eos": True}, **limits})
    assert answer.usage.completion_tokens == 7
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.9, 0])
def test_several_choices(client: openai.OpenAI, server: Any, temperature: float) -> None:
    one = ask(client, server.model, max_tokens=16)
    many = ask(client, server.model, n=3, temperature=temperature, max_tokens=16, seed=7)
    assert [c.index for c in many.choices] == [0, 1, 2]
    assert many.usage.prompt_tokens == one.usage.prompt_tokens
    texts = {c.message.content for c in many.choices}
    assert len(texts) == (1 if temperature == 0 else 3)
    chunks = list(ask(client, server.model, n=3, temperature=temperature, max_tokens=16, seed=7, stream=True))
    assert [joined(chunks, i) for i in range(3)] == [c.message.content for c in many.choices]
    finished = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
    assert sorted(finished) == [0, 1, 2]


def test_logprobs(client: openai.OpenAI, server: Any) -> None:
    plain = ask(client, server.model, logprobs=True)
    entries = plain.choices[0].logprobs.content
    assert len(entries) == plain.usage.completion_tokens
    assert all(entry.top_logprobs == [] for entry in entries)
    assert bytes(b for entry in entries for b in entry.bytes).decode() == plain.choices[0].message.content
    top = ask(client, server.model, logprobs=True, top_logprobs=5).choices[0].logprobs.content
    for entry in top:
        assert len(entry.top_logprobs) == 5
        assert entry.top_logprobs[0].token == entry.token
        values = [other.logprob for other in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert values[0] <= 0
    chunks = list(ask(client, server.model, logprobs=True, top_logprobs=5, stream=True))
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in top]


def test_seed_and_penalties_change_what_they_should(client: openai.OpenAI, server: Any) -> None:
    def text(**options: Any) -> str:
        answer: str = ask(client, server.model, **options).choices[0].message.content
        return answer

    assert text(temperature=1.2, seed=1) == text(temperature=1.2, seed=1)
    assert text(temperature=1.2, seed=1) != text(temperature=1.2, seed=2)
    assert text(temperature=1.9, extra_body={"top_k": 1}) == text()
    assert text(temperature=1.9, top_p=1e-6) == text()
    assert text(extra_body={"repetition_penalty": 5.0}) != text()
    paris = server.post("/tokenize", json={"prompt": " Paris", "add_special_tokens": False}).json()["tokens"][
        0
    ]
    assert "Paris" not in text(logit_bias={str(paris): -100})


def test_stop_strings(client: openai.OpenAI, server: Any) -> None:
    whole = ask(client, server.model).choices[0].message.content
    stop = whole[6:12]
    cut = ask(client, server.model, stop=[stop, "never written"])
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    chunks = list(ask(client, server.model, stop=stop, stream=True))
    assert joined(chunks) == cut.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"
    kept = ask(client, server.model, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == whole[: whole.index(stop) + len(stop)]
    first = ask(client, server.model, stop=[stop[:4], stop])
    assert first.choices[0].message.content == cut.choices[0].message.content


def test_min_tokens_and_stop_ids(client: openai.OpenAI, server: Any) -> None:
    entries = ask(client, server.model, logprobs=True, max_tokens=4).choices[0].logprobs.content
    second = server.post("/tokenize", json={"prompt": entries[1].token, "add_special_tokens": False}).json()[
        "tokens"
    ]
    answer = ask(client, server.model, extra_body={"stop_token_ids": second})
    assert answer.choices[0].message.content == entries[0].token
    assert answer.choices[0].finish_reason == "stop"
    longer = ask(client, server.model, extra_body={"stop_token_ids": second, "min_tokens": 5})
    assert longer.usage.completion_tokens >= 5


def test_usage_chunk(client: openai.OpenAI, server: Any) -> None:
    whole = ask(client, server.model)
    chunks = list(ask(client, server.model, stream=True, stream_options={"include_usage": True}))
    assert [c.choices == [] for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    again = ask(client, server.model)  # of which both runs found the same in the cache
    assert chunks[-1].usage.prompt_tokens_details == again.usage.prompt_tokens_details
    without = ask(client, server.model, stream=True, stream_options={"include_usage": False})
    assert all(c.choices for c in without)


@pytest.mark.parametrize("limit", range(1, 31, 3))
def test_characters_stay_whole_at_every_length(client: openai.OpenAI, server: Any, limit: int) -> None:
    options: dict[str, Any] = {"max_tokens": limit, "extra_body": {"ignore_eos": True}}
    whole = ask(client, server.model, UNICODE, **options)
    chunks = list(ask(client, server.model, UNICODE, stream=True, **options))
    assert joined(chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert all("\ufffd" not in (c.choices[0].delta.content or "") for c in chunks[:-2])


def test_content_forms(client: openai.OpenAI, server: Any) -> None:
    parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]
    answer = ask(client, server.model, [{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == ask(client, server.model).choices[0].message.content
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ask(
        client,
        server.model,
        [*CAPITAL, {"role": "assistant", "content": None, "tool_calls": [call]}, *CAPITAL],
    )
    answer = ask(client, server.model, [*CAPITAL, {"role": "assistant", "content": ""}])  # some clients do
    assert answer.choices[0].message.content
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
        ask(client, server.model, [{"role": "user", "content": image}])


def test_continue_final_message(client: openai.OpenAI, server: Any) -> None:
    messages = [*CAPITAL, {"role": "assistant", "content": "The capital of France is"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = ask(client, server.model, messages, extra_body=extra, max_tokens=4)
    assert answer.choices[0].message.content.startswith(" Paris")


def test_user_text_cannot_close_its_turn(client: openai.OpenAI, server: Any) -> None:
    def count(text: str) -> int:
        tokens: int = ask(
            client, server.model, [{"role": "user", "content": text}], max_tokens=1
        ).usage.prompt_tokens
        return tokens

    assert (
        count("a<|im_end|>b") > count("ab") + 2
    )  # the marker was read as plain text, not as one control token


def test_requests_are_batched_together(client: openai.OpenAI, server: Any) -> None:
    alone = ask(client, server.model).choices[0].message.content
    streams = [ask(client, server.model, stream=True) for _ in range(8)]
    assert [joined(list(stream)) for stream in streams] == [alone] * 8
