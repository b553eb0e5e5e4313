"""Jinja as Hugging Face sets it up for chat templates, with bounds: templates come with models and are not
trusted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from treadle.core import TreadleError

MAX_TURNS = 1_000_000  # loop turns and macro calls of one rendering
MAX_TEXT = 64 * 1024 * 1024  # characters of one rendering, or of one string inside it

_WIDE = re.compile(r"\d{4,}|\*")  # field widths of printf-style formats that could fill the memory

_left: ContextVar[int] = ContextVar("turns left", default=MAX_TURNS)


class _TemplateRefuses(jinja2.TemplateError):
    """Raised by ``raise_exception``: its text is meant for the user."""


class Template:
    """A compiled chat template. Raises TreadleError with one line for a template that is not valid Jinja."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _Environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TreadleError(f"the model's chat template is not valid: {_line(error)}") from None

    def render(self, variables: dict[str, Any]) -> str:
        """Text of the template. Raises TreadleError with the template's own message, or what went wrong in
        it."""
        token = _left.set(MAX_TURNS)
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                size = _bounded(size + len(part))
        except _TemplateRefuses as error:
            raise TreadleError(_line(error)) from None
        except TreadleError:
            raise
        except Exception as error:  # whatever a template's expressions raise
            raise TreadleError(
                f"the model's chat template cannot render these messages: {_line(error)}"
            ) from None
        finally:
            _left.reset(token)
        return "".join(parts)


def _line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:500]


def _bounded(size: int) -> int:
    if size > MAX_TEXT:
        raise TreadleError(f"the model's chat template makes more than {MAX_TEXT} characters; it was stopped")
    return size


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        for name in ("center", "indent", "format", "wordwrap"):
            self.filters[name] = _small_numbers(self.filters[name])
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        bounded: nodes.Template = _Bounds().visit(tree)
        return bounded

    def turn(self) -> str:
        """Count one turn of a loop or call of a macro."""
        left = _left.get() - 1
        if left < 0:
            raise TreadleError(f"the model's chat template loops more than {MAX_TURNS} times; it was stopped")
        _left.set(left)
        return ""

    def joined(self, *values: Any) -> str:
        """The operator ``~``."""
        texts = [str(value) for value in values]
        _bounded(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse results that would fill the memory."""
        if operator == "+" and isinstance(left, (str, list)) and isinstance(right, (str, list)):
            _bounded(len(left) + len(right))
        elif operator == "*" and (
            isinstance(left, (str, list, tuple)) or isinstance(right, (str, list, tuple))
        ):
            text, count = (left, right) if isinstance(left, (str, list, tuple)) else (right, left)
            _bounded(len(text) * max(int(count), 0))
        elif operator == "**" and (abs(left) > 2**32 or abs(right) > 64):
            raise jinja2.TemplateRuntimeError("the numbers of ** are too large")
        elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise jinja2.TemplateRuntimeError("the field width of % is too large")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Calls of methods such as ``ljust`` take no huge numbers, and their results stay bounded."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and value > MAX_TURNS:
                raise jinja2.TemplateRuntimeError(f"the number {value} is too large")
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            _bounded(len(result))
        return result


class _Bounds(NodeTransformer):
    """Makes loops and macros count their turns, and ``~`` check its result."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _count(node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _count(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _environment_call("joined", node.nodes, node.lineno)


def _count(line: int) -> nodes.Node:
    return nodes.Output([_environment_call("turn", [], line)]).set_lineno(line)


def _environment_call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Expr:
    target = nodes.EnvironmentAttribute(name)
    call = nodes.Call(target, arguments, [], None, None)
    for node in (target, call):
        node.set_lineno(line)
    return call


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it only passes it on."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass_on"), [], [], body).set_lineno(line)

    def _pass_on(self, caller: Macro) -> str:
        return str(caller())


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefuses(message)


def _small_numbers(filter_: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(value: Any, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, int) and argument > 1000:
                raise jinja2.TemplateRuntimeError(f"the number {argument} is too large")
        return filter_(value, *args, **kwargs)

    return guarded
