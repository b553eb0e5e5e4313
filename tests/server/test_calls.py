"""Tool calls that a grammar enforces: tool_choice, strict functions, a form of the answer beside tools."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from llguidance import LLMatcher

from tests.server.conftest import Api, Start
from tests.server.scripted import ScriptedEngine, byte_tokenizer
from tests.server.test_tools import both
from treadle.engine.vocabulary import index, matcher
from treadle.server.service import Served
from treadle.server.text import ModelText
from treadle.text.reasoning import split_reasoning
from treadle.text.tokenizer import Tokenizer
from treadle.text.tools import ToolFormat, ToolParser

ASK: list[Any] = [{"role": "user", "content": "How warm is it in Oslo?"}]
PLACE = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "北京"]},
        "day": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = PLACE, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS: list[Any] = [tool("temperature"), tool("rain", None)]


def conforms(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "temperature":
        jsonschema.validate(arguments, PLACE)
    else:
        assert (call.function.name, arguments) == ("rain", {})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", named("temperature"), named("rain")])
def test_a_call_is_made_whenever_it_is_required(
    client: openai.OpenAI, server: Api, choice: Any, seed: int
) -> None:
    options: Any = {
        "messages": ASK, "tools": TOOLS, "tool_choice": choice, "temperature": 1.5, "seed": seed,
        "max_tokens": 300,
    }  # fmt: skip
    whole = client.chat.completions.create(model=server.model, **options).choices[0]
    calls = whole.message.tool_calls or []
    assert calls
    assert whole.message.content is None
    if whole.finish_reason == "tool_calls":
        for call in calls:
            conforms(call)
    if isinstance(choice, dict):
        assert [call.function.name for call in calls] == [choice["function"]["name"]]
        assert whole.finish_reason == "tool_calls"
    joined: list[str] = []
    for chunk in client.chat.completions.create(model=server.model, stream=True, **options):
        for piece in chunk.choices[0].delta.tool_calls or []:
            joined += [""] * (piece.index + 1 - len(joined))
            joined[piece.index] += piece.function.arguments
    assert joined == [call.function.arguments for call in calls]


def test_one_call_only_without_parallel_calls(client: openai.OpenAI, server: Api) -> None:
    answer = client.chat.completions.create(
        model=server.model,
        messages=ASK,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1.5,
        seed=2,
    )
    assert len(answer.choices[0].message.tool_calls or []) == 1


def test_a_form_of_the_answer_beside_tools(client: openai.OpenAI, server: Api) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    form = {"name": "n", "schema": {**schema, "additionalProperties": False}}
    options: Any = {
        "messages": ASK,
        "tools": [tool("temperature")],
        "response_format": {"type": "json_schema", "json_schema": form},
        "temperature": 1.5,
    }
    for seed in range(4):
        answer = client.chat.completions.create(model=server.model, seed=seed, **options)
        message = answer.choices[0].message
        if message.tool_calls:
            conforms(message.tool_calls[0])
        else:
            jsonschema.validate(json.loads(message.content), schema)


FORMATS = {
    "hermes": ("<tool_call> {{ tools | tojson }}", ["<tool_call>", "</tool_call>"]),
    "hermes without tokens": ("<tool_call> {{ tools | tojson }}", []),
    "deepseek": (
        "<｜tool▁call▁begin｜> {{ tools | tojson }}",
        [
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ],
    ),
    "deepseek without tokens": ("<｜tool▁call▁begin｜> {{ tools | tojson }}", []),
    "llama 3": ("<|start_header_id|> parameters {{ tools | tojson }}", ["<|python_tag|>"]),
    "mistral": ("[TOOL_CALLS] {{ tools | tojson }}", ["[TOOL_CALLS]"]),
    "mistral with arguments apart": ("[TOOL_CALLS] {{ tools | tojson }}", ["[TOOL_CALLS]", "[ARGS]"]),
}


def serve(scripted: Start, directory: Path, form: str) -> tuple[Api, ScriptedEngine, Tokenizer]:
    template, marks = FORMATS[form]
    template += "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = byte_tokenizer(directory, template, ["<|end|>", *marks])
    engine = ScriptedEngine()
    engine.token_ids = tokenizer.encode("x")

    async def load() -> Served:
        return Served(name="toy", text=ModelText(tokenizer), engine=engine, context=2048)

    api = scripted(load=load)
    while api.get("/health").status_code == 503:
        pass
    return api, engine, tokenizer


def walk(follow: LLMatcher, tokenizer: Tokenizer, source: random.Random, bias: str) -> str:
    """A random answer that the grammar allows. ``bias``: characters that are never chosen if others are
    allowed."""
    avoided = set(tokenizer.encode(bias))
    ids: list[int] = []
    while len(ids) < 3000:
        mask = np.frombuffer(follow.compute_bitmask(), np.uint8)
        allowed = set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())
        if allowed & tokenizer.eos_ids and (len(ids) > 200 or source.random() < 0.3):
            break
        allowed -= tokenizer.eos_ids
        if not allowed:
            break
        ids.append(source.choice(sorted(allowed - avoided or allowed)))
        follow.consume_token(ids[-1])
    return tokenizer.decode(ids, skip_specials=False)


def parsed(format: ToolFormat, text: str) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(format)
    content, calls = "", []
    for part in parser.push(text) + parser.finish():
        if isinstance(part, str):
            content += part
            continue
        if part.name is not None:
            calls.append([part.name, ""])
        calls[part.index][1] += part.arguments
    return content, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("form", FORMATS)
def test_whatever_the_grammar_allows_is_read_as_calls(scripted: Start, tmp_path: Path, form: str) -> None:
    api, engine, tokenizer = serve(scripted, tmp_path, form)
    body = {"model": "toy", "messages": ASK, "tools": TOOLS, "tool_choice": "required"}
    answer = api.post("/v1/chat/completions", json=body)
    assert answer.is_success, answer.text
    grammar = engine.requests[-1].params.grammar
    assert grammar is not None
    format = ModelText(tokenizer).tools
    assert format is not None
    tokens = index(tokenizer, tokenizer.vocab_size)
    several = 0
    for seed in range(12):
        text = walk(matcher(tokens, grammar), tokenizer, random.Random(seed), " \t\r\n")
        content, calls = parsed(format, text)
        assert not content.strip()
        assert calls
        several += len(calls) > 1
        for name, arguments in calls:
            assert json.loads(arguments) == {} if name == "rain" else name == "temperature"
            if name == "temperature":
                jsonschema.validate(json.loads(arguments), PLACE)
    assert several


@pytest.mark.parametrize("form", FORMATS)
def test_strict_functions_hold_wherever_they_are_called(scripted: Start, tmp_path: Path, form: str) -> None:
    api, engine, tokenizer = serve(scripted, tmp_path, form)
    body = {"model": "toy", "messages": ASK, "tools": [tool("temperature", strict=True)]}
    assert api.post("/v1/chat/completions", json=body).is_success
    grammar = engine.requests[-1].params.grammar
    assert grammar is not None
    tokens = index(tokenizer, tokenizer.vocab_size)
    free = matcher(tokens, grammar)
    words = tokenizer.encode("It is warm.")
    assert free.validate_tokens(words) == len(words)
    format = ModelText(tokenizer).tools
    lead = "" if format is ToolFormat.LLAMA3 else "I look. "
    good, bad = (
        written(format, form, {"city": "Oslo"}),
        written(format, form, {"city": "Bergen"}),
    )
    for text, fits in ((lead + good, True), (lead + bad, False)):
        ids = tokenizer.encode(text, specials=True)
        assert (matcher(tokens, grammar).validate_tokens(ids) == len(ids)) is fits, text
    follow = matcher(tokens, grammar)
    follow.consume_tokens(tokenizer.encode(lead + good, specials=True))
    assert follow.is_accepting()


def written(format: ToolFormat | None, form: str, arguments: Any) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    match format:
        case ToolFormat.HERMES:
            return f'<tool_call>\n{{"name": "temperature", "arguments": {text}}}\n</tool_call>'
        case ToolFormat.DEEPSEEK:
            call = f"function<｜tool▁sep｜>temperature\n```json\n{text}\n```<｜tool▁call▁end｜>"
            return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁calls▁end｜>"
        case ToolFormat.LLAMA3:
            return f'{{"name": "temperature", "parameters": {text}}}'
        case _ if "apart" in form:
            return f"[TOOL_CALLS]temperature[ARGS]{text}"
        case _:
            return f'[TOOL_CALLS][{{"name": "temperature", "arguments": {text}}}]'


@pytest.mark.parametrize("form", FORMATS)
def test_calls_of_every_format_are_streamed_in_pieces(scripted: Start, tmp_path: Path, form: str) -> None:
    api, engine, tokenizer = serve(scripted, tmp_path, form)
    format = ModelText(tokenizer).tools
    given: list[Any] = [{"city": 'a "b" \\ } 北京', "more": [{"x": [1, None]}, "</tool_call>"]}, {}]
    texts = [written(format, form, arguments) for arguments in given]
    match format:
        case ToolFormat.LLAMA3:
            text = "; ".join(texts)
        case ToolFormat.DEEPSEEK:
            text = texts[0].removesuffix("<｜tool▁calls▁end｜>") + texts[1].removeprefix(
                "<｜tool▁calls▁begin｜>"
            )
        case ToolFormat.MISTRAL if "apart" not in form:
            text = texts[0].removesuffix("]") + ", " + texts[1].removeprefix("[TOOL_CALLS][")
        case _:
            text = "\n".join(texts)
    engine.token_ids = tokenizer.encode(text, specials=True)
    choice = both(api, messages=ASK, tools=TOOLS)
    calls = choice.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == given
    assert len({call.id for call in calls}) == 2
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")


def test_calls_are_free_unless_something_must_be_enforced(scripted: Start, tmp_path: Path) -> None:
    api, engine, _ = serve(scripted, tmp_path, "hermes")
    for more in ({}, {"tool_choice": "auto"}, {"tool_choice": "none", "tools": [tool("f", strict=True)]}):
        body = {"model": "toy", "messages": ASK, "tools": [tool("f")], **more}
        assert api.post("/v1/chat/completions", json=body).is_success
        assert engine.requests[-1].params.grammar is None


@pytest.mark.parametrize(
    ("param", "more"),
    [
        ("tool_choice", {"tool_choice": named("missing")}),
        ("tool_choice", {"tool_choice": {"type": "function"}}),
        ("tool_choice", {"tool_choice": "any"}),
        ("tools", {"tools": [tool("f", {"type": "not-a-type"}, strict=True)]}),
        ("tools", {"tools": [tool("f", {"properties": {"a": {"not": {}}}}, strict=True)]}),
        ("tools", {"tools": [tool("f", {"$ref": "http://127.0.0.1:9/a.json"}, strict=True)]}),
        ("ignore_eos", {"tool_choice": "required", "ignore_eos": True}),
        ("min_tokens", {"tools": [tool("f", strict=True)], "min_tokens": 2}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_refused(
    scripted: Start, tmp_path: Path, param: str, more: dict[str, Any], stream: bool
) -> None:
    api, engine, _ = serve(scripted, tmp_path, "hermes")
    body = {"model": "toy", "messages": ASK, "tools": TOOLS, "stream": stream, **more}
    answer = api.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not engine.requests


def test_a_schema_that_is_not_strict_is_followed_as_far_as_possible(scripted: Start, tmp_path: Path) -> None:
    api, engine, tokenizer = serve(scripted, tmp_path, "hermes")
    odd = {"properties": {"a": {"type": "integer", "not": {"const": 3}}}, "required": ["a"]}
    for schema, others in ((odd, ['{"a": "x"}']), ({"type": "not-a-type"}, [])):
        body = {"model": "toy", "messages": ASK, "tools": [tool("f", schema)], "tool_choice": "required"}
        assert api.post("/v1/chat/completions", json=body).is_success
        grammar = engine.requests[-1].params.grammar
        assert grammar is not None
        tokens = index(tokenizer, tokenizer.vocab_size)
        for arguments in ('{"a": 1}', *others):
            text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
            ids = tokenizer.encode(text, specials=True)
            assert (matcher(tokens, grammar).validate_tokens(ids) == len(ids)) is (arguments not in others)


def test_calls_come_after_the_reasoning() -> None:
    reasoning, content = split_reasoning("a</think>\n\n<tool_call>x", started=True)
    assert (reasoning, content) == ("a", "<tool_call>x")
