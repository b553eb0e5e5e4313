"""Items of the Responses API: from those of a request to a chat body, and from blocks to items."""

from __future__ import annotations

import base64
import secrets
from typing import Any

from treadle.server.blocks import Block
from treadle.server.errors import ApiError
from treadle.server.responses.schema import ENCRYPTED, LOGPROBS, FunctionTool, ItemReference, ResponsesBody
from treadle.server.responses.store import Item, ResponseStore
from treadle.server.schema import Strict

_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
_KINDS = {"text": "message", "reasoning": "reasoning", "call": "function_call"}
_SAME = (  # fields that chat completions have under the same name
    "model", "temperature", "top_p", "parallel_tool_calls", "seed", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "priority", "cache_salt", "chat_template_kwargs",
)  # fmt: skip
CHAT_NAMES = {  # names of chat fields in errors
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


def new_id(kind: str) -> str:
    """An id for an item of the type ``kind``."""
    return _PREFIXES[kind] + secrets.token_hex(24)


def plain(model: Strict | None) -> Any:
    """A part of a body as JSON, without what was not given."""
    return model.model_dump(by_alias=True, exclude_unset=True) if model is not None else None


def input_items(body: ResponsesBody, store: ResponseStore, owner: str) -> list[Item]:
    """The items of ``input``, each with an id; references are replaced. Raises ApiError 400 for one that
    leads nowhere."""
    if isinstance(body.input, str):
        content = [{"type": "input_text", "text": body.input}]
        return [{"id": new_id("message"), "type": "message", "role": "user", "content": content}]
    items: list[Item] = []
    for index, given in enumerate(body.input):
        if isinstance(given, ItemReference):
            item = store.item(owner, given.id)
            if item is None:
                message = f"input[{index}]: there is no stored item {given.id[:100]!r}"
                raise ApiError(400, message, param="input", code="item_not_found")
        else:
            item = {"type": given.type, **given.model_dump(exclude_none=True)}
            item["id"] = item.get("id") or new_id(given.type)
        items.append(item)
    return items


def chat_fields(body: ResponsesBody, items: list[Item]) -> dict[str, Any]:
    """The body of a chat completion that asks the same of the whole conversation ``items``."""
    fields = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    fields["messages"] = _messages(body.instructions, items)
    fields["reasoning_format"] = "auto"
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if LOGPROBS in (body.include or ()):
        fields["logprobs"], fields["top_logprobs"] = True, body.top_logprobs or 0
    if body.tools:
        fields["tools"] = [{"type": "function", "function": _function(tool)} for tool in body.tools]
    choice = body.tool_choice
    if choice is not None and (body.tools or choice not in ("none", "auto")):
        named = {"type": "function", "function": {"name": getattr(choice, "name", "")}}
        fields["tool_choice"] = choice if isinstance(choice, str) else named
    if not body.tools:
        fields.pop("parallel_tool_calls", None)
    fields.update(_reasoning(body))
    if body.text is not None and body.text.format is not None:
        format = plain(body.text.format)
        kind = format.pop("type")
        fields["response_format"] = {"type": kind, **({kind: format} if format else {})}
    return fields


def _function(tool: FunctionTool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True, exclude={"type"})


def _reasoning(body: ResponsesBody) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.reasoning is not None and body.reasoning.max_tokens is not None:
        fields["reasoning"] = {"max_tokens": body.reasoning.max_tokens}
    return fields


def _messages(instructions: str | None, items: list[Item]) -> list[dict[str, Any]]:
    """Items as messages: what the assistant thought, said and called in one turn is one message."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    turn: dict[str, Any] | None = None  # of the assistant, still open

    def taking(*fields: str) -> dict[str, Any]:
        """The open turn, or a new one if it has one of ``fields`` already."""
        nonlocal turn
        if turn is None or any(field in turn for field in fields):
            turn = {"role": "assistant"}
            messages.append(turn)
        return turn

    for index, item in enumerate(items):
        match item["type"]:
            case "reasoning":
                text = _thoughts(index, item)
                taking("reasoning_content", "content", "tool_calls")["reasoning_content"] = text
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                calls = taking().setdefault("tool_calls", [])
                calls.append({"id": item["call_id"], "type": "function", "function": function})
            case "function_call_output":
                turn = None
                text = _text(item["output"])
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
            case _ if item["role"] == "assistant":
                taking("content", "tool_calls")["content"] = _text(item["content"])
            case _:
                turn = None
                text = _text(item["content"])
                if item["role"] != "user" and messages and messages[-1]["role"] == "system":
                    messages[-1]["content"] += "\n\n" + text  # many templates take one only
                else:
                    role = "user" if item["role"] == "user" else "system"
                    messages.append({"role": role, "content": text})
    for message in messages:
        if "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _thoughts(index: int, item: Item) -> str:
    if item.get("content"):
        return _text(item["content"])
    if item.get("encrypted_content"):
        try:
            return base64.b64decode(item["encrypted_content"], validate=True).decode()
        except ValueError:
            message = f"input[{index}].encrypted_content: not from this server; leave the item out"
            raise ApiError(400, message, param="input", code="invalid_value") from None
    return _text(item["summary"])


def output_item(block: Block, id: str, body: ResponsesBody, status: str) -> Item:
    """A block as an item. While it is in progress its content is left to the events."""
    item: Item = {"id": id, "type": _KINDS[block.kind], "status": status}
    begun = status == "in_progress"
    match block.kind:
        case "text":
            item |= {"role": "assistant", "content": [] if begun else [text_part(block)]}
        case "call":
            item |= {"call_id": block.id, "name": block.name, "arguments": "" if begun else block.text}
        case "reasoning":
            summarised = in_summary(body)
            item["summary"] = [reasoning_part(block, body)] if summarised and not begun else []
            if not summarised:
                item["content"] = [] if begun else [reasoning_part(block, body)]
            if ENCRYPTED in (body.include or ()):
                item["encrypted_content"] = None if begun else base64.b64encode(block.text.encode()).decode()
    return item


def in_summary(body: ResponsesBody) -> bool:
    """Whether reasoning is asked for as a summary."""
    return body.reasoning is not None and body.reasoning.summary is not None


def text_part(block: Block) -> dict[str, Any]:
    """The content of a message."""
    logprobs = [token.chat() for token in block.tokens]
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}


def reasoning_part(block: Block, body: ResponsesBody) -> dict[str, Any]:
    """The content of a reasoning item, or its summary."""
    return {"type": "summary_text" if in_summary(body) else "reasoning_text", "text": block.text}


def item_id(kind: str) -> str:
    """An id for the item that a block becomes."""
    return new_id(_KINDS[kind])
