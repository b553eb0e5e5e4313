"""Structured output: from the fields of a body to a grammar that the engine follows.

Everything that can be wrong with a schema or grammar is found here, before the engine sees the request.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, grammar_from

from treadle.engine.vocabulary import complaint, matcher
from treadle.server.body import parse_json
from treadle.server.errors import ApiError
from treadle.server.schema import Sampling
from treadle.server.service import Served

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Blanks between the parts of JSON, and how many at most, so that a model cannot go on with blanks for ever.
_BLANKS = r"[\x20\x0A\x0D\x09]{1,64}"
# What a backslash may precede in a pattern besides letters and digits (ECMA-262, 22.2.1, unicode mode).
_ESCAPABLE = frozenset("^$\\.*+?()[]{}|/-")
_ESCAPES = re.compile(r"\\(.)", re.DOTALL)
_UNKNOWN = re.compile(r"Unimplemented keys: \[(.*)\]")  # the compiler's message about keywords of a schema
MAX_GRAMMAR = 2**17  # bytes; working out the first token takes about a second for eight times as many
# Beginnings of answers on which a grammar is tried out, and their tokens.
_WAYS, _STEPS = 4, 8
_VALUES = frozenset(("enum", "const", "default", "examples"))  # keywords whose contents are no schemas


async def answer_grammar(body: Sampling, served: Served) -> str | None:
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
    return await asyncio.to_thread(compiled, name, make, served)


def schema_grammar(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """The grammar of JSON values of a schema. ``lenient``: keywords that cannot be enforced are left out.
    Raises ValueError for a schema that is wrong or not supported."""
    _check_patterns(schema)
    options: JsonCompileOptions = {"whitespace_pattern": _BLANKS, "lenient": lenient}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def choice_grammar(choices: list[str]) -> str:
    """The grammar of one of ``choices``: as one terminal, which takes any number of them."""
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))


def checked(grammar: str, tokens: LLTokenizer, *, special: bool = False) -> str:
    """``grammar`` itself. Raises ValueError, with the compiler's message where it has one, if answers of
    ``tokens`` cannot follow it. ``special``: it may use special tokens."""
    if (size := len(grammar.encode())) > MAX_GRAMMAR:
        raise ValueError(
            f"makes a grammar of {size} bytes; at most {MAX_GRAMMAR} can be followed; shorten it"
        )
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed and (keywords := _UNKNOWN.fullmatch(messages[0].strip())):
        raise ValueError("not supported: " + keywords[1].replace('"', ""))
    if failed:
        raise ValueError(messages[0])
    if not special and any("no tokenizer" in message for message in messages):
        raise ValueError("special tokens cannot be used; write what the text shall be")
    start = matcher(tokens, grammar)
    for way in range(_WAYS):
        _try_out(start.deep_copy(), Random(way))
    return grammar


def _try_out(trial: LLMatcher, random: Random) -> None:
    """Write the beginning of some answer. Raises ValueError if the grammar turns out too large for that."""
    for _ in range(_STEPS):
        mask = np.frombuffer(trial.compute_bitmask(), np.uint8)
        if trial.is_error() and "NoExtensionBias" in (trial.get_error() or ""):
            raise ValueError("no answer can follow it: a rule leads only to itself, or nothing fits it")
        if trial.is_error():
            raise ValueError(f"is too large to be followed: {complaint(trial)}")
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if trial.is_stopped() or not len(allowed):
            return
        trial.consume_token(int(allowed[random.randrange(len(allowed))]))


def compiled(name: str, make: Callable[[], str], served: Served, *, special: bool = False) -> str:
    """The grammar that ``make`` makes. Raises ApiError 400 with the reason if it makes none that can be
    followed; see ``checked``."""
    try:
        return checked(make(), served.text.grammar_tokens, special=special)
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
            return choice_grammar(value)
        case "regex":
            return grammar_from("regex", value)
        case _:
            return grammar_from("grammar", value)


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
