"""Tools for models whose chat template does not know them: told in words, and written out in the history."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treadle.text.tools import ToolFormat

_EXAMPLE = '{"argument": "value"}'


def written_call(format: ToolFormat, name: str, arguments: str) -> str:
    """One call as a model of ``format`` writes it. ``arguments``: JSON."""
    match format:
        case ToolFormat.HERMES:
            return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
        case ToolFormat.DEEPSEEK:
            call = f"function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
            call = f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>"
            return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"
        case ToolFormat.LLAMA3:
            return f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}'
        case ToolFormat.MISTRAL:
            return f'[TOOL_CALLS][{{"name": {json.dumps(name)}, "arguments": {arguments}}}]'


def instructions(format: ToolFormat, tools: str) -> str:
    """What a model is told about its tools. ``tools``: a line of JSON for each."""
    return (
        "You can call functions. These are the functions, with a JSON schema of the parameters of each:\n"
        f"{tools}\n"
        "When a function would help, answer with nothing but the call, written exactly like this, with the "
        "name of the function and its arguments as a JSON object:\n"
        f"{written_call(format, 'function_name', _EXAMPLE)}\n"
        "The result then comes in the next message. When no function is needed, answer as usual."
    )


def listed(tools: Sequence[Mapping[str, Any]]) -> str:
    """A line of JSON for each tool."""
    return "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)


def with_place(messages: Sequence[Mapping[str, Any]], place: str, role: str) -> list[dict[str, Any]]:
    """The messages with ``place`` where the instructions shall stand: at the end of the first message if it
    is the system's, or before the first one of the user (``role``: which of the two)."""
    chat = [dict(message) for message in messages]
    if role == "system":
        if chat and chat[0].get("role") in ("system", "developer"):
            chat[0]["content"] = f"{chat[0]['content']}\n\n{place}" if chat[0]["content"] else place
        else:
            chat.insert(0, {"role": "system", "content": place})
        return chat
    first = next((message for message in chat if message.get("role") == "user"), None)
    if first is None:
        chat.insert(0, {"role": "user", "content": place})
    else:
        first["content"] = f"{place}\n\n{first['content']}"
    return chat


def told(messages: Sequence[Mapping[str, Any]], format: ToolFormat) -> Iterator[dict[str, Any]]:
    """The messages with calls as text of the assistant, and results as messages of the user."""
    results: list[str] = []
    for message in messages:
        if message.get("role") == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls := message.get("tool_calls"):
            texts = [plain["content"]] if plain.get("content") else []
            for call in calls:
                function = call["function"]
                texts.append(written_call(format, function["name"], function["arguments"]))
            plain["content"] = "\n".join(texts)
        yield plain
    if results:
        yield {"role": "user", "content": "\n".join(results)}
