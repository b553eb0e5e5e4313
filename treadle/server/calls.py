"""The grammar of tool calls: which functions an answer may call, and with which arguments.

Used where calls are more than the model's own choice: ``tool_choice`` required or a named function, functions
that are strict, and a form of the answer that is asked for beside tools.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

from treadle.server.errors import ApiError
from treadle.server.grammar import compiled, schema_grammar
from treadle.server.schema import ChatBody, NamedTool, Tool
from treadle.server.service import Served
from treadle.text.tools import ToolFormat

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


async def calls_grammar(body: ChatBody, served: Served, answer: str | None) -> str | None:
    """The grammar of an answer that may call ``body.tools``, None where it needs none. ``answer``: the
    grammar of an answer without calls, if that is not free. Raises ApiError 400 naming tools."""
    tools = body.tools or []
    free = body.tool_choice in (None, "auto")
    if free and answer is None and not any(tool.function.strict for tool in tools):
        return None
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            message = f"{name} cannot be combined with tool calls that must follow a grammar"
            raise ApiError(400, message, param=name, code="invalid_value")
    if isinstance(body.tool_choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == body.tool_choice.function.name]
    single = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
    writer = _Writer(served, tools, single)
    return await asyncio.to_thread(
        compiled, "tools", lambda: writer.grammar(free, answer), served, special=True
    )


class _Writer:
    """Writes the grammar of calls in the format of one model."""

    def __init__(self, served: Served, tools: list[Tool], single: bool) -> None:
        assert served.text.tools is not None
        self._format = served.text.tools
        self._text = served.text
        self._tools = tools
        self._single = single

    def grammar(self, free: bool, answer: str | None) -> str:
        """``free``: the answer may also be without calls. Raises ValueError for a schema that cannot be
        enforced."""
        arguments = [_arguments(tool, f"arguments_{at}") for at, tool in enumerate(self._tools)]
        rules = list(self._calls())
        parts: list[dict[str, Any]] = []
        if not free:
            rules.insert(0, "start: calls")
        elif answer is None:
            rules[:0] = self._free()
        else:
            parts = _parts(answer)
            rules.insert(0, "start: @answer | calls")
        top = {"name": "top", "lark_grammar": "\n".join(rules)}
        return json.dumps({"grammars": [top, *arguments, *parts]}, ensure_ascii=False)

    def _mark(self, text: str) -> str:
        id = self._text.token_id(text)
        return json.dumps(text, ensure_ascii=False) if id is None else f"<[{id}]>"

    def _free(self) -> Iterator[str]:
        """Rules of an answer that is free until a call begins."""
        if self._format is ToolFormat.LLAMA3:  # where only the beginning of an answer can be a call
            yield "start: ANSWER? | calls"
            yield r"ANSWER: /\s*[^\s{](.|\n)*/"
            return
        begin = self._format.marks[0]
        if self._text.token_id(begin) is not None:
            yield "start: TEXT? | TEXT? calls"
        else:
            yield "start: TEXT? | lead rest"
            yield f"lead[lazy]: TEXT? {json.dumps(begin, ensure_ascii=False)}"
        yield r"TEXT: /(.|\n)+/"

    def _calls(self) -> Iterator[str]:
        """Rules of one call or more: ``calls`` begins with the mark, after which ``rest`` comes."""
        call = " | ".join(f"call_{at}" for at in range(len(self._tools)))
        yield f"call: {call}"
        begin, more = self._mark(self._format.marks[0]), "" if self._single else "*"
        match self._format:
            case ToolFormat.HERMES:
                end = self._mark("</tool_call>")
                yield f"calls: {begin} rest"
                again = f' ("\\n" {begin} "\\n" call "\\n" {end})*' if more else ""
                yield f'rest: "\\n" call "\\n" {end}{again}'
            case ToolFormat.DEEPSEEK:
                inner, end = self._mark("<｜tool▁call▁begin｜>"), self._mark("<｜tool▁call▁end｜>")
                yield f"calls: {begin} rest"
                again = f' ("\\n"? {inner} call {end})*' if more else ""
                yield f"rest: {inner} call {end}{again} {self._mark('<｜tool▁calls▁end｜>')}"
            case ToolFormat.LLAMA3:
                lead = f"{begin}? " if begin.startswith("<[") else ""
                yield f"calls: {lead}call" + (' ("; " call)*' if more else "")
            case ToolFormat.MISTRAL if self._text.token_id("[ARGS]") is not None:
                yield f"calls: {begin} rest"
                yield "rest: call" + (f" ({begin} call)*" if more else "")
            case ToolFormat.MISTRAL:
                yield f"calls: {begin} rest"
                yield 'rest: "[" call' + (' (", " call)*' if more else "") + ' "]"'
        for at, tool in enumerate(self._tools):
            yield f"call_{at}: {self._call(tool.function.name, f'@arguments_{at}')}"

    def _call(self, name: str, arguments: str) -> str:
        """One call without the marks around it."""
        match self._format:
            case ToolFormat.DEEPSEEK:
                sep = self._mark("<｜tool▁sep｜>")
                fence = json.dumps(f"{name}\n```json\n")
                fenced = f'"function" {sep} {fence} {arguments} "\\n```"'
                return f"{fenced} | {json.dumps(name)} {sep} {arguments}"
            case ToolFormat.MISTRAL if self._text.token_id("[ARGS]") is not None:
                return f"{json.dumps(name)} {self._mark('[ARGS]')} {arguments}"
            case _:
                key = "parameters" if self._format is ToolFormat.LLAMA3 else "arguments"
                head = f'{{"name": {json.dumps(name)}, "{key}": '
                return f'{json.dumps(head)} {arguments} "}}"'


def _arguments(tool: Tool, name: str) -> dict[str, Any]:
    """The grammar of the arguments of a function: its schema, to the letter if it is strict, else as far as
    that can be enforced."""
    function = tool.function
    schema = _NO_ARGUMENTS if function.parameters is None else {"type": "object", **function.parameters}
    try:
        grammar = schema_grammar(schema, lenient=not function.strict)
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        if failed:
            raise ValueError(messages[0])
    except ValueError as error:
        if function.strict:
            raise ValueError(f"{function.name}: {error}") from None
        grammar = schema_grammar({"type": "object"})
    return {**_parts(grammar)[0], "name": name}


def _parts(grammar: str) -> list[dict[str, Any]]:
    """The grammars that a compiled form consists of, the first one under the name ``answer``."""
    parts: list[dict[str, Any]]
    parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return [{**parts[0], "name": "answer"}, *parts[1:]]
