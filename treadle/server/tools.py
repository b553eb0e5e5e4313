"""Which tools a request offers, and how its calls are read."""

from __future__ import annotations

from treadle.server.errors import ApiError
from treadle.server.schema import ChatBody, NamedTool, TokenizeBody
from treadle.server.service import Served
from treadle.text.tools import ToolParser


def check_tools(body: ChatBody | TokenizeBody, served: Served) -> None:
    """Raises ApiError 400 for tools that this model cannot use."""
    if body.tools is None:
        return
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise _wrong("tools", f"tools: the name {twice!r} is given twice")
    if served.text.tools is None:
        message = f"tools: {served.name} cannot be told of tools in a way that is known here; remove them"
        raise ApiError(400, message, param="tools", code="unsupported_parameter")


def check_tool_choice(body: ChatBody) -> None:
    """Raises ApiError 400 for a choice among no tools, or of one that is not there."""
    for name, value in (("tool_choice", body.tool_choice), ("parallel_tool_calls", body.parallel_tool_calls)):
        if value is not None and value != "none" and body.tools is None:
            raise _wrong(name, f"{name} needs tools")
    if isinstance(body.tool_choice, NamedTool):
        names = [tool.function.name for tool in body.tools or ()]
        if (name := body.tool_choice.function.name) not in names:
            message = f"tool_choice: there is no tool {name!r}; the tools are {', '.join(names)}"
            raise _wrong("tool_choice", message)


def calls_tools(body: ChatBody) -> bool:
    """Whether the model is shown tools and may call them."""
    return body.tools is not None and body.tool_choice != "none"


def tool_parser(body: ChatBody, served: Served) -> ToolParser | None:
    """A new reader of calls, one per choice; None when calls are not wanted."""
    if served.text.tools is None or not calls_tools(body):
        return None
    return ToolParser(served.text.tools, single=body.parallel_tool_calls is False)


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
