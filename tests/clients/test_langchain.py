"""LangChain's ChatOpenAI, over chat completions and over the Responses API."""

from __future__ import annotations

from typing import Any

import openai
import pydantic
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.clients.conftest import Thinker, call
from tests.server.conftest import KEY, Api


def chat(server: Any, model: str, **options: Any) -> ChatOpenAI:
    key = pydantic.SecretStr(KEY)
    return ChatOpenAI(base_url=server.url + "/v1", api_key=key, model=model, max_retries=0, **options)


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}"


class Reply(pydantic.BaseModel):
    """A reply."""

    ok: bool


API = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])


@API
def test_answers_and_streams(smol: Api, responses: bool) -> None:
    model = chat(smol, smol.model, use_responses_api=responses)
    answer = model.invoke([SystemMessage("Be short."), HumanMessage("What is the capital of France?")])
    assert "Paris" in answer.text
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 1
    chunks = list(model.stream([SystemMessage("Be short."), HumanMessage("What is the capital of France?")]))
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert sum(1 for chunk in chunks if chunk.text) > 3


@API
def test_tools(thinker: Thinker, responses: bool) -> None:
    model = chat(thinker, "toy", use_responses_api=responses).bind_tools([weather])
    question = HumanMessage("How is Oslo?")
    thinker.says("<think>Look it up.</think>" + call("weather", city="北京") + call("weather", city="Oslo"))
    asked = model.invoke([question])
    total: AIMessageChunk | None = None
    for chunk in model.stream([question]):
        total = chunk if total is None else total + chunk  # type: ignore[assignment]
    assert total is not None
    for message in (asked, total):
        assert [made["args"] for made in message.tool_calls] == [{"city": "北京"}, {"city": "Oslo"}]
    results: list[Any] = [weather.invoke(made) for made in asked.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    thinker.says("Wet.")
    answer = model.invoke([question, asked, *results])
    assert answer.text == "Wet."
    assert "<|tool|>Rain in 北京<|end|><|tool|>Rain in Oslo<|end|>" in thinker.prompt
    assert ("<think>Look it up.</think>" in thinker.prompt) == responses  # else LangChain leaves it out


@API
def test_structured_output(r1: Api, responses: bool) -> None:
    body: Any = {"seed": 1, "reasoning": {"max_tokens": 4}}
    model = chat(r1, r1.model, use_responses_api=responses, extra_body=body)
    assert isinstance(model.with_structured_output(Reply, method="json_schema").invoke("ok?"), Reply)
    assert isinstance(model.with_structured_output(Reply, method="function_calling").invoke("ok?"), Reply)


def test_reasoning(thinker: Thinker) -> None:
    thinker.says("<think>Hm.</think>Paris.")
    model = chat(thinker, "toy", use_responses_api=True, reasoning={"summary": "auto"})
    for message in (model.invoke("hi"), sum_of(model, "hi")):
        kinds = {block["type"]: block for block in message.content_blocks}
        assert kinds["reasoning"].get("reasoning") == "Hm."
        assert kinds["text"].get("text") == "Paris."
        assert message.usage_metadata is not None
        details = message.usage_metadata["output_token_details"]
        assert details["reasoning"] == len("<think>Hm.</think>")


def sum_of(model: ChatOpenAI, question: str) -> AIMessage:
    chunks = list(model.stream(question))
    total: Any = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    message: AIMessage = total
    return message


def test_logprobs(smol: Api) -> None:
    answer = chat(smol, smol.model, logprobs=True, top_logprobs=2, max_completion_tokens=4).invoke("hi")
    told = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in told) == answer.text
    assert all(len(entry["top_logprobs"]) == 2 for entry in told)


def test_errors_are_those_of_the_client(smol: Api, thinker: Thinker) -> None:
    with pytest.raises(openai.NotFoundError, match="not served"):
        chat(smol, "no-such-model").invoke("hi")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(smol, smol.model, temperature=3).invoke("hi")
    thinker.engine.fail_after = 2
    with pytest.raises(openai.APIError, match="died"):
        list(chat(thinker, "toy").stream("hi"))
