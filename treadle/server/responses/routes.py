"""``POST /v1/responses``, and the responses that are stored."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle.server.body import aside
from treadle.server.chat import start_chat
from treadle.server.errors import ApiError, json_response
from treadle.server.responses.answer import ResponseAnswer
from treadle.server.responses.items import CHAT_NAMES, chat_fields, input_items
from treadle.server.responses.schema import LOGPROBS, ResponsesBody
from treadle.server.responses.store import ResponseStore, Stored
from treadle.server.schema import ChatBody, validate
from treadle.server.service import body_of, key_of, service_of
from treadle.server.sse import EventStream, while_connected

MAX_PAGE = 100


async def create_response(request: HttpRequest) -> Response | EventStream:
    """A response to ``input`` and the conversation before it, through the same path as a chat completion."""
    service = service_of(request)
    body, size = await body_of(request, ResponsesBody)
    _check(body)
    store, owner = _store(request), _owner(request)
    before = _previous(store, owner, body.previous_response_id)
    items = [*(before.conversation if before else ()), *input_items(body, store, owner)]
    size += before.size if before else 0
    try:
        chat = await aside(size, lambda: validate(ChatBody, chat_fields(body, items)))
        job = await start_chat(request, chat, size)
    except ApiError as error:
        raise error.renamed(CHAT_NAMES) from None

    def keep(response: dict[str, Any]) -> None:
        if body.store is not False:
            store.add(owner, Stored(response, items))

    answer = ResponseAnswer(job, body, keep)
    if body.stream:
        return EventStream(answer.stream(), service.config.keep_alive, failed=answer.error_event)
    whole = await while_connected(request.receive, answer.complete())
    return json_response(whole) if whole is not None else Response(status_code=499)


async def stored_response(request: HttpRequest) -> Response:
    """``GET`` and ``DELETE /v1/responses/{id}``."""
    store, owner, id = _store(request), _owner(request), request.path_params["id"]
    stored = _found(store, owner, id)
    if request.method == "DELETE":
        store.delete(owner, id)
        return json_response({"id": id, "object": "response", "deleted": True})
    return json_response(stored.response)


async def stored_input_items(request: HttpRequest) -> Response:
    """``GET /v1/responses/{id}/input_items``: the conversation that was answered, latest first unless
    ``order=asc``."""
    items = _found(_store(request), _owner(request), request.path_params["id"]).items
    query = request.query_params
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MAX_PAGE):
        raise _wrong("limit", f"limit: must be 1 to {MAX_PAGE}; got {limit[:20]!r}")
    page = items if order == "asc" else items[::-1]
    if after is not None:
        place = next((at for at, item in enumerate(page, 1) if item["id"] == after), None)
        if place is None:
            raise _wrong("after", f"after: there is no item {after[:100]!r} in this response")
        page = page[place:]
    more, page = len(page) > int(limit), page[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    ends = {"first_id": first, "last_id": last}
    return json_response({"object": "list", "data": page, **ends, "has_more": more})


def _check(body: ResponsesBody) -> None:
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise _wrong("top_logprobs", f'top_logprobs needs include: ["{LOGPROBS}"]')
    if body.stream_options is not None and not body.stream:
        raise _wrong("stream_options", "stream_options needs stream: true")
    if body.stream_options is not None and body.stream_options.include_usage is not None:
        message = "stream_options.include_usage: the last event of a response always has the usage; remove it"
        raise ApiError(400, message, param="stream_options", code="unsupported_parameter")
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise _wrong("tool_choice", "tool_choice needs tools")


def _previous(store: ResponseStore, owner: str, id: str | None) -> Stored | None:
    if id is None:
        return None
    stored = store.get(owner, id)
    if stored is None:
        message = (
            f"previous_response_id: there is no stored response {id[:100]!r}; it was not stored, or deleted, "
            "or forgotten (see docs/api.md); send the conversation as input"
        )
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
    return stored


def _found(store: ResponseStore, owner: str, id: str) -> Stored:
    stored = store.get(owner, id)
    if stored is None:
        raise ApiError(404, f"there is no stored response {id[:100]!r}", code="response_not_found")
    return stored


def _store(request: HttpRequest) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def _owner(request: HttpRequest) -> str:
    return key_of(request).id


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
