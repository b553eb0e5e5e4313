"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle.server.body import aside
from treadle.server.errors import ApiError, json_response
from treadle.server.generation import token_text
from treadle.server.prompt import encode_chat
from treadle.server.schema import DetokenizeBody, TokenizeBody
from treadle.server.service import Served, body_of, model_for
from treadle.server.tools import check_tools


async def tokenize(request: HttpRequest) -> Response:
    """The ids that a prompt or a conversation becomes, exactly as the completion calls would use them."""
    body, size = await body_of(request, TokenizeBody)
    served = model_for(request, body.model, None)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give either prompt or messages", param="prompt", code="invalid_value")
    for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
        if body.prompt is not None and getattr(body, name) is not None:
            message = f"{name}: belongs to messages; remove it, or give messages instead of prompt"
            raise ApiError(400, message, param=name, code="invalid_value")
    if body.messages is not None and body.add_special_tokens:
        message = "add_special_tokens: belongs to prompt; a chat template writes all control tokens itself"
        raise ApiError(400, message, param="add_special_tokens", code="invalid_value")
    if body.prompt is None:
        check_tools(body, served)
    return await aside(size, lambda: json_response(_tokens(served, body)))


def _tokens(served: Served, body: TokenizeBody) -> dict[str, Any]:
    if body.prompt is not None:
        ids = served.text.encode(body.prompt, add_special=body.add_special_tokens is not False)
    else:
        ids = encode_chat(served, body, body.continue_final_message or False, body.tools).ids
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": served.context}
    if body.return_token_strs:
        answer["token_strs"] = [token_text(served.text.token_bytes(id)) for id in ids]
    return answer


async def detokenize(request: HttpRequest) -> Response:
    """The text of token ids."""
    body, size = await body_of(request, DetokenizeBody)
    served = model_for(request, body.model, None)
    if body.tokens and max(body.tokens) >= served.text.vocab_size:
        message = f"tokens: token ids go from 0 to {served.text.vocab_size - 1}; got {max(body.tokens)}"
        raise ApiError(400, message, param="tokens", code="invalid_value")
    return await aside(size, lambda: json_response({"prompt": served.text.decode(body.tokens)}))
