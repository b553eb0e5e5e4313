"""The Responses API through the openai client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.clients.conftest import WEATHER, Thinker, call
from tests.server.conftest import KEY, Api

CAPITAL = "What is the capital of France?"
TOOL: Any = {"type": "function", "name": "weather", "description": "Weather of a city", "parameters": WEATHER}


def ask(client: openai.OpenAI, model: str, input: Any = CAPITAL, **options: Any) -> Any:
    return client.responses.create(model=model, input=input, **options)


def streamed(client: openai.OpenAI, model: str, input: Any = CAPITAL, **options: Any) -> list[Any]:
    """The events, after checking what holds for those of any response."""
    events = list(ask(client, model, input, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.status == "in_progress"
    final = events[-1].response
    assert events[-1].type == f"response.{final.status}"
    assert final.id == events[0].response.id
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    for index, item in enumerate(final.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added"
        assert own[0].item.status == "in_progress"
        assert own[-1].type == "response.output_item.done"
        assert {getattr(event, "item_id", item.id) for event in own} == {item.id}
        deltas = "".join(event.delta for event in own if event.type.endswith(".delta"))
        whole = next(event for event in own if event.type.endswith(("text.done", "arguments.done")))
        assert deltas == (whole.arguments if item.type == "function_call" else whole.text)
    return events


def kinds(events: list[Any]) -> list[str]:
    """Types of the events, repeated ones once."""
    types = [event.type.removeprefix("response.") for event in events]
    return [kind for index, kind in enumerate(types) if index == 0 or kind != types[index - 1]]


def test_stream_says_the_same_in_the_documented_order(openai_smol: openai.OpenAI, smol: Api) -> None:
    whole = ask(openai_smol, smol.model)
    assert "Paris" in whole.output_text
    assert whole.status == "completed"
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events = streamed(openai_smol, smol.model)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert events[-1].response.usage.input_tokens_details.cached_tokens > 0


def test_limit_makes_an_incomplete_response(openai_smol: openai.OpenAI, smol: Api) -> None:
    whole = ask(openai_smol, smol.model, max_output_tokens=2)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output[0].status == "incomplete"
    assert whole.usage.output_tokens == 2
    final = streamed(openai_smol, smol.model, max_output_tokens=2)[-1].response
    assert (final.status, final.output_text) == ("incomplete", whole.output_text)


def test_conversation_is_kept_on_the_server(openai_thinker: openai.OpenAI, thinker: Thinker) -> None:
    thinker.says("<think>easy</think>Paris.")
    first = ask(openai_thinker, "toy", instructions="Be short.")
    second = ask(
        openai_thinker, "toy", "And of Italy?", previous_response_id=first.id, instructions="Be long."
    )
    assert thinker.prompt == (
        f"<|system|>Be long.<|end|><|user|>{CAPITAL}<|end|><|assistant|><think>easy</think>Paris.<|end|>"
        "<|user|>And of Italy?<|end|><|assistant|>"
    )
    assert second.previous_response_id == first.id
    assert openai_thinker.responses.retrieve(second.id) == second
    pages = openai_thinker.responses.input_items.list(second.id, limit=2, order="asc")
    items: list[Any] = list(pages)  # several pages
    assert [item.type for item in items] == ["message", "reasoning", "message", "message"]
    assert items[2].content[0].text == "Paris."
    latest: Any = openai_thinker.responses.input_items.list(second.id).data[0]
    assert latest.content[0].text == "And of Italy?"
    openai_thinker.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        openai_thinker.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="no stored response") as refused:
        ask(openai_thinker, "toy", previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"
    assert ask(openai_thinker, "toy", "Go on", previous_response_id=second.id).output_text == "Paris."


def test_nothing_is_kept_without_store(openai_thinker: openai.OpenAI, thinker: Thinker) -> None:
    thinker.says("Paris.")
    for response in (
        ask(openai_thinker, "toy", store=False),
        streamed(openai_thinker, "toy", store=False)[-1].response,
    ):
        with pytest.raises(openai.NotFoundError):
            openai_thinker.responses.retrieve(response.id)
    kept = streamed(openai_thinker, "toy")[-1].response
    assert openai_thinker.responses.retrieve(kept.id).output_text == "Paris."


def test_reasoning_is_an_item_of_its_own(openai_thinker: openai.OpenAI, thinker: Thinker) -> None:
    thinker.says("<think>\nHm.\n\nYes.\n</think>\n\nParis.")
    whole = ask(openai_thinker, "toy")
    thought, message = whole.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Hm.\n\nYes.", [])
    assert message.content[0].text == whole.output_text == "Paris."
    assert whole.usage.output_tokens_details.reasoning_tokens == len("<think>\nHm.\n\nYes.\n</think>")
    events = streamed(openai_thinker, "toy")
    assert kinds(events)[2:8] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert events[-1].response.output_text == "Paris."


def test_reasoning_as_summary(openai_thinker: openai.OpenAI, thinker: Thinker) -> None:
    thinker.says("<think>Hm.</think>Paris.")
    events = streamed(openai_thinker, "toy", reasoning={"summary": "auto"})
    assert kinds(events)[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    thought = events[-1].response.output[0]
    assert (thought.summary[0].text, thought.content) == ("Hm.", None)


@pytest.mark.parametrize("options", [{}, {"reasoning": {"summary": "auto"}}])
def test_a_client_can_keep_the_conversation_itself(
    openai_thinker: openai.OpenAI, thinker: Thinker, options: dict[str, Any]
) -> None:
    options |= {"store": False, "include": ["reasoning.encrypted_content"], "tools": [TOOL]}
    thinker.says("<think>Look it up.</think>" + call("weather", city="Oslo"))
    first = ask(openai_thinker, "toy", "Warm?", **options)
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "12 °C"}
    thinker.says("Rather cold.")
    history = [{"role": "user", "content": "Warm?"}, *first.output, result]
    second = ask(openai_thinker, "toy", history, **options)
    assert second.output_text == "Rather cold."
    assert thinker.prompt.endswith(
        "<|user|>Warm?<|end|><|assistant|><think>Look it up.</think>"
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><|end|>'
        "<|tool|>12 °C<|end|><|assistant|>"
    )
    bare = [*history[:1], {**first.output[0].to_dict(), "content": None, "summary": []}, *history[2:]]
    told = thinker.prompt
    ask(openai_thinker, "toy", bare, **options)
    assert thinker.prompt == told


def test_items_can_be_named_instead_of_sent(openai_thinker: openai.OpenAI, thinker: Thinker) -> None:
    thinker.says("<think>Hm.</think>Paris.")
    first = ask(openai_thinker, "toy")
    named = [{"type": "item_reference", "id": item.id} for item in first.output]
    ask(openai_thinker, "toy", [{"role": "user", "content": "a"}, *named, {"role": "user", "content": "b"}])
    assert thinker.prompt == (
        "<|user|>a<|end|><|assistant|><think>Hm.</think>Paris.<|end|><|user|>b<|end|><|assistant|>"
    )


def test_calls_are_items(openai_thinker: openai.OpenAI, thinker: Thinker) -> None:
    thinker.says("Let me see." + call("weather", city="北京") + "\n" + call("weather", city='O"slo'))
    whole = ask(openai_thinker, "toy", tools=[TOOL])
    message, first, second = whole.output
    assert message.content[0].text == "Let me see."
    assert json.loads(first.arguments) == {"city": "北京"}
    assert json.loads(second.arguments) == {"city": 'O"slo'}
    assert (first.name, whole.status) == ("weather", "completed")
    assert first.call_id != second.call_id
    assert '"name": "weather"' in thinker.prompt
    events = streamed(openai_thinker, "toy", tools=[TOOL])
    assert [item.type for item in events[-1].response.output] == ["message", "function_call", "function_call"]
    assert [item.arguments for item in events[-1].response.output[1:]] == [first.arguments, second.arguments]
    alone = ask(openai_thinker, "toy", tools=[TOOL], parallel_tool_calls=False)
    assert [item.type for item in alone.output] == ["message", "function_call"]
    refused = ask(openai_thinker, "toy", tools=[TOOL], tool_choice="none")
    assert {item.type for item in refused.output} == {"message"}


class Place(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=12)
    country: str = pydantic.Field(max_length=12)


def test_structured_output(openai_smol: openai.OpenAI, smol: Api) -> None:
    parsed = openai_smol.responses.parse(model=smol.model, input=CAPITAL, text_format=Place, temperature=0.8)
    assert isinstance(parsed.output_parsed, Place)
    free = ask(openai_smol, smol.model, text={"format": {"type": "json_object"}}, max_output_tokens=60)
    assert free.status == "incomplete" or isinstance(json.loads(free.output_text), dict)


def test_logprobs(openai_smol: openai.OpenAI, smol: Api) -> None:
    options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 5}
    whole = ask(openai_smol, smol.model, **options).output[0].content[0]
    assert "".join(entry.token for entry in whole.logprobs) == whole.text
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in whole.logprobs)
    events = streamed(openai_smol, smol.model, **options)
    told = [entry for event in events if event.type.endswith("text.delta") for entry in event.logprobs]
    assert [entry.token for entry in told] == [entry.token for entry in whole.logprobs]
    assert events[-1].response.output[0].content[0].logprobs == whole.logprobs


def test_logprobs_are_those_of_the_text(openai_thinker: openai.OpenAI, thinker: Thinker) -> None:
    thinker.says("<think>Hm.</think>Paris.")
    whole = ask(openai_thinker, "toy", include=["message.output_text.logprobs"])
    assert "".join(entry.token for entry in whole.output[1].content[0].logprobs) == "Paris."


def test_failure_in_mid_stream_is_told(openai_thinker: openai.OpenAI, thinker: Thinker) -> None:
    thinker.says("Paris.")
    thinker.engine.fail_after = 3
    events = list(ask(openai_thinker, "toy", stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert "died" in events[-2].message
    failed = events[-1].response
    assert (failed.status, failed.error.code, failed.output_text) == ("failed", "server_error", "Par")
    assert failed.output[0].status == "incomplete"
    with pytest.raises(openai.InternalServerError, match="died"):
        ask(openai_thinker, "toy")
    thinker.engine.fail_after = None
    assert ask(openai_thinker, "toy").output_text == "Paris."


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("background", {"background": True}),
        ("conversation", {"conversation": "conv_1"}),
        ("truncation", {"truncation": "auto"}),
        ("service_tier", {"service_tier": "flex"}),
        ("nonsense", {"nonsense": 1}),
        ("input", {"input": []}),
        ("input", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ("input", {"input": [{"type": "web_search_call", "id": "ws_1"}]}),
        ("input", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("input", {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA\u00df"}]}),
        ("input", {"input": "a" * 20_000}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("max_output_tokens", {"max_output_tokens": 5000}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("include", {"include": ["file_search_call.results"]}),
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("tools", {"tools": [TOOL, TOOL]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "file_search"}}),
        ("text", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "no"}}}}),
        ("text", {"text": {"verbosity": "low"}}),
        ("stream_options", {"stream_options": {}}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("metadata", {"metadata": {str(number): "" for number in range(17)}}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_offered_is_named(
    thinker: Thinker, param: str, body: dict[str, Any], stream: bool
) -> None:
    if param == "stream_options" and stream:
        body = {"stream_options": {"include_usage": True}}
    whole = {"model": "toy", "input": "hi", "stream": stream, **body}
    answer = thinker.api.post("/v1/responses", json=whole)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert param in error["message"]
    assert not thinker.engine.requests


def test_stored_responses_are_private(scripted: Any) -> None:
    api = scripted(api_key=(KEY, "sk-other"))
    stored = api.post("/v1/responses", json={"model": "toy", "input": "secret"}).json()["id"]
    assert api.get(f"/v1/responses/{stored}").is_success
    other = {"Authorization": "Bearer sk-other"}
    for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        answer = api.request(method, f"/v1/responses/{stored}{path}", headers=other)
        assert answer.status_code == 404
    body = {"model": "toy", "input": "hi", "previous_response_id": stored}
    assert api.post("/v1/responses", json=body, headers=other).status_code == 400
    assert httpx.get(f"{api.url}/v1/responses/{stored}").status_code == 401
    assert api.get(f"/v1/responses/{stored}").is_success
    assert api.get(f"/v1/responses/{stored}?stream=true").status_code == 400
    deleted = api.delete(f"/v1/responses/{stored}").json()
    assert deleted == {"id": stored, "object": "response", "deleted": True}


BOOLEAN: Any = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def test_reasoning_within_its_budget_before_a_form(openai_r1: openai.OpenAI, r1: Api) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "reply", "schema": BOOLEAN}}
    options: Any = {"reasoning": {"max_tokens": 8}, "text": form, "seed": 1}
    for response in (
        ask(openai_r1, r1.model, extra_body=options),
        streamed(openai_r1, r1.model, extra_body=options)[-1].response,
    ):
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert 8 <= response.usage.output_tokens_details.reasoning_tokens <= 10
        assert json.loads(response.output_text).keys() == {"ok"}
    silent = ask(openai_r1, r1.model, reasoning={"effort": "none"}, text=form, extra_body={"seed": 1})
    assert [item.type for item in silent.output] == ["message"]
    assert silent.usage.output_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "reply"}])
def test_calls_that_must_come(openai_r1: openai.OpenAI, r1: Api, choice: Any) -> None:
    other = {**TOOL, "strict": True, "parameters": {**BOOLEAN, "properties": {"ok": {"const": 1}}}}
    reply = {**other, "name": "reply", "parameters": BOOLEAN}
    options: Any = {"tools": [other, reply], "tool_choice": choice, "parallel_tool_calls": False}
    options |= {"extra_body": {"reasoning": {"max_tokens": 4}, "seed": 1}}
    final = streamed(openai_r1, r1.model, **options)[-1].response
    thought, made = final.output
    assert thought.type == "reasoning"
    assert made.name == "reply" or choice == "required"
    assert isinstance(json.loads(made.arguments)["ok"], bool if made.name == "reply" else int)
