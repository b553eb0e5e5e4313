"""From bodies of the Messages API to chat bodies."""

from __future__ import annotations

import json
from typing import Any

from treadle.server.anthropic.schema import (
    CountBody,
    Message,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ThinkingOff,
    ThinkingOn,
    ToolResultBlock,
    ToolUseBlock,
)
from treadle.server.errors import ApiError

CHAT_NAMES = {  # names of chat fields in errors
    "reasoning_effort": "thinking",
    "reasoning": "thinking",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "stop": "stop_sequences",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_PARAGRAPH = "\n\n"  # between blocks of text, which are texts of their own


def chat_fields(body: CountBody) -> dict[str, Any]:
    """The body of a chat completion that asks the same. Raises ApiError 400 for messages that make no
    sense."""
    fields: dict[str, Any] = {"model": body.model, "reasoning_format": "auto"}
    system = [{"role": "system", "content": _text(body.system)}] if body.system else []
    fields["messages"] = system + [
        plain for index, message in enumerate(body.messages) for plain in _messages(index, message)
    ]
    if body.messages[-1].role == "assistant":
        _check_prefill(body)
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody):
        fields |= {name: value for name in _SAME if (value := getattr(body, name)) is not None}
        if body.stop_sequences:
            fields["stop"] = body.stop_sequences
    fields |= _tools(body)
    fields |= _thinking(body)
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


_SAME = ("max_tokens", "temperature", "top_p", "top_k")


def _tools(body: CountBody) -> dict[str, Any]:
    choice = body.tool_choice
    if not body.tools:
        if choice is not None and choice.type not in ("auto", "none"):
            raise _wrong("tool_choice", "tool_choice needs tools")
        return {}
    tools = []
    for tool in body.tools:
        function = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        function["parameters"] = tool.input_schema
        tools.append({"type": "function", "function": function})
    fields: dict[str, Any] = {"tools": tools}
    if choice is not None:
        if choice.type == "tool":
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            fields["tool_choice"] = _CHOICES[choice.type]
        if choice.disable_parallel_tool_use is not None:
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _thinking(body: CountBody) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if isinstance(body.thinking, ThinkingOff):
        fields["reasoning_effort"] = "none"
    if isinstance(body.thinking, ThinkingOn):
        if isinstance(body, MessagesBody) and body.thinking.budget_tokens >= body.max_tokens:
            message = (
                f"thinking.budget_tokens: must be less than max_tokens, {body.max_tokens}; "
                f"got {body.thinking.budget_tokens}"
            )
            raise _wrong("thinking", message)
        fields["reasoning"] = {"max_tokens": body.thinking.budget_tokens, "enabled": True}
    return fields


def _check_prefill(body: CountBody) -> None:
    if body.thinking is not None and not isinstance(body.thinking, ThinkingOff):
        raise _wrong("messages", "messages: an answer that is begun already cannot have thinking")
    content = body.messages[-1].content
    if not isinstance(content, str) and not all(isinstance(block, TextBlock) for block in content):
        at = len(body.messages) - 1
        raise _wrong("messages", f"messages[{at}]: the beginning of the answer can only be text")


def _messages(index: int, message: Message) -> list[dict[str, Any]]:
    """One turn as messages of a chat: each result of a tool becomes one of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(message.content):
        mine = "user" if isinstance(block, ToolResultBlock) else "assistant"
        if not isinstance(block, TextBlock) and message.role != mine:
            text = f"messages[{index}].content[{at}]: {block.type} blocks belong into messages of the {mine}"
            raise _wrong("messages", text)
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                if texts:
                    text = f"messages[{index}].content[{at}]: tool_result blocks come before text"
                    raise _wrong("messages", text)
                content = ("Error: " if block.is_error else "") + _text(block.content or "")
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    plain: dict[str, Any] = {"role": message.role}
    if texts or not (calls or results):
        plain["content"] = _PARAGRAPH.join(texts)
    if thoughts:
        plain["reasoning_content"] = "".join(thoughts)
    if calls:
        plain["tool_calls"] = calls
    return [*results, plain] if len(plain) > 1 else results


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else _PARAGRAPH.join(block.text for block in content)


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
