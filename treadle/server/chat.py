"""``POST /v1/chat/completions``."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle.server.body import aside
from treadle.server.calls import calls_grammar
from treadle.server.errors import ApiError, json_response
from treadle.server.generation import (
    Job,
    TextDelta,
    TokenText,
    check_stream_options,
    make_choices,
    sampling_params,
)
from treadle.server.grammar import answer_grammar
from treadle.server.prompt import check_size, encode_chat, size_of_questions
from treadle.server.schema import ChatBody, Tool
from treadle.server.service import Served, body_of, model_for, service_of
from treadle.server.sse import DONE, Chunks, EventStream, error_event, while_connected
from treadle.server.textside import ChatPrompt
from treadle.server.thinking import thinking_of
from treadle.server.tools import calls_tools, check_tool_choice, check_tools, tool_parser
from treadle.text.tools import ToolDelta


async def chat_completions(request: HttpRequest) -> Response | EventStream:
    """Everything that can be wrong with a request is found before the first byte of a stream is sent."""
    service = service_of(request)
    body, size = await body_of(request, ChatBody)
    job = await start_chat(request, body, size)
    answer = Answer(job, body, "chatcmpl-" + secrets.token_hex(12))
    if body.stream:
        return EventStream(answer.stream(), service.config.keep_alive)
    whole = await while_connected(request.receive, answer.complete())
    return json_response(whole) if whole is not None else Response(status_code=499)


async def start_chat(request: HttpRequest, body: ChatBody, size: int, *, cut: bool = False) -> Job:
    """The one way from a chat body (made of ``size`` bytes) to running choices; every kind of conversation
    takes it. Raises ApiError, with nothing running, for all that can be wrong.

    cut: a limit of tokens that the context has no room for is lowered, not refused.
    """
    served = model_for(request, body.model)
    _check(body, served)
    return await _job(request, body, served, size, cut)


async def chat_prompt(request: HttpRequest, body: ChatBody, size: int) -> ChatPrompt:
    """The prompt that ``start_chat`` would begin with, however long it is."""
    served = model_for(request, body.model)
    _check(body, served)
    tools = body.tools if calls_tools(body) else None
    told = thinking_of(body, served).enabled
    continued = body.continue_final_message or False
    return await aside(size, lambda: encode_chat(served, body, continued, tools, told))


def _check(body: ChatBody, served: Served) -> None:
    check_stream_options(body)
    check_tools(body, served)
    check_tool_choice(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")


async def _job(request: HttpRequest, body: ChatBody, served: Served, size: int, cut: bool) -> Job:
    service = service_of(request)
    tools = body.tools if calls_tools(body) else None
    grammar = await answer_grammar(body, served)
    if tools:
        grammar = await calls_grammar(body, served, grammar)
    thinking = thinking_of(body, served)
    prompt = await aside(size, lambda: _prompt(served, body, tools, thinking.enabled))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_completion_tokens or body.max_tokens
    if cut and limit is not None:
        limit = max(min(limit, served.context - len(prompt.ids)), 1)
    params = sampling_params(body, served, len(prompt.ids), limit, "messages", logprobs)
    if grammar is not None or thinking.budget is not None:
        reasoning = "open" if prompt.thinking else "may_open" if prompt.may_think else "none"
        params = msgspec.structs.replace(
            params, grammar=grammar, reasoning=reasoning, reasoning_budget=thinking.budget
        )
    raw = (body.reasoning_format or service.config.reasoning_format) == "none"
    if raw and tools and served.text.reasoning(thinking=prompt.thinking):
        message = "reasoning_format: none cannot be combined with tools on a model that reasons; use auto"
        raise ApiError(400, message, param="reasoning_format", code="unsupported_parameter")
    choices = make_choices(
        request,
        body,
        served,
        prompt.ids,
        params,
        thinking=None if raw else prompt.thinking,
        tools=lambda: tool_parser(body, served),
    )
    job = Job(service, served, choices, len(prompt.ids), len(choices))
    request.state.work = job
    await job.start()
    return job


def _prompt(served: Served, body: ChatBody, tools: list[Tool] | None, thinking: bool | None) -> ChatPrompt:
    check_size(served, size_of_questions(body), "messages")
    return encode_chat(served, body, body.continue_final_message or False, tools, thinking)


class Answer:
    """One chat answer with its choices, written as a whole or as a stream."""

    def __init__(self, job: Job, body: ChatBody, id: str) -> None:
        self._job = job
        self._body = body
        self._head = {"id": id, "created": int(time.time()), "model": body.model}

    async def complete(self) -> dict[str, Any]:
        """The ``chat.completion`` object."""
        count = len(self._job.choices)
        messages: list[dict[str, str]] = [{} for _ in range(count)]
        calls: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        tokens: list[list[TokenText]] = [[] for _ in range(count)]
        reasons = [""] * count
        async with contextlib.aclosing(self._job.pieces()) as pieces:
            async for index, piece in pieces:
                for part in piece.parts:
                    if isinstance(part, TextDelta):
                        key = part.field.decode()
                        messages[index][key] = messages[index].get(key, "") + part.text
                    else:
                        _join(calls[index], part)
                tokens[index] += piece.tokens or ()
                reasons[index] = piece.finish or ""
        choices = [
            {
                "index": index,
                "message": _message(messages[index], calls[index]),
                "logprobs": _logprobs(tokens[index]) if self._body.logprobs else None,
                "finish_reason": reasons[index],
            }
            for index in range(count)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._job.usage()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """SSE events; ends with ``[DONE]``, or with an error event if the engine failed."""
        include_usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        count = len(self._job.choices)
        chunks = Chunks({**self._head, "object": "chat.completion.chunk"}, count, include_usage)
        try:
            for index in range(count):
                yield chunks.role(index)
            async with contextlib.aclosing(self._job.pieces()) as pieces:
                async for index, piece in pieces:
                    logprobs = _logprobs(piece.tokens) if piece.tokens else None
                    for part in piece.parts or ([TextDelta(b"content", "")] if logprobs else []):
                        if isinstance(part, TextDelta):
                            yield chunks.delta(index, part.field, part.text, logprobs)
                        else:
                            yield chunks.calls(index, [_call_delta(part)], logprobs)
                        logprobs = None
                    if piece.finish is not None:
                        yield chunks.finish(index, piece.finish, chat=True)
        except ApiError as error:
            yield error_event(error)
            return
        if include_usage:
            yield chunks.usage(self._job.usage())
        yield DONE


def _message(fields: dict[str, str], calls: list[dict[str, Any]]) -> dict[str, Any]:
    content = fields.get("content", None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["tool_calls"] = calls
    if "reasoning_content" in fields:
        message["reasoning_content"] = message["reasoning"] = fields["reasoning_content"]
    return message


def _join(calls: list[dict[str, Any]], delta: ToolDelta) -> None:
    """Put the pieces of calls together, as a client does with those of a stream."""
    if delta.name is not None:
        function = {"name": delta.name, "arguments": ""}
        calls.append({"id": delta.id, "type": "function", "function": function})
    calls[delta.index]["function"]["arguments"] += delta.arguments


def _call_delta(delta: ToolDelta) -> dict[str, Any]:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


def _logprobs(tokens: list[TokenText]) -> dict[str, Any]:
    return {"content": [token.chat() for token in tokens], "refusal": None}
