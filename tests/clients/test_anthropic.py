"""The Messages API through the anthropic client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from tests.clients.conftest import WEATHER, Thinker, call
from tests.server.conftest import KEY, Api
from tests.server.scripted import ScriptedEngine

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {"name": "weather", "description": "Weather of a city", "input_schema": WEATHER}
THINK: Any = {"type": "adaptive"}


def ask(client: anthropic.Anthropic, model: str, messages: Any = CAPITAL, **options: Any) -> Any:
    return client.messages.create(model=model, messages=messages, **{"max_tokens": 200, **options})


def both(client: anthropic.Anthropic, model: str, messages: Any = CAPITAL, **options: Any) -> Any:
    """The message, after checking that its stream says the same, with well-formed events."""
    options = {"max_tokens": 200, **options}
    whole = ask(client, model, messages, **options)
    with client.messages.stream(model=model, messages=messages, **options) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    if whole.stop_reason != "tool_use":  # where tokens after the last call count if they came with it
        assert streamed.usage.output_tokens == whole.usage.output_tokens
    same = [{**block.to_dict(), "id": None} for block in whole.content]
    assert [{**block.to_dict(), "id": None, "parsed_output": None} for block in streamed.content] == [
        {**block, "parsed_output": None} for block in same
    ]
    raw = list(client.messages.create(model=model, messages=messages, stream=True, **options))
    types = [event.type for event in raw]
    assert types[0] == "message_start"
    assert types[-2:] == ["message_delta", "message_stop"]
    assert types.count("message_delta") == 1
    open_block = None
    for event in raw[1:-2]:
        if event.type == "content_block_start":
            assert open_block is None
            open_block = event.index
        assert event.index == open_block
        if event.type == "content_block_stop":
            open_block = None
    return whole


def test_stream_says_the_same_as_the_message(anthropic_smol: anthropic.Anthropic, smol: Api) -> None:
    message = both(anthropic_smol, smol.model, system="Be short.")
    assert "Paris" in message.content[0].text
    assert (message.role, message.type, message.stop_reason) == ("assistant", "message", "end_turn")
    assert message.model == smol.model
    assert message._request_id


def test_stop_reasons(anthropic_smol: anthropic.Anthropic, smol: Api) -> None:
    assert both(anthropic_smol, smol.model, max_tokens=2).stop_reason == "max_tokens"
    stopped = both(anthropic_smol, smol.model, stop_sequences=["Paris"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in stopped.content[0].text


def test_max_tokens_may_be_more_than_there_is_room_for(
    anthropic_thinker: anthropic.Anthropic, thinker: Thinker
) -> None:
    assert ask(anthropic_thinker, "toy", max_tokens=20_000).stop_reason == "end_turn"
    assert thinker.engine.requests[0].params.max_tokens == 4096 - len(thinker.engine.requests[0].prompt_ids)
    thinker.says("x" * 5000)
    assert ask(anthropic_thinker, "toy", max_tokens=20_000).stop_reason == "model_context_window_exceeded"


def test_counted_tokens_are_those_of_the_message(anthropic_smol: anthropic.Anthropic, smol: Api) -> None:
    prompt: Any = {
        "model": smol.model,
        "messages": CAPITAL,
        "system": [{"type": "text", "text": "Be short."}],
    }
    counted = anthropic_smol.messages.count_tokens(**prompt)
    usage = anthropic_smol.messages.create(**prompt, max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    again = anthropic_smol.messages.create(**prompt, max_tokens=1).usage
    assert counted.input_tokens == again.input_tokens + (again.cache_read_input_tokens or 0)


def test_conversation(anthropic_thinker: anthropic.Anthropic, thinker: Thinker) -> None:
    system = [
        {"type": "text", "text": "One.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Two."},
    ]
    parts = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
    ]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": [{"type": "text", "text": "Three."}]},
        {"role": "user", "content": "d"},
    ]
    ask(anthropic_thinker, "toy", messages, system=system)
    assert thinker.prompt == (
        "<|system|>One.\n\nTwo.<|end|><|user|>a\n\nb<|end|><|assistant|>c<|end|><|system|>Three.<|end|><|user|>d<|end|><|assistant|>"
    )


def test_an_answer_can_be_begun(anthropic_thinker: anthropic.Anthropic, thinker: Thinker) -> None:
    thinker.says(" Paris.")
    message = ask(anthropic_thinker, "toy", [*CAPITAL, {"role": "assistant", "content": "It is"}])
    assert message.content[0].text == " Paris."
    assert thinker.prompt.endswith("<|assistant|>It is")


def test_thinking_comes_in_blocks_of_its_own(
    anthropic_thinker: anthropic.Anthropic, thinker: Thinker
) -> None:
    thinker.says("<think>\nHm.\n\nYes.\n</think>\n\nParis.")
    message = both(anthropic_thinker, "toy", thinking=THINK)
    thought, text = message.content
    assert (thought.type, thought.thinking) == ("thinking", "Hm.\n\nYes.")
    assert thought.signature
    assert (text.type, text.text) == ("text", "Paris.")
    assert message.usage.output_tokens_details.thinking_tokens == len("<think>\nHm.\n\nYes.\n</think>")
    follow_up = [
        *CAPITAL,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": "Sure?"},
    ]
    ask(anthropic_thinker, "toy", follow_up, thinking=THINK)
    assert "<|assistant|><think>Hm.\n\nYes.</think>Paris.<|end|><|user|>Sure?" in thinker.prompt


def test_thinking_is_left_out_unless_asked_for(
    anthropic_thinker: anthropic.Anthropic, thinker: Thinker
) -> None:
    thinker.says("<think>Hm.</think>Paris.")
    message = both(anthropic_thinker, "toy")
    assert [block.type for block in message.content] == ["text"]
    assert message.usage.output_tokens_details.thinking_tokens == len("<think>Hm.</think>")
    hidden = both(anthropic_thinker, "toy", thinking={**THINK, "display": "omitted"})
    assert (hidden.content[0].thinking, hidden.content[1].text) == ("", "Paris.")


def test_tools(anthropic_thinker: anthropic.Anthropic, thinker: Thinker) -> None:
    thinker.says(
        "<think>Look.</think>Let me see." + call("weather", city="北京") + call("weather", city='O"slo')
    )
    message = both(anthropic_thinker, "toy", tools=[TOOL], thinking=THINK)
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    first, second = message.content[2:]
    assert (first.name, first.input, second.input) == ("weather", {"city": "北京"}, {"city": 'O"slo'})
    results = [
        {"type": "tool_result", "tool_use_id": first.id, "content": "5 °C"},
        {
            "type": "tool_result",
            "tool_use_id": second.id,
            "is_error": True,
            "content": [{"type": "text", "text": "?"}],
        },
        {"type": "text", "text": "Well?"},
    ]
    history = [
        *CAPITAL,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    ask(anthropic_thinker, "toy", history, tools=[TOOL], thinking=THINK)
    calls = '<tool_call>{"name": "weather", "arguments": {"city": "北京"}}</tool_call>'
    assert f"<|assistant|><think>Look.</think>Let me see.{calls}" in thinker.prompt
    assert thinker.prompt.endswith(
        "<|tool|>5 °C<|end|><|tool|>Error: ?<|end|><|user|>Well?<|end|><|assistant|>"
    )
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(anthropic_thinker, "toy", tools=[TOOL], tool_choice=one).content) == 2
    ask(anthropic_thinker, "toy", tools=[TOOL], tool_choice={"type": "none"})
    assert "weather" not in thinker.prompt


def test_input_that_is_no_object_is_shown_as_it_is(
    anthropic_thinker: anthropic.Anthropic, thinker: Thinker
) -> None:
    thinker.says(call("weather", city="Oslo"))
    cut = ask(anthropic_thinker, "toy", tools=[TOOL], max_tokens=45)
    assert cut.stop_reason == "max_tokens"
    (raw,) = cut.content[-1].input.values()
    assert '{"city": "Oslo"}'.startswith(raw)


def test_structured_output(anthropic_smol: anthropic.Anthropic, smol: Api) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = both(anthropic_smol, smol.model, output_config=config)
    assert json.loads(message.content[0].text).keys() == {"city"}


def test_failure_in_mid_stream_is_told(anthropic_thinker: anthropic.Anthropic, thinker: Thinker) -> None:
    thinker.engine.fail_after = 3
    got = ""
    with pytest.raises(anthropic.APIStatusError, match="died") as failed:
        for event in ask(anthropic_thinker, "toy", stream=True):
            got += event.delta.text if event.type == "content_block_delta" else ""
    assert got == "Hel"
    assert failed.value.body == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine process died"},
    }
    with pytest.raises(anthropic.InternalServerError, match="died"):
        ask(anthropic_thinker, "toy")
    thinker.engine.fail_after = None
    assert ask(anthropic_thinker, "toy").content[0].text == "Hello"


def test_pings_while_nothing_comes(scripted: Any) -> None:
    api = scripted(ScriptedEngine(first=0.3), keep_alive=0.05)
    body = {"model": "toy", "messages": CAPITAL, "max_tokens": 5, "stream": True}
    text = api.post("/v1/messages", json=body).text
    assert text.count('event: ping\ndata: {"type":"ping"}\n\n') > 2
    assert text.startswith("event: message_start\n")
    assert text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


def of(role: str, **block: Any) -> Any:
    return {"role": role, "content": [block]}


@pytest.mark.parametrize(
    ("word", "body"),
    [
        ("max_tokens", {"max_tokens": None}),
        ("container", {"container": "x"}),
        ("nonsense", {"nonsense": 1}),
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].content[0]", {"messages": [of("user", type="image")]}),
        ("messages[0].content[0]", {"messages": [of("user", type="thinking", thinking="", signature="")]}),
        ("messages", {"messages": [{"role": "user", "content": "a" * 20_000}]}),
        (
            "messages[1]",
            {"messages": [*CAPITAL, of("assistant", type="tool_use", id="a", name="b", input={})]},
        ),
        ("temperature", {"temperature": 1.5}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("tools[0]", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 100}}),
        ("thinking", {"thinking": {"type": "sometimes"}}),
        (
            "output_config.format",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_offered_is_named(thinker: Thinker, word: str, body: Any, stream: bool) -> None:
    whole = {"model": "toy", "messages": CAPITAL, "max_tokens": 50, "stream": stream, **body}
    answer = thinker.api.post(
        "/v1/messages", json={key: whole[key] for key in whole if whole[key] is not None}
    )
    error = answer.json()
    assert answer.status_code == 400
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(word)
    assert error["request_id"] == answer.headers["request-id"]
    assert not thinker.engine.requests


def test_every_refusal_has_the_shape_of_this_api(thinker: Thinker) -> None:
    body = {"model": "toy", "messages": CAPITAL, "max_tokens": 5}
    version = {"anthropic-version": "2023-06-01"}
    good = {"x-api-key": KEY, **version}
    url = thinker.url + "/v1/messages"
    large = json.dumps({**body, "system": "x" * 2**25})
    refused = [
        (httpx.post(url, json=body, headers=version), 401, "authentication_error"),
        (httpx.post(url, json=body, headers={**good, "x-api-key": "no"}), 401, "authentication_error"),
        (httpx.post(url, json={**body, "model": "no"}, headers=good), 404, "not_found_error"),
        (httpx.post(url + "/batches", json={}, headers=good), 404, "not_found_error"),
        (httpx.get(url, headers=good), 405, "invalid_request_error"),
        (httpx.post(url, content=large, headers=good), 413, "request_too_large"),
        (httpx.post(url, content=b"{", headers=good), 400, "invalid_request_error"),
        (
            httpx.post(url, json=body, headers={**good, "anthropic-version": "1"}),
            400,
            "invalid_request_error",
        ),
    ]
    for answer, status, kind in refused:
        error = answer.json()
        assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
        assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert httpx.post(url, json=body, headers=good).json()["content"][0]["text"] == "Hello"
    assert "error" in httpx.post(thinker.url + "/v1/chat/completions", json={}).json()


BOOLEAN: Any = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def test_thinking_within_its_budget(anthropic_r1: anthropic.Anthropic, r1: Api) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": BOOLEAN}}
    options: Any = {"output_config": config, "extra_body": {"temperature": 0}, "max_tokens": 300}
    message = both(anthropic_r1, r1.model, thinking={"type": "enabled", "budget_tokens": 8}, **options)
    thought, answer = message.content
    assert thought.type == "thinking"
    assert 8 <= message.usage.output_tokens_details.thinking_tokens <= 10
    assert json.loads(answer.text).keys() == {"ok"}
    silent = both(anthropic_r1, r1.model, thinking={"type": "disabled"}, **options)
    assert silent.usage.output_tokens_details.thinking_tokens == 0
    assert json.loads(silent.content[0].text).keys() == {"ok"}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "reply"}])
def test_tools_that_must_be_used(anthropic_r1: anthropic.Anthropic, r1: Api, choice: Any) -> None:
    tools: Any = [
        {**TOOL, "input_schema": BOOLEAN},
        {"name": "reply", "input_schema": BOOLEAN, "strict": True},
    ]
    choice = {**choice, "disable_parallel_tool_use": True}
    options: Any = {
        "tools": tools,
        "tool_choice": choice,
        "extra_body": {"temperature": 0},
        "max_tokens": 400,
    }
    message = both(anthropic_r1, r1.model, thinking={"type": "enabled", "budget_tokens": 4}, **options)
    thought, used = message.content
    assert (thought.type, used.type, message.stop_reason) == ("thinking", "tool_use", "tool_use")
    assert isinstance(used.input["ok"], bool)
    assert used.name == "reply" or choice["type"] == "any"


def test_a_model_that_does_not_reason_says_so(anthropic_smol: anthropic.Anthropic, smol: Api) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"thinking: \S+ does not reason"):
        ask(anthropic_smol, smol.model, thinking={"type": "enabled", "budget_tokens": 8})
    for harmless in ({"type": "disabled"}, {"type": "adaptive"}):
        assert ask(anthropic_smol, smol.model, thinking=harmless, max_tokens=4).content[0].type == "text"
