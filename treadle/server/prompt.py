"""From the messages of a body to the ids of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.core import TreadleError
from treadle.server.errors import ApiError
from treadle.server.schema import ChatBody, Message, TextPart, TokenizeBody, Tool
from treadle.server.service import Served
from treadle.server.textside import ChatOptions, ChatPrompt

_RESERVED = frozenset(
    ("self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
)
_SHRINK = 4  # bytes of text that may become one when characters are composed (Unicode NFC)


def check_size(served: Served, size: int, param: str) -> None:
    """Refuse ``size`` bytes of text that cannot fit into the context, before they are tokenised."""
    least = size // (_SHRINK * served.text.longest_token)
    if least >= served.context:
        raise ApiError(
            400,
            f"{param}: {size} bytes of text are at least {least} tokens, but the context is {served.context} "
            "tokens; shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )


def as_many(raw: str | list[Any], param: str) -> list[str | list[int]]:
    """The texts and lists of token ids that ``raw`` stands for: one, or a list of one kind. Raises ApiError
    400 for a mixed one."""
    if isinstance(raw, str):
        return [raw]
    if all(isinstance(item, int) for item in raw):
        return [raw]
    if all(isinstance(item, str) for item in raw) or all(isinstance(item, list) for item in raw):
        return list(raw)
    message = f"{param}: mixes texts, token ids and lists; use one kind"
    raise ApiError(400, message, param=param, code="invalid_value")


def token_ids(
    item: str | list[int], number: int, served: Served, param: str, encode: Callable[[str], list[int]]
) -> list[int]:
    """The ids of a text by ``encode``, or ids as they are. Raises ApiError 400 if there are none, if one is
    not in the vocabulary, or if a text cannot fit into the context."""
    if not item:
        message = f"{param}: number {number} is empty; give at least one character or token"
        raise ApiError(400, message, param=param, code="invalid_value")
    if isinstance(item, str):
        check_size(served, len(item.encode()), param)
    ids = encode(item) if isinstance(item, str) else item
    if max(ids) >= served.text.vocab_size:
        message = f"{param}: token ids go from 0 to {served.text.vocab_size - 1}; got {max(ids)}"
        raise ApiError(400, message, param=param, code="invalid_value")
    return ids


def size_of_questions(body: ChatBody) -> int:
    """Bytes of what users and tools say, which every template shows, if not always the blanks around it."""
    told = (message for message in body.messages if message.role in ("user", "tool"))
    return sum(len(_text(message.content).strip().encode()) for message in told)


def _text(content: str | list[TextPart] | None) -> str:
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def encode_chat(
    served: Served,
    body: ChatBody | TokenizeBody,
    continue_final: bool,
    tools: list[Tool] | None,
    thinking: bool | None = None,
) -> ChatPrompt:
    """The prompt of ``body.messages`` with ``tools``. ``thinking``: what to tell the template. Raises
    ApiError 400 if they make no sense or the template refuses them."""
    messages = [_plain(index, message) for index, message in enumerate(body.messages or [])]
    if continue_final and (body.add_generation_prompt or messages[-1]["role"] != "assistant"):
        message = (
            "continue_final_message needs a last message of the assistant and add_generation_prompt: false"
        )
        raise ApiError(400, message, param="continue_final_message", code="invalid_value")
    _check_kwargs(body.chat_template_kwargs or {})
    options = ChatOptions(
        add_generation_prompt=body.add_generation_prompt is not False and not continue_final,
        continue_final_message=continue_final,
        tools=[tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools or ()],
        template_kwargs={
            **({} if thinking is None else {"enable_thinking": thinking}),
            **(body.chat_template_kwargs or {}),
        },
    )
    try:
        return served.text.encode_chat(messages, options)
    except TreadleError as error:
        raise ApiError(400, f"messages: {error}", param="messages", code="template_error") from None


def _check_kwargs(given: dict[str, Any]) -> None:
    """Template variables may be anything but those that have fields of their own."""
    for name in given:
        if name in _RESERVED or not name.isidentifier():
            message = f"chat_template_kwargs: {name[:50]!r} cannot be set there"
            raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")


def _plain(index: int, message: Message) -> dict[str, Any]:
    """The form that chat templates know: content as one text, absent fields left out."""
    path = f"messages[{index}]"
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = message.content
    plain["content"] = content if content is None else _text(content)
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise ApiError(400, f"{path}.content is required", param="messages", code="invalid_value")
    if message.tool_calls and message.role != "assistant":
        text = f"{path}.tool_calls: only messages of the assistant may have tool calls"
        raise ApiError(400, text, param="messages", code="invalid_value")
    if (message.role == "tool") != (message.tool_call_id is not None):
        text = f"{path}.tool_call_id: required in messages of the role tool, and allowed only there"
        raise ApiError(400, text, param="messages", code="invalid_value")
    if message.tool_calls:
        plain["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        plain["reasoning_content"] = reasoning
    return plain
