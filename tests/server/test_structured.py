"""Structured output of the real model, and what is refused. Cases D05, D07 and D08."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.server.conftest import Start
from tests.server.scripted import ByteText, ScriptedEngine, byte_tokenizer
from treadle.server.service import Served
from treadle.server.text import ModelText

ASK: list[Any] = [{"role": "user", "content": "Tell me about a place in a few words."}]
PATTERN = r"^(\d+|imap:[A-Za-z0-9_-]+)$"
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"enum": ["a", "b"]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "enum": {"enum": ["red", "green", "北京", 5, None]},
    "bounds": {
        "type": "object",
        "properties": {
            "two digits": {"type": "integer", "minimum": 10, "maximum": 99},
            "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "fives": {"type": "integer", "multipleOf": 5, "minimum": -20, "maximum": 20},
        },
        "required": ["two digits", "share", "fives"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "integer", "maximum": 1000}, "minItems": 2, "maxItems": 4},
    "nested": {
        "type": "object",
        "properties": {
            "城市": {"type": "string", "maxLength": 12},
            "size": {
                "type": "object",
                "properties": {"km": {"type": "number"}, "big": {"type": "boolean"}},
                "required": ["km", "big"],
                "additionalProperties": False,
            },
            "街道": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"名": {"type": "string", "maxLength": 6}, "種類": {"enum": ["路", "街"]}},
                    "required": ["名", "種類"],
                    "additionalProperties": False,
                },
                "minItems": 1,
                "maxItems": 2,
            },
        },
        "required": ["城市", "size", "街道"],
        "additionalProperties": False,
    },
    "recursive": TREE,
    "either": {"anyOf": [{"type": "null"}, {"type": "string", "minLength": 2, "maxLength": 8}]},
    "pattern": {"type": "string", "pattern": PATTERN},
    "pattern in items": {"type": "array", "items": {"type": "string", "pattern": PATTERN}, "maxItems": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string", "format": "date"}, {"type": ["boolean", "null"]}],
        "items": False,
        "minItems": 2,
    },
    "open object": {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": {"type": "integer"},
        "maxProperties": 2,
    },
}


def of_schema(schema: Any, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema, "strict": strict}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_conform_or_were_cut_off(client: openai.OpenAI, server: Any, name: str) -> None:
    """200 answers in all, which nothing but the schema keeps in form."""
    options: Any = {"response_format": of_schema(SCHEMAS[name]), "n": 20, "seed": 1, "max_tokens": 120}
    answer = client.chat.completions.create(model=server.model, messages=ASK, temperature=1.5, **options)
    reasons = [choice.finish_reason for choice in answer.choices]
    assert set(reasons) <= {"stop", "length"}
    assert "stop" in reasons
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            value = json.loads(choice.message.content or "")
            jsonschema.validate(value, SCHEMAS[name], format_checker=jsonschema.FormatChecker())
            if name.startswith("pattern"):
                assert all(
                    re.search(PATTERN, text) for text in ([value] if isinstance(value, str) else value)
                )


@pytest.mark.parametrize(
    ("field", "value", "form"),
    [
        ("guided_regex", "[A-Z]{3}-[0-9]{2}", "[A-Z]{3}-[0-9]{2}"),
        ("guided_choice", ["yes", "no", "也许"], "yes|no|也许"),
        ("guided_json", {"type": "boolean"}, "true|false"),
        ("guided_json", '{"type": "boolean"}', "true|false"),
        ("guided_grammar", 'root ::= "a" [0-9] "b"', "a[0-9]b"),
        ("structured_outputs", {"grammar": 'start: "x" /[0-9]{1,4}/ "y"'}, "x[0-9]{1,4}y"),
        ("structured_outputs", {"choice": ["left", "right"]}, "left|right"),
        ("structured_outputs", {"regex": "[01]{4}"}, "[01]{4}"),
        ("structured_outputs", {"json": {"const": "c"}}, '"c"'),
    ],
)
def test_forms_of_vllm(server: Any, field: str, value: Any, form: str) -> None:
    body = {"model": server.model, "temperature": 1.5, "max_tokens": 60, field: value}
    chat = server.post("/v1/chat/completions", json={**body, "messages": ASK}).json()["choices"][0]
    text = server.post("/v1/completions", json={**body, "prompt": "A place:"}).json()["choices"][0]
    for content in (chat["message"]["content"], text["text"]):
        assert re.fullmatch(form, content)
    assert chat["finish_reason"] == text["finish_reason"] == "stop"


def test_stream_says_the_same_and_json_object_is_one(client: openai.OpenAI, server: Any) -> None:
    options: Any = {"response_format": {"type": "json_object"}, "temperature": 0, "max_tokens": 60}
    whole = client.chat.completions.create(model=server.model, messages=ASK, **options).choices[0]
    stream = client.chat.completions.create(model=server.model, messages=ASK, stream=True, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.message.content
    assert text.startswith("{")
    assert whole.finish_reason == "length" or isinstance(json.loads(text), dict)


BAD_SCHEMAS: list[dict[str, Any]] = [
    {"type": "not-a-type"},
    {"type": "string", "pattern": r"^hello\!$"},
    {"type": "array", "items": {"properties": {"a": {"pattern": r"\!"}}}},
    {"$ref": "#/definitions/missing"},
    {"$ref": "http://127.0.0.1:9/schema.json"},
    {"type": "array", "minItems": 3, "maxItems": 2},
    {"not": {}},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("schema", BAD_SCHEMAS)
def test_bad_schemas_never_reach_the_engine(scripted: Start, schema: Any, stream: bool) -> None:
    engine = ScriptedEngine()
    api = scripted(engine)
    body = {"model": "toy", "messages": ASK, "stream": stream}
    for field, value in (
        ("response_format", of_schema(schema)),
        ("response_format", of_schema({**schema, "x-guidance": {"lenient": True}}, strict=False)),
        ("guided_json", schema),
        ("guided_json", json.dumps(schema)),
    ):
        answer = api.post("/v1/chat/completions", json={**body, field: value})
        assert answer.status_code == 400, (field, answer.text)
        error = answer.json()["error"]
        assert error["param"] == field
        assert len(error["message"]) > len(field) + 10
    assert not engine.requests


def test_keywords_that_cannot_be_enforced_are_named(scripted: Start) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True, "contains": {}}}}
    body = {"model": "toy", "messages": ASK, "guided_json": schema}
    answer = scripted(ScriptedEngine()).post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["message"] == "guided_json: not supported: contains, uniqueItems"


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("guided_regex", {"guided_regex": "(a"}),
        ("guided_choice", {"guided_choice": []}),
        ("guided_grammar", {"guided_grammar": ""}),
        ("guided_grammar", {"guided_grammar": "start: <|im_end|>"}),
        ("guided_json", {"guided_json": "{"}),
        ("guided_json", {"guided_json": "[1]"}),
        ("guided_json", {"guided_json": "[" * 10_000}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
        ("structured_outputs", {"structured_outputs": {"structural_tag": "x"}}),
        ("guided_regex", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("response_format", {"response_format": {"type": "grammar"}}),
        ("response_format", {"response_format": "json"}),
        ("ignore_eos", {"guided_regex": "a", "ignore_eos": True}),
        ("min_tokens", {"guided_regex": "a", "min_tokens": 3}),
    ],
)
def test_what_cannot_be_followed_is_named(scripted: Start, field: str, body: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    answer = scripted(engine).post("/v1/chat/completions", json={"model": "toy", "messages": ASK, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert not engine.requests


def test_property_names_and_values_are_no_patterns(scripted: Start) -> None:
    engine = ScriptedEngine()
    schema = {
        "properties": {"pattern": {"enum": [r"\!"]}, "enum": {"type": "string"}},
        "default": {"pattern": r"\!"},
    }
    body = {"model": "toy", "messages": ASK, "guided_json": schema}
    assert scripted(engine).post("/v1/chat/completions", json=body).is_success
    assert engine.requests[0].params.grammar


NAMES = [f"property_{number}" for number in range(4000)]


def strings(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"} for name in NAMES[:count]}, **more}


@pytest.mark.parametrize(
    "body",
    [
        {"guided_choice": NAMES},
        {"guided_choice": ["a::=b", "\"'\\\n", "<|im_end|>", "{}"]},
        {"guided_json": strings(500), "max_tokens": 20},
        {"guided_json": strings(500, required=NAMES[:500], additionalProperties=False), "max_tokens": 20},
        {"guided_json": {"enum": NAMES}},
    ],
)
def test_large_grammars_are_followed(server: Any, body: dict[str, Any]) -> None:
    answer = server.post(
        "/v1/completions", json={"model": server.model, "prompt": "A:", "max_tokens": 60, **body}
    )
    assert answer.is_success, answer.text
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "stop" and "guided_choice" in body:
        assert choice["text"] in body["guided_choice"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("guided_json", strings(3000), "too large"),
        ("guided_json", {"enum": ["secret " * 150_000]}, "at most 131072"),
        ("guided_regex", "x" * 200_000, "at most 131072"),
        ("guided_choice", ["x" * 200_000], "at most 131072"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_grammars_that_are_too_large_are_refused(
    server: Any, field: str, value: Any, message: str, stream: bool
) -> None:
    body = {"model": server.model, "messages": ASK, field: value, "stream": stream}
    answer = server.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text[:500]
    error = answer.json()["error"]
    assert error["param"] == field
    assert message in error["message"]
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    ("end", "options", "expected"),
    [
        ("<think>\n", {}, "open"),
        ("", {}, "may_open"),
        ("<think>\n\n</think>\n\n", {}, "none"),
    ],
)
def test_grammar_begins_after_the_reasoning(
    scripted: Start, tmp_path: Path, end: str, options: dict[str, Any], expected: str
) -> None:
    template = (
        "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>" + end + "{# </think> #}"
    )
    tokenizer = byte_tokenizer(tmp_path, template, ["<|user|>", "<|assistant|>", "<|end|>"])
    engine = ScriptedEngine()

    async def load() -> Served:
        return Served(name="toy", text=ModelText(tokenizer), engine=engine, context=512)

    api = scripted(load=load)
    while api.get("/health").status_code == 503:
        pass
    body = {"model": "toy", "messages": ASK, "guided_regex": "a"}
    assert api.post("/v1/chat/completions", json=body).is_success
    assert engine.requests[0].params.reasoning == expected


def test_a_model_without_reasoning_answers_at_once(scripted: Start) -> None:
    engine = ScriptedEngine()
    body = {"model": "toy", "messages": ASK, "guided_regex": "a"}
    assert scripted(engine, text=ByteText()).post("/v1/chat/completions", json=body).is_success
    assert engine.requests[0].params.reasoning == "none"
