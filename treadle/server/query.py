"""Parameters in the query of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from treadle.server.errors import ApiError


def check_query(request: Request, known: Mapping[str, Any]) -> None:
    """Raise ApiError 400 for a parameter that is not ``known`` (name to JSON schema), is not of its ``enum``,
    or comes twice where it cannot."""
    given = request.query_params.multi_items()
    names = [name for name, _ in given]
    for name, value in given:
        if name not in known:
            allowed = f"those of this path are {', '.join(known)}" if known else "this path takes none"
            message = f"{name[:50]} in the query is not a known parameter; {allowed}; remove it"
            raise ApiError(400, message, param=name[:50], code="unknown_parameter")
        if not name.startswith("include") and names.count(name) > 1:
            message = f"{name} comes {names.count(name)} times in the query; send it once"
            raise ApiError(400, message, param=name, code="invalid_value")
        allowed = known[name].get("enum")
        if allowed is not None and value not in allowed:
            message = f"{name}: must be {' or '.join(allowed)}; got {value[:50]!r}"
            raise ApiError(400, message, param=name, code="invalid_value")
