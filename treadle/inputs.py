"""What callers hand to ``treadle.LLM``, checked where it comes in: a TreadleError names the parameter, its
value and what is allowed. Ranges are checked by the engine.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher

from treadle.core import SamplingParams, TreadleError

# What may stand in a field of SamplingParams, by its type.
_ALLOWED: dict[Any, str] = {
    int: "a whole number",
    int | None: "a whole number or None",
    float: "a number",
    bool: "True or False",
    str | None: "a text or None",
    str | tuple[str, ...]: "a text, or a tuple of texts",
    tuple[int, ...]: "a tuple of token ids, which are whole numbers",
    dict[int, float]: "a dict from token ids, which are whole numbers, to numbers",
}
_MESSAGES = "a list of messages such as {'role': 'user', 'content': 'Hello'}"


def whole_number(name: str, value: Any, least: int) -> int:
    """``value`` itself, which must be a whole number of at least ``least``."""
    number = _index(value)
    if number is None or number < least:
        raise TreadleError(f"{name} is {reprlib.repr(value)}; it must be a whole number, at least {least}")
    return number


def sampling(params: SamplingParams) -> SamplingParams:
    """``params`` with every value of the type that its field declares; NumPy's count as Python's."""
    if not isinstance(params, SamplingParams):
        raise TreadleError(f"params is {reprlib.repr(params)}; it must be a SamplingParams")
    values = {}
    for field in msgspec.structs.fields(SamplingParams):
        given = _plain(getattr(params, field.name))
        try:
            values[field.name] = msgspec.convert(given, field.type)
            valid = field.name == "seed" or not _huge(given)  # the sampler takes seeds of 64 bits
        except msgspec.ValidationError:
            valid = False
        if not valid:
            allowed = _ALLOWED.get(field.type) or f"one of {', '.join(map(repr, field.type.__args__))}"
            raise TreadleError(f"{field.name} is {reprlib.repr(given)}; it must be {allowed}")
    if params.grammar is not None:
        failed, found = LLMatcher.validate_grammar_with_warnings(params.grammar)
        if failed:
            raise TreadleError(f"grammar does not compile: {' '.join(found[0].split())}")
    return SamplingParams(**values)


def prompts(given: Any) -> list[str | list[int]]:
    """The prompts of ``LLM.generate``."""
    allowed = "it must be a text, a list of texts, or a list of lists of token ids"
    if isinstance(given, str):
        return [given]
    if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
        raise TreadleError(f"prompts is {reprlib.repr(given)}; {allowed}")
    checked: list[str | list[int]] = []
    for i, prompt in enumerate(given):
        if _index(prompt) is not None:
            raise TreadleError(
                f"prompts[{i}] is the token id {prompt}, but every prompt is a list of them; wrap a "
                "single one: generate([[1, 2, 3]])"
            )
        checked.append(prompt if isinstance(prompt, str) else token_ids(f"prompts[{i}]", prompt))
    return checked


def token_ids(name: str, given: Any) -> list[int]:
    """A list of token ids, of any kind of whole numbers."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise TreadleError(f"{name} is {reprlib.repr(given)}; it must be a list of token ids")
    ids = []
    for i, value in enumerate(given):
        id = _index(value)
        if id is None:
            raise TreadleError(f"{name}[{i}] is {reprlib.repr(value)}; a token id must be a whole number")
        ids.append(id)
    return ids


def messages(given: Any) -> list[Mapping[str, Any]]:
    """The messages of ``LLM.chat``; treadle.text checks what is in them."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise TreadleError(f"messages is {reprlib.repr(given)}; it must be {_MESSAGES}")
    listed = list(given)
    for i, message in enumerate(listed):
        if not isinstance(message, Mapping):
            raise TreadleError(f"messages[{i}] is {reprlib.repr(message)}; messages must be {_MESSAGES}")
    return listed


def _index(value: Any) -> int | None:
    """A whole number of any library as Python's; None for anything else, True and False included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays as Python's, also inside of containers."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | list | set | frozenset):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value


def _huge(value: Any) -> bool:
    """Whether a whole number in it needs more than 64 bits."""
    if isinstance(value, tuple | dict):
        return any(map(_huge, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63
