"""The OpenAPI 3.1 document: the table of routes, and the models of their bodies and answers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from treadle.server.errors import json_response
from treadle.server.service import service_of

if TYPE_CHECKING:
    from treadle.server.routes import Operation

_REF = "#/components/schemas/{model}"
_TOLD = {
    200: "Success",
    400: "The request is wrong; `param` names the field or parameter",
    401: "There is no key, or an invalid one",
    403: "The key may not do this, or the request does not come from this machine",
    404: "There is no such model or object",
    408: "The body did not arrive",
    413: "The body is too large",
    429: "Too many requests, or a limit of the key is reached; see `Retry-After`",
    500: "The server or its engine failed on this request",
    503: "No model answers at the moment",
}
_RETRIED = (429, 503)
_Pair = tuple[type[BaseModel], str]


async def openapi(request: Request) -> Response:
    """``GET /openapi.json``."""
    from treadle.server.routes import OPERATIONS

    service = service_of(request)
    return json_response(document(OPERATIONS, service.version, service.config.root_path or "/"))


def document(operations: tuple[Operation, ...], version: str, root: str = "/") -> dict[str, Any]:
    """The document as an object. ``root``: the path under which clients find the server."""
    pairs: dict[_Pair, None] = {}
    for operation in operations:
        pairs.update(dict.fromkeys(_models(operation)))
    references, definitions = models_json_schema(
        list(pairs),  # type: ignore[arg-type]
        ref_template=_REF,
    )
    schemas: dict[Any, Any] = references
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _described(operation, path, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Treadle",
            "version": version,
            "description": "Language models on CPUs: the OpenAI and Anthropic APIs, and extensions of vLLM.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": root}],
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def statuses(operation: Operation) -> dict[int, type[BaseModel]]:
    """Every status of errors that an operation can answer with, and the form of the answer."""
    needs = [500]
    if operation.needs_key:
        needs += [401, 403]
    if operation.needs_model:
        needs += [404, 503]
    if operation.query is not None:
        needs += [400]
    if operation.body is not None:
        needs += [400, 408, 413, 429]
    return dict(sorted({**dict.fromkeys(needs, operation.error), **operation.statuses}.items()))


def _models(operation: Operation) -> list[_Pair]:
    models: list[_Pair] = [(model, "serialization") for model in statuses(operation).values()]
    if not isinstance(operation.answer, str):
        models.append((operation.answer, "serialization"))
    if operation.body is not None:
        models.append((operation.body, "validation"))
    return models


def _described(operation: Operation, path: str, schemas: dict[Any, Any]) -> dict[str, Any]:
    words = [word for word in re.split(r"\W+", path) if word not in ("", "v1")]
    described: dict[str, Any] = {
        "operationId": "_".join([operation.method.lower(), *words]),
        "summary": operation.summary,
        "responses": _responses(operation, schemas),
        "security": [{"bearer": []}, {"header": []}] if operation.needs_key else [],
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in (operation.query or {}).items()
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        content = {"application/json": {"schema": schemas[operation.body, "validation"]}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _responses(operation: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(operation.answer, str):
        kind = "string" if operation.answer.startswith("text/") else "object"
        content[operation.answer] = {"schema": {"type": kind}}
    else:
        content["application/json"] = {"schema": schemas[operation.answer, "serialization"]}
    if operation.stream:
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no schema for events
    responses: dict[str, Any] = {"200": {"description": _TOLD[200], "content": content}}
    for status, model in statuses(operation).items():
        response: dict[str, Any] = {
            "description": _TOLD[status],
            "content": {"application/json": {"schema": schemas[model, "serialization"]}},
        }
        if status in _RETRIED:
            schema = {"type": "integer", "minimum": 1}
            response["headers"] = {"Retry-After": {"schema": schema, "description": "Seconds"}}
        responses[str(status)] = response
    return responses
