"""``POST /v1/embeddings``: texts to vectors, by models that make them."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, Tag
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle.core import Output, Request, SamplingParams, TreadleError
from treadle.engine.interfaces import QueueFull
from treadle.server.body import aside
from treadle.server.errors import ApiError, json_response
from treadle.server.prompt import as_many, token_ids
from treadle.server.schema import Strict, Token, text_or_list
from treadle.server.service import Served, Service, body_of, key_of, model_for, service_of
from treadle.server.sse import while_connected

MAX_INPUTS = 2048  # of the OpenAI API
_AT_ONCE = 32  # inputs of one call in the engine: enough to fill its steps, and room for others
_RETRY = 0.05  # seconds


class EmbeddingsBody(Strict):
    """``POST /v1/embeddings``. ``input``: a text, token ids, or a list of either."""

    not_offered = {"truncate_prompt_tokens": (), "truncation": (False,)}

    model: str
    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[str | Token | list[Token]], Tag("<list>")],
        text_or_list("strings, token ids, or lists of token ids"),
        Field(min_length=1),
    ]
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    user: str | None = None  # changes nothing


async def embeddings(request: HttpRequest) -> Response:
    """One vector per input, in order."""
    service = service_of(request)
    body, size = await body_of(request, EmbeddingsBody)
    served = model_for(request, body.model, "embed")
    if body.dimensions is not None and body.dimensions > (served.embedding or 0):
        message = f"dimensions: the model {served.name} makes {served.embedding}; got {body.dimensions}"
        raise ApiError(400, message, param="dimensions", code="invalid_value")
    inputs = await aside(size, lambda: _inputs(body, served))
    work = Embedding(service, served, body, inputs, key_of(request).id)
    request.state.work = work
    vectors = await while_connected(request.receive, work.run())
    if vectors is None:
        return Response(status_code=499)
    return await aside(sum(map(len, vectors)), lambda: json_response(_answer(body, work, vectors)))


def _inputs(body: EmbeddingsBody, served: Served) -> list[list[int]]:
    """Token ids of every input; ApiError 400 for an empty, mixed or too long one."""
    many = as_many(body.input, "input")
    if len(many) > MAX_INPUTS:
        message = f"input: {len(many)} inputs are more than {MAX_INPUTS}; split them into several calls"
        raise ApiError(400, message, param="input", code="invalid_value")
    inputs = []
    for number, item in enumerate(many):
        ids = token_ids(item, number, served, "input", served.text.encode_whole)
        if len(ids) > served.context:
            message = (
                f"input: number {number} has {len(ids)} tokens, but the context is {served.context} tokens; "
                "split it"
            )
            raise ApiError(400, message, param="input", code="context_length_exceeded")
        inputs.append(ids)
    return inputs


class Embedding:
    """The inputs of one call on their way through the engine."""

    first_token: float | None = None  # see treadle.server.metering.Work

    def __init__(
        self, service: Service, served: Served, body: EmbeddingsBody, inputs: list[list[int]], user: str
    ) -> None:
        self._service = service
        self._served = served
        self._requests = [
            Request(
                id=secrets.token_hex(12),
                prompt_ids=ids,
                params=SamplingParams(max_tokens=1),
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                user=user,
            )
            for ids in inputs
        ]
        self._vectors: dict[str, bytes] = {}  # by id of the request
        self._running = 0
        self._tokens = self._cached = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: ApiError | None = None

    async def run(self) -> list[bytes]:
        """The vectors, float32 and little endian, in the order of the inputs."""
        left = iter(self._requests)

        async def work() -> None:
            for request in left:
                await self._embed(request)

        metrics = self._service.metrics
        self._service.answers.add(self)
        try:
            with metrics.clock():
                self._tasks = [asyncio.create_task(work()) for _ in self._requests[:_AT_ONCE]]
                await asyncio.gather(*self._tasks)
        except asyncio.CancelledError:
            if self._ending is not None:
                raise self._ending from None
            raise
        finally:
            self._service.answers.discard(self)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            metrics.prompt_tokens.inc(self._tokens)
            metrics.cached_tokens.inc(self._cached)
        return [self._vectors[request.id] for request in self._requests]

    def end(self, error: ApiError) -> None:
        """Stop; ``run`` raises ``error``."""
        self._ending = error
        for task in self._tasks:
            task.cancel()

    def usage(self) -> dict[str, Any]:
        """The ``usage`` object."""
        return {"prompt_tokens": self._tokens, "completion_tokens": 0, "total_tokens": self._tokens}

    async def _embed(self, request: Request) -> None:
        stream = await self._submit(request)
        self._running += 1
        try:
            async for output in stream:
                if output.embedding is None:
                    message = output.error or "the engine stopped this request"
                    raise ApiError(500, message, code="engine_error")
                self._vectors[request.id] = output.embedding
                self._tokens += len(request.prompt_ids)
                self._cached += output.usage.cached_tokens if output.usage is not None else 0
        finally:
            self._running -= 1
            if request.id not in self._vectors:
                await self._served.engine.cancel(request.id)

    async def _submit(self, request: Request) -> AsyncIterator[Output]:
        """Hand it to the engine, where need be after others of this call have left it."""
        while True:
            try:
                return self._served.engine.submit_all([request])[0]
            except QueueFull as error:
                if not self._running:
                    raise ApiError(429, str(error), code="queue_full", headers={"Retry-After": "5"}) from None
            except TreadleError as error:
                raise ApiError(503, str(error), code="engine_error", headers={"Retry-After": "2"}) from None
            await asyncio.sleep(_RETRY)


def _answer(body: EmbeddingsBody, work: Embedding, vectors: list[bytes]) -> dict[str, Any]:
    as_text = body.encoding_format == "base64"
    data: list[dict[str, Any]] = []
    for index, raw in enumerate(vectors):
        vector = shorten(np.frombuffer(raw, "<f4"), body.dimensions)
        value = base64.b64encode(vector.tobytes()).decode() if as_text else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": value})
    usage = {name: count for name, count in work.usage().items() if name != "completion_tokens"}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


def shorten(vector: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """The first values of a vector, made length 1 again (Matryoshka representation learning, arXiv
    2205.13147)."""
    if dimensions is None or dimensions == len(vector):
        return vector
    part = vector[:dimensions]
    length = np.linalg.norm(part)
    return (part / length if length > 0 else part).astype("<f4")
