"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle.server.anthropic.answer import PING, MessageAnswer, error_event
from treadle.server.anthropic.schema import CountBody, MessagesBody
from treadle.server.anthropic.translate import CHAT_NAMES, chat_fields
from treadle.server.body import aside
from treadle.server.chat import chat_prompt, start_chat
from treadle.server.errors import ApiError, json_response
from treadle.server.schema import ChatBody, validate
from treadle.server.service import body_of, service_of
from treadle.server.sse import EventStream, while_connected

VERSIONS = ("2023-06-01", "2026-10-21")  # the later one only forbids more


async def create_message(request: HttpRequest) -> Response | EventStream:
    """The next message of a conversation, through the same path as a chat completion."""
    _check_version(request)
    body, size = await body_of(request, MessagesBody)
    try:
        chat = await aside(size, lambda: validate(ChatBody, chat_fields(body)))
        job = await start_chat(request, chat, size, cut=True)
    except ApiError as error:
        raise error.renamed(CHAT_NAMES) from None
    answer = MessageAnswer(job, body)
    if body.stream:
        return EventStream(answer.stream(), service_of(request).config.keep_alive, PING, error_event)
    whole = await while_connected(request.receive, answer.complete())
    return json_response(whole) if whole is not None else Response(status_code=499)


async def count_tokens(request: HttpRequest) -> Response:
    """How many tokens the prompt of a message has."""
    _check_version(request)
    body, size = await body_of(request, CountBody)
    try:
        chat = await aside(size, lambda: validate(ChatBody, chat_fields(body)))
        prompt = await chat_prompt(request, chat, size)
    except ApiError as error:
        raise error.renamed(CHAT_NAMES) from None
    return json_response({"input_tokens": len(prompt.ids)})


def _check_version(request: HttpRequest) -> None:
    version = request.headers.get("anthropic-version", VERSIONS[-1])
    if version not in VERSIONS:
        message = f"anthropic-version: must be {' or '.join(VERSIONS)}; got {version[:50]!r}"
        raise ApiError(400, message, code="unsupported_parameter")
