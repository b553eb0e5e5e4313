"""The ASGI application: its routes, and what surrounds them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from treadle.config import Config
from treadle.server.anthropic.errors import MessagesErrors
from treadle.server.anthropic.routes import count_tokens, create_message
from treadle.server.auth import Auth, Keys
from treadle.server.chat import chat_completions
from treadle.server.completions import completions
from treadle.server.errors import ApiError, json_response
from treadle.server.middleware import Cors, RequestIds, RouteMetrics
from treadle.server.responses.routes import create_response, stored_input_items, stored_response
from treadle.server.responses.store import ResponseStore
from treadle.server.service import Load, Service, key_of, model_for, service_of
from treadle.server.tokens import detokenize, tokenize


def create_app(config: Config, load: Load, version: str) -> Starlette:
    """The server as an ASGI application.

    ``load`` is called once, when the server already listens; until a model is there, ``/v1/*`` answers 503.
    """
    service = Service(config, load, version)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(service.start())
        try:
            yield
        finally:
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
            await service.stop()

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", ready),
            Route("/version", version_),
            Route("/metrics", metrics),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/responses", create_response, methods=["POST"]),
            Route("/v1/responses/{id}", stored_response, methods=["GET", "DELETE"]),
            Route("/v1/responses/{id}/input_items", stored_input_items),
            Route("/v1/messages", create_message, methods=["POST"]),
            Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        ],
        middleware=[
            Middleware(MessagesErrors),
            Middleware(RequestIds),
            Middleware(RouteMetrics, metrics=service.metrics),
            Middleware(Cors, origins=config.cors_origin),
            Middleware(Auth, keys=Keys(config.api_key), origins=config.cors_origin),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.responses = ResponseStore()
    return app


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"there is no {request.url.path[:200]} here",
        405: f"{request.method} is not allowed on {request.url.path[:200]}",
    }
    message = messages.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response()


async def health(request: Request) -> Response:
    """``GET /health``: needs no key and tells nothing but the state."""
    state = service_of(request).state
    return json_response({"status": state}, 200 if state == "ready" else 503)


async def ready(request: Request) -> Response:
    """``GET /ready``: like health, with the reason of a failure and the state of every model."""
    service = service_of(request)
    models = [
        {"id": served.name, "state": served.engine.state, "error": served.engine.error}
        for served in service.models
    ]
    answer = {"status": service.state, "error": service.failure, "models": models}
    return json_response(answer, 200 if service.state == "ready" else 503)


async def version_(request: Request) -> Response:
    """``GET /version``."""
    return json_response({"version": service_of(request).version})


async def metrics(request: Request) -> Response:
    """``GET /metrics`` in the Prometheus text format."""
    return Response(
        service_of(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8"
    )


async def models(request: Request) -> Response:
    """``GET /v1/models``."""
    allowed = service_of(request).allowed(key_of(request))
    return json_response({"object": "list", "data": [served.card() for served in allowed]})


async def model(request: Request) -> Response:
    """``GET /v1/models/{id}``."""
    return json_response(model_for(request, request.path_params["name"]).card())
