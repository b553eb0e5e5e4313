"""Every route, in one table: what the application serves, and what its OpenAPI document says of it.

A new route is one ``Operation`` here. ``tests/server/test_openapi.py`` holds the running server against the
table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.routing import Route

from treadle.server import answers, status, tokens
from treadle.server.anthropic import routes as anthropic
from treadle.server.anthropic.schema import CountBody, MessagesBody
from treadle.server.chat import chat_completions
from treadle.server.completions import completions
from treadle.server.embeddings import EmbeddingsBody, embeddings
from treadle.server.openapi import openapi
from treadle.server.query import check_query
from treadle.server.responses import routes as responses
from treadle.server.responses.schema import ENCRYPTED, LOGPROBS, ResponsesBody
from treadle.server.schema import ChatBody, CompletionBody, DetokenizeBody, Strict, TokenizeBody

Method = Literal["GET", "POST", "DELETE"]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path. The statuses that its key, its body and its model can lead to are added by what
    it needs: see ``treadle.server.openapi``."""

    method: Method
    path: str
    endpoint: Callable[..., Any]
    summary: str
    answer: type[BaseModel] | str  # of status 200; a media type where it is no JSON
    body: type[Strict] | None = None
    stream: bool = False  # the answer may be server-sent events
    needs_key: bool = True
    needs_model: bool = False
    error: type[BaseModel] = answers.ErrorAnswer
    statuses: Mapping[int, type[BaseModel]] = field(default_factory=dict)  # further ones
    query: Mapping[str, Any] | None = field(default_factory=dict)  # JSON schemas; None: any parameter


def _post(
    path: str, endpoint: Callable[..., Any], body: type[Strict], summary: str, **more: Any
) -> Operation:
    """A call that a model answers."""
    return Operation(
        method="POST", path=path, endpoint=endpoint, body=body, summary=summary, needs_model=True, **more
    )


_INCLUDE = {"enum": [LOGPROBS, ENCRYPTED]}  # once per value; "include[]" is how OpenAI's clients write it
_INCLUDES = {"include": _INCLUDE, "include[]": _INCLUDE}
_BETA = {"beta": {"enum": ["true", "false"]}}  # of Anthropic's clients; changes nothing
_MODELS = {**_BETA, "client_version": {"type": "string"}}  # of Codex; changes nothing
_PAGE = {
    **_INCLUDES,
    "limit": {"type": "integer", "minimum": 1, "maximum": responses.MAX_PAGE, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}
_STORED = "/v1/responses/{id}"
_MESSAGES: dict[str, Any] = {"error": answers.MessagesError, "query": _BETA}

OPERATIONS = (
    Operation(
        method="GET",
        path="/health",
        endpoint=status.health,
        summary="Whether the server is ready; the only route that needs no key",
        answer=answers.Health,
        needs_key=False,
        query=None,
        statuses={503: answers.Health},
    ),
    Operation(
        method="GET",
        path="/ready",
        endpoint=status.ready,
        summary="Whether the server is ready, and with which model or why not",
        answer=answers.Ready,
        statuses={503: answers.Ready},
    ),
    Operation(
        method="GET",
        path="/version",
        endpoint=status.version,
        summary="The version of the server",
        answer=answers.VersionAnswer,
    ),
    Operation(
        method="GET",
        path="/metrics",
        endpoint=status.metrics,
        summary="Metrics in the Prometheus text format",
        answer="text/plain",
        query=None,
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        endpoint=openapi,
        summary="This document",
        answer="application/json",
    ),
    Operation(
        method="GET",
        path="/v1/models",
        endpoint=status.models,
        summary="The served models that the key may use",
        answer=answers.ModelList,
        query=_MODELS,
        statuses={503: answers.ErrorAnswer},
    ),
    Operation(
        method="GET",
        path="/v1/models/{name:path}",
        endpoint=status.model,
        summary="One served model",
        answer=answers.ModelCard,
        query=_BETA,
        needs_model=True,
    ),
    _post(
        "/v1/chat/completions",
        chat_completions,
        ChatBody,
        "Answer a conversation",
        answer=answers.ChatAnswer,
        stream=True,
    ),
    _post(
        "/v1/completions",
        completions,
        CompletionBody,
        "Continue texts or token ids",
        answer=answers.TextAnswer,
        stream=True,
    ),
    _post(
        "/v1/embeddings",
        embeddings,
        EmbeddingsBody,
        "Turn texts or token ids into vectors",
        answer=answers.EmbeddingsAnswer,
    ),
    _post("/tokenize", tokens.tokenize, TokenizeBody, "Text to token ids", answer=answers.TokenizeAnswer),
    _post(
        "/detokenize", tokens.detokenize, DetokenizeBody, "Token ids to text", answer=answers.DetokenizeAnswer
    ),
    _post(
        "/v1/responses",
        responses.create_response,
        ResponsesBody,
        "Answer a conversation, in the form of the Responses API",
        answer=answers.ResponseAnswer,
        stream=True,
    ),
    Operation(
        method="GET",
        path=_STORED,
        endpoint=responses.stored_response,
        summary="A stored response",
        answer=answers.ResponseAnswer,
        statuses={404: answers.ErrorAnswer},
        query=_INCLUDES,
    ),
    Operation(
        method="DELETE",
        path=_STORED,
        endpoint=responses.stored_response,
        summary="Forget a stored response",
        answer=answers.DeletedResponse,
        statuses={404: answers.ErrorAnswer},
        query=_INCLUDES,
    ),
    Operation(
        method="GET",
        path=_STORED + "/input_items",
        endpoint=responses.stored_input_items,
        summary="The conversation before a stored response",
        answer=answers.ItemList,
        statuses={404: answers.ErrorAnswer},
        query=_PAGE,
    ),
    _post(
        "/v1/messages",
        anthropic.create_message,
        MessagesBody,
        "Answer a conversation, in the form of the Messages API",
        answer=answers.MessageAnswer,
        stream=True,
        **_MESSAGES,
    ),
    _post(
        "/v1/messages/count_tokens",
        anthropic.count_tokens,
        CountBody,
        "Count the tokens of a conversation",
        answer=answers.CountAnswer,
        **_MESSAGES,
    ),
)


def _strict(operations: list[Operation]) -> Callable[..., Any]:
    """The endpoint of a path, which refuses parameters in the query that it does not know."""
    queries: dict[str, Mapping[str, Any] | None]
    queries = {operation.method: operation.query for operation in operations}
    endpoint = operations[0].endpoint

    @functools.wraps(endpoint)
    async def checked(request: Request) -> Any:
        if (known := queries.get("GET" if request.method == "HEAD" else request.method)) is not None:
            check_query(request, known)
        return await endpoint(request)

    return checked


def routes() -> list[Route]:
    """The table as routes of Starlette: one per path and endpoint."""
    found: dict[str, list[Operation]] = {}
    for operation in OPERATIONS:
        found.setdefault(operation.path, []).append(operation)
    return [
        Route(path, _strict(operations), methods=[operation.method for operation in operations])
        for path, operations in found.items()
    ]
