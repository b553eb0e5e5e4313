"""Tool calls are the same in all three APIs, whole and streamed, however the text came."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from tests.clients.conftest import WEATHER, Thinker, call
from tests.server.conftest import Api

Item = str | tuple[str, str]  # a text, or name and arguments of a call
ASK: list[Any] = [{"role": "user", "content": "How warm is it?"}]
OSLO, ROME = '{"city": "Oslo"}', '{"city": "Rome"}'
ONE, TWO = call("weather", city="Oslo"), call("weather", city="Rome")


class Clients(NamedTuple):
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    model: str


@pytest.fixture
def toy(openai_thinker: openai.OpenAI, anthropic_thinker: anthropic.Anthropic, thinker: Thinker) -> Clients:
    return Clients(openai_thinker, anthropic_thinker, thinker.name)


@pytest.fixture
def real(openai_smol: openai.OpenAI, anthropic_smol: anthropic.Anthropic, smol: Api) -> Clients:
    return Clients(openai_smol, anthropic_smol, smol.model)


def chat(clients: Clients, tools: dict[str, Any], **options: Any) -> tuple[str, list[tuple[str, str]], Any]:
    """Content, calls and finish_reason, after checking that the stream says the same."""
    functions = [
        {"type": "function", "function": {"name": name, "parameters": tools[name]}} for name in tools
    ]
    create: Any = clients.openai.chat.completions.create
    options = {"model": clients.model, "messages": ASK, "tools": functions, **options}
    choice = create(**options).choices[0]
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
    content, reason = "", None
    streamed: list[list[str]] = []
    for chunk in create(stream=True, **options):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        content += delta.content or ""
        for piece in delta.tool_calls or []:
            if piece.index == len(streamed):
                streamed.append([piece.function.name, ""])
            streamed[piece.index][1] += piece.function.arguments
    assert (content, [(name, arguments) for name, arguments in streamed], reason) == (
        choice.message.content or "",
        calls,
        choice.finish_reason,
    )
    return content, calls, reason


def message(clients: Clients, tools: dict[str, Any], **options: Any) -> tuple[list[Item], Any]:
    """What a message consists of, and the message, after checking that the stream says the same."""
    given: Any = [{"name": name, "input_schema": tools[name]} for name in tools]
    options = {"model": clients.model, "messages": ASK, "tools": given, "max_tokens": 4000, **options}
    whole = clients.anthropic.messages.create(**options)
    items: list[Item] = []
    stop: Any = None
    for event in clients.anthropic.messages.create(stream=True, **options):
        if event.type == "content_block_start":
            items.append("" if event.content_block.type == "text" else (event.content_block.name, ""))
        elif event.type == "content_block_delta":
            assert event.index == len(items) - 1
            last = items[-1]
            if isinstance(last, str):
                items[-1] = last + event.delta.text
            else:
                items[-1] = (last[0], last[1] + event.delta.partial_json)
        elif event.type == "message_delta":
            stop = event.delta
    assert (stop.stop_reason, stop.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert len(items) == len(whole.content)
    for item, block in zip(items, whole.content, strict=True):
        if block.type == "text":
            assert item == block.text
        else:
            assert not isinstance(item, str)
            name, arguments = item
            shown = block.input.get("INVALID_JSON")
            assert (name, arguments) == (block.name, arguments if shown is None else shown)
            if shown is None:
                assert json.loads(arguments) == block.input
    return items, whole


def response(clients: Clients, tools: dict[str, Any], **options: Any) -> tuple[list[Item], Any]:
    """What a response consists of, and the response, after checking that the stream says the same."""
    given: Any = [{"type": "function", "name": name, "parameters": tools[name]} for name in tools]
    options = {"model": clients.model, "input": ASK, "tools": given, **options}

    def of(output: list[Any]) -> list[Item]:
        return [
            (item.name, item.arguments) if item.type == "function_call" else item.content[0].text
            for item in output
            if item.type != "reasoning"
        ]

    whole = clients.openai.responses.create(**options)
    deltas: dict[int, str] = {}
    for event in clients.openai.responses.create(stream=True, **options):
        if event.type.endswith(".delta"):
            deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
    final = event.response
    assert of(final.output) == of(whole.output)
    assert [item.status for item in final.output] == [item.status for item in whole.output]
    for index, item in enumerate(final.output):
        if item.type == "function_call":
            assert deltas.get(index, "") == item.arguments
    return of(whole.output), whole


def same(items: list[Item], content: str, calls: list[tuple[str, str]]) -> bool:
    texts = "".join(item for item in items if isinstance(item, str))
    return texts == content and [item for item in items if not isinstance(item, str)] == calls


@pytest.mark.parametrize(
    "never",
    [[], ['"}}\n</tool_call> never'], ["<never", "}}\n</tool_call>\n<tool_call>\nnever", "I see. <never"]],
)
@pytest.mark.parametrize(
    ("text", "items"),
    [
        (ONE, [("weather", OSLO)]),
        ("I look. " + ONE, ["I look. ", ("weather", OSLO)]),
        (ONE + " I see.", [("weather", OSLO), " I see."]),
        ("I look. " + ONE + TWO + " I see.", ["I look. ", ("weather", OSLO), ("weather", ROME), " I see."]),
        (ONE + "\n" + TWO, [("weather", OSLO), ("weather", ROME)]),
        (ONE + " I see. " + TWO, [("weather", OSLO), " I see. ", ("weather", ROME)]),
        (ONE + " I see. <tool_call>\nnone", [("weather", OSLO), " I see. <tool_call>\nnone"]),
    ],
)
def test_texts_and_calls(
    toy: Clients, thinker: Thinker, text: str, items: list[Item], never: list[str]
) -> None:
    thinker.says(text)
    content, calls, reason = chat(toy, {"weather": WEATHER}, stop=never or None)
    assert (same(items, content, calls), reason) == (True, "tool_calls")
    told = message(toy, {"weather": WEATHER}, stop_sequences=never)
    assert (told[0], told[1].stop_reason, told[1].stop_sequence) == (items, "tool_use", None)
    if not never:
        answered = response(toy, {"weather": WEATHER})
        assert (answered[0], answered[1].status) == (items, "completed")


@pytest.mark.parametrize("at", [3, 30, 50, *range(56, 66), 80, 100, 115])
def test_cut_by_the_limit(toy: Clients, thinker: Thinker, at: int) -> None:
    thinker.says("Well. " + ONE + "\n" + TWO + " I see.")
    content, calls, reason = chat(toy, {"weather": WEATHER}, max_tokens=at)
    assert reason == "length"
    told = message(toy, {"weather": WEATHER}, max_tokens=at)
    assert (same(told[0], content, calls), told[1].stop_reason) == (True, "max_tokens")
    answered = response(toy, {"weather": WEATHER}, max_output_tokens=at)
    assert (answered[0], answered[1].status) == (told[0], "incomplete")


FIRST = ("weather", OSLO)


@pytest.mark.parametrize(
    ("stop", "items"),
    [
        ("Osl", [("weather", '{"city": "')]),  # in the first call
        ('o"}', [("weather", '{"city": "Osl')]),
        ("Rome", [FIRST, ("weather", '{"city": "')]),  # in the second
        ("{", ["<tool_call>\n"]),  # before the name is known
    ],
)
def test_a_stop_string_inside_a_call(toy: Clients, thinker: Thinker, stop: str, items: list[Item]) -> None:
    thinker.says(ONE + "\n" + TWO + " I see.")
    content, calls, reason = chat(toy, {"weather": WEATHER}, stop=stop)
    assert (same(items, content, calls), reason) == (True, "stop")
    told, whole = message(toy, {"weather": WEATHER}, stop_sequences=[stop])
    assert (told, whole.stop_reason, whole.stop_sequence) == (items, "stop_sequence", stop)


@pytest.mark.parametrize(
    ("stop", "items"),
    [
        ("</tool_call>", [FIRST]),
        ("call>\n<", [FIRST]),
        ("}\n", [FIRST]),
        ("see", [FIRST, ("weather", ROME), " I "]),
    ],
)
def test_a_stop_string_after_complete_calls(
    toy: Clients, thinker: Thinker, stop: str, items: list[Item]
) -> None:
    thinker.says(ONE + "\n" + TWO + " I see.")
    content, calls, reason = chat(toy, {"weather": WEATHER}, stop=stop)
    assert (same(items, content, calls), reason) == (True, "tool_calls")
    told, whole = message(toy, {"weather": WEATHER}, stop_sequences=[stop])
    assert (told, whole.stop_reason, whole.stop_sequence) == (items, "tool_use", None)


def test_a_model_that_ends_inside_a_call(toy: Clients, thinker: Thinker) -> None:
    thinker.says(ONE + TWO[: TWO.rindex("me")])
    items: list[Item] = [FIRST, ("weather", '{"city": "Ro')]
    content, calls, reason = chat(toy, {"weather": WEATHER})
    assert (same(items, content, calls), reason) == (True, "stop")
    told, whole = message(toy, {"weather": WEATHER})
    assert (told, whole.stop_reason) == (items, "end_turn")
    told, answered = response(toy, {"weather": WEATHER})
    assert (told, answered.status, answered.incomplete_details) == (items, "incomplete", None)
    assert [item.status for item in answered.output] == ["completed", "incomplete"]


def test_only_what_is_cut_is_incomplete(toy: Clients, thinker: Thinker) -> None:
    limit = thinker.says(ONE)
    thinker.says(ONE + " I see.")
    statuses = {}
    for tokens in (limit - 5, limit - 1, limit, limit + 2):
        _, answered = response(toy, {"weather": WEATHER}, max_output_tokens=tokens)
        assert (answered.status, answered.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        statuses[tokens - limit] = [item.status for item in answered.output]
    assert statuses == {
        -5: ["incomplete"],
        -1: ["completed"],
        0: ["completed"],
        2: ["completed", "incomplete"],
    }


@pytest.mark.parametrize("limit", [20, 40, 50, 100])
def test_a_real_model_that_must_call(real: Clients, limit: int) -> None:
    tools = {"weather": WEATHER, "time": WEATHER}
    content, calls, reason = chat(real, tools, tool_choice="required", max_tokens=limit)
    told = message(real, tools, tool_choice={"type": "any"}, max_tokens=limit)
    answered = response(real, tools, tool_choice="required", max_output_tokens=limit)
    assert same(told[0], content, calls)
    assert answered[0] == told[0]
    if reason == "tool_calls":
        assert all(json.loads(arguments).keys() == {"city"} for _, arguments in calls)
