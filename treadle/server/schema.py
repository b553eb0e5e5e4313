"""What request bodies may hold. Everything is checked; nothing is coerced, and nothing unknown is ignored.

The models here also produce the OpenAPI document, so that it says what the server does. References: the
OpenAI API for the standard fields, vLLM's OpenAI-compatible server for the extra ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
)
from pydantic_core import CoreSchema

from treadle.server.errors import ApiError

Token = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**63)]

# Fields of the OpenAI and vLLM APIs that this server does not offer, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": (),
    "functions": (),
    "function_call": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_cache_retention": ("in_memory", "24h"),  # how long is not promised
    "prompt_logprobs": (),
    "reasoning": (),
    "reasoning_effort": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": (),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # of llama-server
    "cache_prompt": (True,),
    "dry_multiplier": (0.0,),
    "dynatemp_range": (0.0,),
    "grammar": ("",),
    "id_slot": (-1,),
    "json_schema": (),
    "mirostat": (0,),
    "n_predict": (),
    "n_probs": (0,),
    "repeat_penalty": (1.0,),
    "samplers": (),
    "timings_per_token": (False,),
    "typical_p": (1.0,),
    "xtc_probability": (0.0,),
}


class Strict(BaseModel):
    """Base of all bodies: JSON types must match exactly and unknown fields are errors.

    ``not_offered``: fields of the API that this server does not have, with the values that ask for nothing.
    """

    not_offered: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema, with the fields that are not offered and what they may hold."""
        schema = handler.resolve_ref_schema(handler(core))
        properties = schema.get("properties", {})
        for name, harmless in cls.not_offered.items():
            if name not in properties:
                properties[name] = {"enum": [*harmless, None], "description": "Not offered."}
        return schema


def _text_tag(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def text_or_list(items: str) -> Discriminator:
    """Tells a text from a list of ``items``, and both from what is neither."""
    return Discriminator(
        _text_tag,
        custom_error_type="text_or_list",
        custom_error_message=f"a string or a list of {items}",
    )


class TextPart(Strict):
    """One piece of a message's content."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Field(max_length=4096), Tag("<list>")],
    text_or_list("parts"),
]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Stop = Annotated[
    Annotated[StopText, Tag("<text>")] | Annotated[list[StopText], Field(max_length=32), Tag("<list>")],
    text_or_list("strings"),
]


class FunctionCall(Strict):
    """The function of a past tool call; ``arguments`` is JSON in a string."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A tool call that the assistant made earlier in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One turn. The fields that must be null are those that clients copy from answers of other models."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=4096)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(Strict):
    """What a tool does; ``parameters`` is the JSON schema of its arguments. ``strict``: they are made to
    follow it."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(min_length=1, max_length=128)]


class NamedFunction(Strict):
    """The name of a function among the tools."""

    name: FunctionName


class NamedTool(Strict):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


def choice_tag(value: Any) -> str | None:
    """Tells an object that names a function from a word; neither is None."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return "<text>"
    return "<object>" if isinstance(value, dict) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[NamedTool, Tag("<object>")],
    Discriminator(
        choice_tag,
        custom_error_type="tool_choice",
        custom_error_message='"none", "auto", "required" or '
        '{"type": "function", "function": {"name": "NAME OF A TOOL"}}',
    ),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Field(ge=0, lt=2**31)]


class ReasoningWish(Strict):
    """How much the model may reason. ``max_tokens``: the block is closed when it has that many."""

    max_tokens: Budget | None = None
    effort: Effort | None = None
    enabled: bool | None = None
    exclude: Literal[False] | None = None


class StreamOptions(Strict):
    """``include_usage`` adds one last chunk with the token counts."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(Strict):
    """The answer is free."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """The answer is some JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema. It is enforced whatever ``strict`` says."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """The answer is JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


def _format_tag(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in ("text", "json_object", "json_schema") else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(
        _format_tag,
        custom_error_type="response_format",
        custom_error_message="an object whose type is text, json_object or json_schema",
    ),
]
SchemaText = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<object>"),
]
Alternatives = Annotated[list[str], Field(min_length=1, max_length=4096)]


