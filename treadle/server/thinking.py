"""How much a request lets the model reason."""

from __future__ import annotations

from typing import NamedTuple

from treadle.server.errors import ApiError
from treadle.server.schema import ChatBody
from treadle.server.service import Served

# Tokens of reasoning that an effort allows; None: any number.
EFFORTS: dict[str, int | None] = {
    "none": 0,
    "minimal": 256,
    "low": 1024,
    "medium": 4096,
    "high": None,
    "xhigh": None,
    "max": None,
}


class Thinking(NamedTuple):
    """``budget``: tokens in the think block at most, None for any number. ``enabled``: what the chat template
    is told, None for its own choice."""

    budget: int | None
    enabled: bool | None


def thinking_of(body: ChatBody, served: Served) -> Thinking:
    """All that ``body`` says about it, of which the least counts. Raises ApiError 400 for contradictions, and
    for reasoning asked of a model that does not reason."""
    wish = body.reasoning
    efforts = [effort for effort in (body.reasoning_effort, wish.effort if wish else None) if effort]
    limits = [EFFORTS[effort] for effort in efforts]
    limits += [wish.max_tokens if wish else None, body.thinking_token_budget]
    limits.append(None if body.thinking_budget_tokens == -1 else body.thinking_budget_tokens)
    budget = min((limit for limit in limits if limit is not None), default=None)
    enabled = wish.enabled if wish else None
    if enabled and budget == 0:
        raise _wrong("reasoning: enabled contradicts a budget of no tokens")
    if enabled and served.text.reasoning(thinking=False) is None:
        message = f"reasoning: {served.name} does not reason; do not ask it to"
        raise ApiError(400, message, param="reasoning", code="unsupported_parameter")
    if enabled is False or budget == 0:
        enabled, budget = False, 0
    told = (body.chat_template_kwargs or {}).get("enable_thinking")
    if told is not None and enabled is not None and told != enabled:
        raise _wrong("reasoning: contradicts enable_thinking in chat_template_kwargs; give one of them")
    return Thinking(budget, enabled)


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, param="reasoning", code="invalid_value")
