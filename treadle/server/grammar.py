"""Structured output: from the fields of a body to a grammar that the engine follows.

Everything that can be wrong with a schema or grammar is found here, before the engine sees the request.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, grammar_from

from treadle.server.body import parse_json
from treadle.server.errors import ApiError
from treadle.server.schema import Sampling

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Blanks between the parts of JSON, and how many at most, so that a model cannot go on with blanks for ever.
_BLANKS = r"[\x20\x0A\x0D\x09]{1,64}"
# What a backslash may precede in a pattern besides letters and digits (ECMA-262, 22.2.1, unicode mode).
_ESCAPABLE = frozenset("^$\\.*+?()[]{}|/-")
_ESCAPES = re.compile(r"\\(.)", re.DOTALL)
_VALUES = frozenset(("enum", "const", "default", "examples"))  # keywords whose contents are no schemas


async def answer_grammar(body: Sampling) -> str | None:
    """The grammar that the answer must follow, None if it is free. Raises ApiError 400 naming the field that
    is wrong, with the compiler's message."""
    wishes = _wishes(body)
    if not wishes:
        return None
    if len(wishes) > 1:
        names = " and ".join(dict.fromkeys(name for name, _ in wishes))
        raise _wrong(wishes[1][0], f"{names} ask for several forms of the answer; ask for one")
    name, make = wishes[0]
    for other in ("ignore_eos", "min_tokens"):
        if getattr(body, other):
            message = f"{other} cannot be combined with {name}, which decides where the answer ends"
            raise _wrong(other, message)
    return await asyncio.to_thread(_compiled, name, make)


def schema_grammar(schema: dict[str, Any]) -> str:
    """The grammar of JSON values of a schema. Raises ValueError for one that is wrong or not supported."""
    _check_patterns(schema)
    options: JsonCompileOptions = {"whitespace_pattern": _BLANKS, "lenient": False}
    return checked(LLMatcher.grammar_from_json_schema(schema, overrides=options))


def checked(grammar: str) -> str:
    """``grammar`` itself. Raises ValueError with the compiler's message if it does not compile."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise ValueError(messages[0])
    if any("no tokenizer" in message for message in messages):
        raise ValueError("special tokens cannot be used; write what the text shall be")
    return grammar


def _compiled(name: str, make: Callable[[], str]) -> str:
    try:
        return make()
    except ValueError as error:
        raise _wrong(name, f"{name}: {' '.join(str(error).split())}") from None


def _wishes(body: Sampling) -> list[tuple[str, Callable[[], str]]]:
    """(field, maker of its grammar) of every field that asks for structure."""
    wishes: list[tuple[str, Callable[[], str]]] = []
    wanted = body.response_format
    if wanted is not None and wanted.type == "json_object":
        wishes.append(("response_format", partial(schema_grammar, {"type": "object"})))
    elif wanted is not None and wanted.type == "json_schema":
        wishes.append(("response_format", partial(schema_grammar, wanted.json_schema.schema_)))
    fields: list[tuple[str, str, Any]] = [
        ("guided_json", "json", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
    ]
    if (outputs := body.structured_outputs) is not None:
        inner = {
            "json": {"type": "object"} if outputs.json_object else outputs.json_,
            "regex": outputs.regex,
            "choice": outputs.choice,
            "grammar": outputs.grammar,
        }
        if all(value is None for value in inner.values()):
            message = "structured_outputs: give json, json_object: true, regex, choice or grammar"
            raise _wrong("structured_outputs", message)
        fields += [("structured_outputs", kind, value) for kind, value in inner.items()]
    return wishes + [(name, partial(_make, kind, value)) for name, kind, value in fields if value is not None]


def _make(kind: str, value: Any) -> str:
    match kind:
        case "json":
            schema = _parsed(value) if isinstance(value, str) else value
            return schema_grammar(schema)
        case "choice":
            return checked(grammar_from("choice", json.dumps(value)))
        case "regex":
            return checked(grammar_from("regex", value))
        case _:
            return checked(grammar_from("grammar", value))


def _parsed(schema: str) -> dict[str, Any]:
    try:
        loaded = parse_json(schema.encode())
    except ApiError as error:
        raise ValueError(
            error.message.replace("the body", "the schema").replace("the JSON body", "it")
        ) from None
    if not isinstance(loaded, dict):
        raise ValueError("the schema must be a JSON object")
    return loaded


def _check_patterns(schema: Any) -> None:
    """Refuse escapes that the regular expressions of JSON Schema do not have; the compiler takes them."""
    if isinstance(schema, list):
        for item in schema:
            _check_patterns(item)
    if not isinstance(schema, dict):
        return
    patterns = list(schema["patternProperties"]) if isinstance(schema.get("patternProperties"), dict) else []
    if isinstance(schema.get("pattern"), str):
        patterns.append(schema["pattern"])
    for pattern in patterns:
        for character in _ESCAPES.findall(pattern):
            if not character.isalnum() and character not in _ESCAPABLE:
                message = f"pattern {pattern!r}: \\{character} is not an escape; write {character} alone"
                raise ValueError(message)
    for key, value in schema.items():
        if key not in _VALUES:
            _check_patterns(value)


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
