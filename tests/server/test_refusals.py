"""What used to be ignored is refused by name; messages say what came and what is allowed."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

HELLO = [{"role": "user", "content": "hi"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def error_of(server: Any, path: str, body: Any) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = server.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert path == MESSAGES or error["code"]
    ask = {"model": server.model, "prompt": "a", "max_tokens": 1}
    assert server.post("/v1/completions", json=ask).is_success
    return error


def test_repeated_keys(server: Any) -> None:
    whole = json.dumps({"model": server.model, "messages": HELLO, "max_tokens": 1})
    error = error_of(server, CHAT, whole[:-1].encode() + b', "max_tokens": 2}')
    assert (error["param"], error["code"]) == ("max_tokens", "invalid_json")
    assert "'max_tokens' twice" in error["message"]
    inner = whole.replace('"role": "user"', '"role": "system", "\\u0072ole": "user"')
    error = error_of(server, CHAT, inner.encode())
    assert error["param"] is None
    assert "'role' twice" in error["message"]
    schema = '{"type": "object", "type": "string"}'
    error = error_of(server, CHAT, {"model": server.model, "messages": HELLO, "guided_json": schema})
    assert (error["param"], error["code"]) == ("guided_json", "invalid_value")
    assert "the schema has the key 'type' twice" in error["message"]


def test_colons_that_are_no_keys_are_fine(server: Any) -> None:
    body = b'{"model": "%s", "prompt": "a:b\\u003ac\\\\u003A \\": ", "max_tokens": 1}'
    answer = server.post("/v1/completions", content=body % server.model.encode())
    assert answer.is_success, answer.text


@pytest.mark.parametrize("keys", [{"05": 1, "5": 2}, {"00": 1}])
def test_token_ids_have_one_spelling(server: Any, keys: dict[str, int]) -> None:
    error = error_of(server, CHAT, {"model": server.model, "messages": HELLO, "logit_bias": keys})
    assert error["param"] == "logit_bias"
    assert "leading zeros" in error["message"]
    body = {"model": server.model, "prompt": "a", "max_tokens": 1, "logit_bias": {"0": -1}}
    assert server.post("/v1/completions", json=body).is_success


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("name", "value"),
    [("tools", TOOLS), ("chat_template_kwargs", {}), ("continue_final_message", True)],
)
def test_tokenize_says_what_belongs_to_messages(server: Any, name: str, value: Any) -> None:
    error = error_of(server, "/tokenize", {"prompt": "a", name: value})
    assert error["param"] == name
    assert "messages" in error["message"]


def test_tokenize_continues_a_message_as_chat_does(server: Any) -> None:
    said = {"role": "assistant", "content": "The capital of France is"}
    ask = {
        "model": server.model, "messages": [*HELLO, said], "continue_final_message": True,
        "add_generation_prompt": False,
    }  # fmt: skip
    ids = server.post("/tokenize", json=ask).json()
    answer = server.post(CHAT, json={**ask, "max_tokens": 1}).json()
    assert ids["count"] == answer["usage"]["prompt_tokens"]
    text = server.post("/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"]
    assert text.endswith("The capital of France is")
    error = error_of(server, "/tokenize", {"messages": HELLO, "continue_final_message": True})
    assert error["param"] == "continue_final_message"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/tokenize"])
@pytest.mark.parametrize("body", [b"[]", b"null", b"5"])
def test_bodies_that_are_no_object(server: Any, path: str, body: bytes) -> None:
    error = error_of(server, path, body)
    assert "must be a JSON object" in error["message"]
    assert path == MESSAGES or error["code"] == "invalid_json"


USER = {"role": "user", "content": [{"type": "image"}]}
LEFT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
SAID: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"response_format": {"type": "xml"}}, "response_format", 'got one of the type "xml"'),
    (CHAT, {"response_format": {}}, "response_format", "got one without a type"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools", 'got one of the type "web_search"'),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "input", 'got one of the type "computer_call"'),
    (RESPONSES, {"tool_choice": "f"}, "tool_choice", '{"type": "function", "name": '),
    (MESSAGES, {"messages": [USER]}, "messages", 'got one of the type "image"'),
    (CHAT, {"tool_choice": "f", "tools": TOOLS}, "tool_choice", '{"type": "function", "function": {"name": '),
    (CHAT, {"messages": [{**HELLO[0], "refusal": "no"}]}, "messages", "must be null"),
    ("/v1/completions", {"prompt": ""}, "prompt", 'at least 1 character; got ""'),
    (CHAT, {"response_format": LEFT}, "response_format", "leads only to itself"),
    (CHAT, {"guided_grammar": "start: start"}, "guided_grammar", "leads only to itself"),
]
_NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HELLO, "max_tokens": 1},
    "/v1/completions": {},
}


@pytest.mark.parametrize(("path", "fields", "name", "said"), SAID)
def test_messages_say_what_came(server: Any, path: str, fields: dict[str, Any], name: str, said: str) -> None:
    error = error_of(server, path, {"model": server.model, **_NEEDED[path], **fields})
    assert error.get("param", name) == name
    assert error["message"].startswith(name)
    assert said in error["message"]
    assert "InternalError" not in error["message"]


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 5000, "9" * 400])
def test_numbers_that_are_too_large_are_named_and_not_repeated(server: Any, number: str) -> None:
    body = '{"model": "%s", "messages": [{"role": "user", "content": "hi"}], "max_tokens": %s}'
    error = error_of(server, CHAT, (body % (server.model, number)).encode())
    assert (error["param"], error["code"]) == ("max_tokens", "invalid_value")
    assert error["message"].startswith("max_tokens: ")
    assert len(error["message"]) < 200
    nested = '{"model": "%s", "prompt": [1, NUMBER]}'.replace("%s", server.model).replace("NUMBER", number)
    assert error_of(server, "/v1/completions", nested.encode())["message"].startswith("prompt[1]: ")


@pytest.mark.parametrize("path", ["/version", "/v1/models", "/openapi.json", "/v1/responses/x"])
def test_unknown_parameters_in_the_query(server: Any, path: str) -> None:
    answer = server.get(path, params={"colour": "red"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "colour", "unknown_parameter")
    assert "colour" in error["message"]


def test_parameters_that_clients_send(server: Any) -> None:
    ask = {"model": server.model, "messages": HELLO, "max_tokens": 1}
    assert server.post(MESSAGES + "?beta=true", json=ask).is_success
    assert server.post(MESSAGES + "?beta=maybe", json=ask).status_code == 400
    refused = server.post(MESSAGES + "?colour=red", json=ask)
    assert (refused.status_code, refused.json()["type"]) == (400, "error")
    assert "colour" in refused.json()["error"]["message"]
    assert server.post(CHAT + "?colour=red", json=ask).json()["error"]["param"] == "colour"
    for path in ("/health", "/metrics"):  # scrapers may have parameters of their own
        assert server.get(path, params={"module": "x"}).is_success


def test_what_may_be_included_of_a_stored_response(server: Any) -> None:
    body = {"model": server.model, "input": "hi", "max_output_tokens": 1}
    path = f"{RESPONSES}/{server.post(RESPONSES, json=body).json()['id']}"
    answer = server.get(path, params={"include": "zzz"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include")
    assert "reasoning.encrypted_content" in answer.json()["error"]["message"]
    both = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    assert server.get(path, params={"include[]": both}).is_success
    assert server.get(path + "/input_items", params={"order": "up"}).json()["error"]["param"] == "order"
    assert server.get(path + "/input_items?limit=1&limit=2").json()["error"]["param"] == "limit"


def test_every_code_is_in_the_table() -> None:
    """Every error that the server makes has a code that docs/api.md tells; but for unknown paths and methods,
    which have none."""
    root = Path(__file__).parents[2]
    table = (root / "docs" / "api.md").read_text().partition("## Errors")[2].partition("## Decisions")[0]
    rows = [row.split("|")[2] for row in table.splitlines() if row.startswith("|")]
    told = {code for row in rows for code in re.findall(r"`(\w+)`", row)}
    found = 0
    for file in sorted((root / "treadle" / "server").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ApiError"):
                continue
            code = next((keyword.value for keyword in node.keywords if keyword.arg == "code"), None)
            if isinstance(code, ast.Constant):
                assert code.value in told, f"{file.name}:{node.lineno}"
                found += 1
            else:
                assert code is not None or file.name == "app.py", f"{file.name}:{node.lineno}"
    assert found > 20
