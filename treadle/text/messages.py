"""Checks messages in OpenAI's shape and gives them the one form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from treadle.core import TreadleError
from treadle.text.reasoning import CLOSE, OPEN, split_reasoning

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class CallStyle(NamedTuple):
    """What a template expects of an assistant's message with tool calls."""

    objects: bool  # arguments as objects rather than as JSON text
    empty_content: str | None


CALL_STYLES = (CallStyle(True, ""), CallStyle(False, ""), CallStyle(True, None), CallStyle(False, None))


def normalise(
    messages: Sequence[Mapping[str, Any]], template: str, style: CallStyle, *, keep_last: bool = False
) -> list[dict[str, Any]]:
    """Messages with text as content and reasoning apart from the answer, None values left out.

    keep_last: reasoning of the last message stays in its content. Raises TreadleError naming the message and
    field at fault.
    """
    if not messages:
        raise TreadleError("messages: must not be empty")
    chat = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if role not in ROLES:
            raise TreadleError(f"{where}.role: must be one of {', '.join(ROLES)}, not {role!r}")
        plain = {key: value for key, value in message.items() if value is not None}
        calls = plain.get("tool_calls")
        if role == "assistant" and calls:
            plain["tool_calls"] = [
                _call(call, f"{where}.tool_calls[{i}]", style.objects) for i, call in enumerate(calls)
            ]
        plain["content"] = _text(message.get("content"), where, optional=bool(role == "assistant"))
        if role == "assistant":
            _part_reasoning(plain, template, whole=keep_last and index == len(messages) - 1)
            if calls and style.empty_content is None and plain["content"]:
                # Such a template shows calls only where there is no content beside them.
                told = {key: value for key, value in plain.items() if key != "tool_calls"}
                chat.append(told)
                plain = {"role": role, "content": None, "tool_calls": plain["tool_calls"]}
            elif calls and not plain["content"]:
                plain["content"] = style.empty_content
        chat.append(plain)
    return chat


def _text(content: Any, where: str, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, (list, tuple)):
        raise TreadleError(f"{where}.content: must be text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            allowed = "not supported by this model; only 'text' is"
            raise TreadleError(f"{where}.content[{index}]: parts of type {kind!r} are {allowed}")
        if not isinstance(part.get("text"), str):
            raise TreadleError(f"{where}.content[{index}].text: must be text")
        texts.append(part["text"])
    return "".join(texts)


def _part_reasoning(message: dict[str, Any], template: str, whole: bool) -> None:
    """Reasoning inside the content, or in ``reasoning_content`` or ``reasoning``, ends up in one place.

    Templates that know a rule for it get ``reasoning_content``; a template without one sees the answer only.
    """
    reasoning = message.pop("reasoning_content", None) or message.get("reasoning")
    message.pop("reasoning", None)
    content = message["content"]
    if whole:
        if isinstance(reasoning, str) and reasoning:
            message["content"] = f"{OPEN}\n{reasoning}" + (f"\n{CLOSE}\n\n{content}" if content else "")
        return
    if CLOSE in content and CLOSE in template:
        before, _, content = content.rpartition(CLOSE)
        inline = split_reasoning(before, started=True).reasoning
        message["content"] = content.lstrip("\n")
        reasoning = reasoning or inline
    if isinstance(reasoning, str) and reasoning and "reasoning_content" in template:
        message["reasoning_content"] = reasoning


def _call(call: Any, where: str, parse: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TreadleError(f"{where}.function.name: must be text")
    arguments = function.get("arguments", "{}")
    if parse and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise TreadleError(f"{where}.function.arguments: not valid JSON: {error}") from None
    elif not parse and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "type": call.get("type", "function"), "function": {**function, "arguments": arguments}}
