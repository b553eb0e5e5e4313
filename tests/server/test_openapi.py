"""The OpenAPI document: well-formed, complete, and true of what the real server answers."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from tests.server.conftest import Api, Start
from treadle.config import Config
from treadle.server.app import create_app
from treadle.server.routes import OPERATIONS

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def document(server: Api) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/openapi.json").json()
    return found


def test_it_has_every_route_and_no_other(document: dict[str, Any]) -> None:
    async def load() -> Any:
        raise NotImplementedError

    app = create_app(Config(), load, "1")
    served = {
        (method, route.path.replace(":path}", "}"))
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    told = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert told == served
    ids = {op["operationId"] for item in document["paths"].values() for op in item.values()}
    assert len(ids) == len(told)


def test_its_schemas_are_schemas(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def valid(document: dict[str, Any], name: str, value: Any) -> bool:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2}),
        (
            "/v1/chat/completions",
            {
                "messages": HELLO,
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "required",
            },
        ),
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2}),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/tokenize", {"messages": HELLO}),
        ("/detokenize", {"tokens": [5, 6]}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
    ],
)
def test_answers_are_as_it_says(
    server: Api, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    if "completions" in path:
        body = {**body, "max_tokens": 16}
    operation = document["paths"][path]["post"]
    asked = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    body = {"model": server.model, **body}
    assert valid(document, asked, body)
    answer = server.post(path, json=body)
    assert answer.status_code == 200, answer.text
    answered = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    assert valid(document, answered.rpartition("/")[2], answer.json()), answer.text


@pytest.mark.parametrize(
    "more", [{"store": True}, {"temperature": 3}, {"no_such_field": 1}, {"suffix": "x"}, {"mirostat": False}]
)
def test_what_it_does_not_allow_is_refused(
    server: Api, document: dict[str, Any], more: dict[str, Any]
) -> None:
    body = {"model": server.model, "messages": HELLO, **more}
    assert not valid(document, "ChatBody", body)
    refused = server.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert valid(document, "ErrorAnswer", refused.json())


def test_it_needs_a_key_like_all_others(scripted: Start) -> None:
    api = scripted()
    api.headers.pop("authorization")
    assert api.get("/openapi.json").status_code == 401
    needed = {operation.path for operation in OPERATIONS if operation.needs_key}
    assert {operation.path for operation in OPERATIONS} - needed == {"/health"}