class StructuredOutputs(Strict):
    """vLLM's field: one of these decides what the answer looks like. ``grammar``: Lark or GBNF."""

    json_: Annotated[SchemaText | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Alternatives | None = None
    grammar: str | None = None


class Sampling(Strict):
    """Fields of both completion calls."""

    not_offered = UNSUPPORTED

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    max_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    # extensions of vLLM
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText | None = None
    guided_regex: str | None = None
    guided_choice: Alternatives | None = None
    guided_grammar: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    # accepted because they cannot change the answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ChatBody(Sampling):
    """``POST /v1/chat/completions``. ``max_completion_tokens`` wins over ``max_tokens``; both limit reasoning
    + answer."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_format: Literal["auto", "none"] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningWish | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Budget | None = None  # of vLLM
    thinking_budget_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # of llama-server; -1: any


class CompletionBody(Sampling):
    """``POST /v1/completions``. ``prompt``: a text, token ids, or a list of either. ``max_tokens`` defaults
    to 16."""

    prompt: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[str | Token | list[Token]], Tag("<list>")],
        text_or_list("strings, token ids, or lists of token ids"),
        Field(min_length=1),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None


class TokenizeBody(Strict):
    """``POST /tokenize``: exactly one of ``prompt`` and ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    """``POST /detokenize``: token ids to text, special tokens included."""

    model: str | None = None
    tokens: list[Token]


Body = TypeVar("Body", bound=Strict)


_LISTS = ("messages", "prompt", "tokens", "input")  # may be long; each body has at most one that matters
_SLICE = 1024
# Types of errors that say which objects there are: of them, the type tells what came.
_TYPED = ("block", "format", "item", "part", "response_format", "thinking", "tool")
_KINDS = {  # by type of the error
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "item_type": "a string, a token id or a list of token ids",
    "none_required": "null",
}


def validate(kind: type[Body], raw: Any) -> Body:
    """``raw`` (decoded JSON) as a ``kind``. Raises ApiError 400 for the first field that is wrong."""
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_shown(raw)}", code="invalid_json")
    fields = {}
    for name, value in raw.items():
        if name in kind.model_fields or name not in kind.not_offered:
            fields[name] = value
        elif value is not None and not any(_same(value, harmless) for harmless in kind.not_offered[name]):
            message = f"{name} is not supported by this server; remove it"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    name = next((name for name in _LISTS if name in kind.model_fields), "")
    items = fields.get(name)
    if not isinstance(items, list):
        return _validated(kind, fields, name, 0)
    slices = list(_slices(items)) or [items]
    body = _validated(kind, {**fields, name: slices[0]}, name, 0)
    checked = getattr(body, name)
    for part in slices[1:]:
        least = {key: fields[key] for key, field in kind.model_fields.items() if field.is_required()}
        checked += getattr(_validated(kind, {**least, name: part}, name, len(checked)), name)
    return body


def _same(left: Any, right: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _slices(items: list[Any]) -> Iterator[list[Any]]:
    """Parts of a list that are checked one at a time: while pydantic checks one, no other thread runs."""
    part: list[Any] = []
    weight = 0
    for item in items:
        part.append(item)
        inner = (item.get("content"), item.get("tool_calls")) if isinstance(item, dict) else (item,)
        weight += 1 + sum(len(value) for value in inner if isinstance(value, list))
        if weight >= _SLICE:
            yield part
            part, weight = [], 0
    if part:
        yield part


def _validated(kind: type[Body], fields: dict[str, Any], name: str, offset: int) -> Body:
    """``offset``: items of the list ``name`` that were checked before."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explain(kind, error, name, offset) from None


def _explain(kind: type[Strict], error: ValidationError, name: str, offset: int) -> ApiError:
    first = _telling(error)
    loc = [part for part in first["loc"] if isinstance(part, int) or not part.startswith("<")]
    if len(loc) > 1 and loc[0] == name and isinstance(loc[1], int):
        loc[1] += offset
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    param = str(loc[0]) if loc else None
    match first["type"]:
        case "missing":
            message = f"{path} is required"
        case "extra_forbidden":
            allowed = f"; allowed: {', '.join(kind.model_fields)}" if len(loc) == 1 else ""
            message = f"{path} is not a known field here{allowed}"
            return ApiError(400, message, param=param, code="unknown_parameter")
        case problem:
            _, _, must = first["msg"].partition(" after validation")[0].partition(" should ")
            must = f"be {_KINDS[problem]}" if problem in _KINDS else must or f"be {first['msg']}"
            given = first["input"]
            if problem == "string_too_short" or (problem == "too_short" and given == ""):
                must = must.replace("item", "character")
            got = _typed(given) if problem in _TYPED and isinstance(given, dict) else _shown(given)
            message = f"{path}: must {must}; got {got}"
    return ApiError(400, message, param=param, code="invalid_value")


def _telling(error: ValidationError) -> Mapping[str, Any]:
    """The first thing that is wrong. For an item that is of none of several kinds, pydantic tells of each
    why; what tells most is the kind that it almost is."""
    found = error.errors(include_url=False)
    loc = found[0]["loc"]
    if len(loc) < 3 or not isinstance(loc[-2], int) or (loc[-1], found[0]["type"]) != ("str", "string_type"):
        return dict(found[0])
    item = loc[:-1]
    for problem in found:
        _, *inner = problem["loc"][len(item) :] or ("",)
        if problem["loc"][: len(item)] == item and (inner or not problem["type"].endswith("_type")):
            return {**problem, "loc": (*item, *inner)}
    return {**found[0], "type": "item_type", "loc": item}


def _typed(value: dict[str, Any]) -> str:
    return f"one of the type {_shown(value['type'])}" if "type" in value else "one without a type"


def _shown(value: Any) -> str:
    """A short form of a wrong value, so that a large body does not come back in the error."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"an array of {len(value)}"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."
