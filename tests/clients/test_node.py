"""The openai client for Node.js, which `make test` installs. See openai.mjs for what it does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import KEY, Api

SCRIPT = Path(__file__).parent / "openai.mjs"


@pytest.fixture(scope="module")
def got(r1: Api) -> dict[str, Any]:
    command = ["node", str(SCRIPT), r1.url, KEY, r1.model]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_chat(got: dict[str, Any], r1: Api) -> None:
    assert got["chat"]["role"] == "assistant"
    assert got["chat"]["reasoning_content"]
    assert got["chatStream"]["role"] == "assistant"
    assert got["reasoningDeltas"]
    assert got["models"] == [r1.model]


def test_logprobs(got: dict[str, Any]) -> None:
    assert len(got["logprobs"]) == 4
    assert all(len(entry["top_logprobs"]) == 2 for entry in got["logprobs"])


def test_structured_output(got: dict[str, Any]) -> None:
    for text in (got["structured"], got["response"]):
        assert json.loads(text).keys() == {"ok"}


def test_tools(got: dict[str, Any]) -> None:
    (made,) = got["toolCalls"]
    assert made["function"]["name"] == "reply"
    assert json.loads(made["function"]["arguments"]).keys() == {"ok"}
    assert got["finishReason"] == "tool_calls"


def test_responses(got: dict[str, Any]) -> None:
    final = got["responseStream"]
    assert final["status"] == "completed"
    assert [item["type"] for item in final["output"]] == ["reasoning", "function_call"]
    assert json.loads(final["output"][1]["arguments"]).keys() == {"ok"}
    assert got["responseTypes"][0] == "response.created"
    assert got["responseTypes"][-1] == "response.completed"
    assert "response.function_call_arguments.delta" in got["responseTypes"]


def test_errors(got: dict[str, Any]) -> None:
    assert got["errors"] == {
        "unknownModel": ["NotFoundError", 404, "model", "model_not_found"],
        "badValue": ["BadRequestError", 400, "temperature", "invalid_value"],
        "badSchema": ["BadRequestError", 400, "response_format", "invalid_value"],
        "wrongKey": ["AuthenticationError", 401, None, "invalid_api_key"],
    }
