"""The ASGI application: the routes, and what surrounds them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from treadle.config import Config
from treadle.keys.ring import Keyring
from treadle.server.anthropic.errors import MessagesErrors
from treadle.server.auth import Auth, is_loopback
from treadle.server.errors import ApiError
from treadle.server.metering import Metering
from treadle.server.middleware import Cors, RequestIds, RootPath, RouteMetrics
from treadle.server.responses.store import ResponseStore
from treadle.server.routes import routes
from treadle.server.service import Load, Service


def create_app(config: Config, load: Load, version: str, keyring: Keyring | None = None) -> Starlette:
    """The server as an ASGI application.

    ``load`` is called once, when the server already listens; until a model is there, ``/v1/*`` answers 503.
    ``keyring``: who may call; without it those of ``config.api_key``.
    """
    keyring = keyring or Keyring(config.api_key, may_be_open=is_loopback(config.host))
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
        routes=routes(),
        middleware=[
            *([Middleware(RootPath, prefix=config.root_path)] if config.root_path else []),
            Middleware(MessagesErrors),
            Middleware(RequestIds),
            Middleware(RouteMetrics, metrics=service.metrics),
            Middleware(Cors, origins=config.cors_origin),
            Middleware(Auth, keyring=keyring, origins=config.cors_origin),
            Middleware(Metering, keyring=keyring),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.keyring = keyring
    app.state.responses = ResponseStore()
    return app


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"there is no {request.scope['path'][:200]} here",
        405: f"{request.method} is not allowed on {request.scope['path'][:200]}",
    }
    message = messages.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response()
