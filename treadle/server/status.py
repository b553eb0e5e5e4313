"""What the server tells about itself: its state, version, metrics and models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from treadle.server.errors import json_response
from treadle.server.service import key_of, model_for, service_of

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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


async def version(request: Request) -> Response:
    """``GET /version``."""
    return json_response({"version": service_of(request).version})


async def metrics(request: Request) -> Response:
    """``GET /metrics`` in the Prometheus text format."""
    return Response(service_of(request).metrics.render(), media_type=METRICS_TYPE)


async def models(request: Request) -> Response:
    """``GET /v1/models``."""
    allowed = service_of(request).allowed(key_of(request))
    return json_response({"object": "list", "data": [served.card() for served in allowed]})


async def model(request: Request) -> Response:
    """``GET /v1/models/{id}``."""
    return json_response(model_for(request, request.path_params["name"], None).card())
