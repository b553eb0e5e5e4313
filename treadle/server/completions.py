"""``POST /v1/completions``, the legacy call: continues texts or token ids without a chat template."""

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
from treadle.server.errors import ApiError, json_response
from treadle.server.generation import (
    Job,
    TokenText,
    check_stream_options,
    make_choices,
    sampling_params,
)
from treadle.server.grammar import answer_grammar
from treadle.server.prompt import as_many, token_ids
from treadle.server.schema import CompletionBody
from treadle.server.service import Served, body_of, model_for, service_of
from treadle.server.sse import DONE, Chunks, EventStream, error_event, while_connected

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16  # of the OpenAI API


async def completions(request: HttpRequest) -> Response | EventStream:
    """Choices are numbered prompt by prompt: prompt p, sample i is choice ``p * n + i``."""
    service = service_of(request)
    body, size = await body_of(request, CompletionBody)
    served = model_for(request, body.model)
    _check(body)
    prompts = await aside(size, lambda: _prompts(body, served))
    job = _job(request, body, served, prompts, await answer_grammar(body, served))
    await job.start()
    echoes = await aside(size, lambda: [served.text.decode(ids) if body.echo else "" for ids in prompts])
    answer = Completion(job, body, [echo for echo in echoes for _ in range(body.n or 1)])
    if body.stream:
        return EventStream(answer.stream(), service.config.keep_alive)
    whole = await while_connected(request.receive, answer.complete())
    return json_response(whole) if whole is not None else Response(status_code=499)


def _check(body: CompletionBody) -> None:
    check_stream_options(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"best_of: only {body.n or 1}, the value of n, is supported"
        raise ApiError(400, message, param="best_of", code="unsupported_parameter")
    if body.echo and body.logprobs is not None:
        message = "echo together with logprobs is not supported; leave one out"
        raise ApiError(400, message, param="echo", code="unsupported_parameter")


def _prompts(body: CompletionBody, served: Served) -> list[list[int]]:
    """Token ids of every prompt of the body; ApiError 400 for an empty or mixed one."""
    many = as_many(body.prompt, "prompt")
    if len(many) * (body.n or 1) > MAX_PROMPTS:
        message = f"prompt: {len(many)} prompts with n={body.n or 1} make more than {MAX_PROMPTS} choices"
        raise ApiError(400, message, param="prompt", code="invalid_value")
    encode = served.text.encode
    return [token_ids(item, number, served, "prompt", encode) for number, item in enumerate(many)]


def _job(
    request: HttpRequest, body: CompletionBody, served: Served, prompts: list[list[int]], grammar: str | None
) -> Job:
    choices = []
    for ids in prompts:
        limit = body.max_tokens or min(DEFAULT_MAX_TOKENS, max(served.context - len(ids), 1))
        params = sampling_params(body, served, len(ids), limit, "prompt", body.logprobs)
        params = msgspec.structs.replace(params, grammar=grammar)
        choices += make_choices(request, body, served, ids, params, thinking=None)
    job = Job(service_of(request), served, choices, sum(map(len, prompts)), body.n or 1)
    request.state.work = job
    return job


class Completion:
    """All choices of one request; ``echoes`` is the text put before each."""

    def __init__(self, job: Job, body: CompletionBody, echoes: list[str]) -> None:
        self._job = job
        self._body = body
        self._echoes = echoes
        id = "cmpl-" + secrets.token_hex(12)
        self._head = {"id": id, "object": "text_completion", "created": int(time.time()), "model": body.model}

    async def complete(self) -> dict[str, Any]:
        """The ``text_completion`` object."""
        texts = list(self._echoes)
        count = len(texts)
        tokens: list[list[TokenText]] = [[] for _ in range(count)]
        reasons = [""] * count
        async with contextlib.aclosing(self._job.pieces()) as pieces:
            async for index, piece in pieces:
                texts[index] += piece.text
                tokens[index] += piece.tokens or ()
                reasons[index] = piece.finish or ""
        choices = [
            {
                "index": index,
                "text": texts[index],
                "logprobs": _logprobs(tokens[index]) if self._body.logprobs is not None else None,
                "finish_reason": reasons[index],
            }
            for index in range(count)
        ]
        return {**self._head, "choices": choices, "usage": self._job.usage()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """SSE events; ends with ``[DONE]``, or with an error event if the engine failed."""
        include_usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        count = len(self._echoes)
        chunks = Chunks(self._head, count, include_usage)
        try:
            for index, echo in enumerate(self._echoes):
                if echo:
                    yield chunks.text(index, echo)
            async with contextlib.aclosing(self._job.pieces()) as pieces:
                async for index, piece in pieces:
                    logprobs = _logprobs(piece.tokens) if piece.tokens else None
                    if piece.text or logprobs:
                        yield chunks.text(index, piece.text, logprobs)
                    if piece.finish is not None:
                        yield chunks.finish(index, piece.finish, chat=False)
        except ApiError as error:
            yield error_event(error)
            return
        if include_usage:
            yield chunks.usage(self._job.usage())
        yield DONE


def _logprobs(tokens: list[TokenText]) -> dict[str, Any]:
    """Four lists of equal length."""
    return {
        "tokens": [_name(token.data) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            {_name(data): logprob for data, logprob in reversed([*token.top, (token.data, token.logprob)])}
            for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


def _name(token: bytes) -> str:
    """A token as text, or as the OpenAI API writes it if it cuts a character: ``bytes:\\xef\\xbc``."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + token.decode("ascii", "backslashreplace")
