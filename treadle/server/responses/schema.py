"""What the bodies of ``/v1/responses`` may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from treadle.server.schema import (
    Count,
    FunctionName,
    StreamOptions,
    Strict,
    TextFormat,
    choice_tag,
    text_or_list,
)

Status = Literal["in_progress", "completed", "incomplete"]


def _tagged(value: Any, known: tuple[str, ...], default: str | None = None) -> str | None:
    kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in known else None


class InputText(Strict):
    """Text of the user, of the system or of a tool."""

    type: Literal["input_text"]
    text: str


class OutputText(Strict):
    """Text of the assistant, as it came in an answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")] | Annotated[OutputText, Tag("<output_text>")],
    Discriminator(
        lambda value: _tagged(value, ("input_text", "output_text")),
        custom_error_type="part",
        custom_error_message="an object of the type input_text or output_text; there are no images, "
        "files or audio",
    ),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(max_length=4096), Tag("<list>")],
    text_or_list("parts"),
]


class MessageItem(Strict):
    """One message. ``phase`` is a label that changes nothing."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Strict):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class CallOutputItem(Strict):
    """What the function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[InputText], Field(max_length=4096), Tag("<list>")],
        text_or_list("parts"),
    ]
    id: str | None = None
    status: Status | None = None


class ReasoningText(Strict):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(Strict):
    """A piece of a summary of reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningItem(Strict):
    """What the assistant thought: ``content``, else ``encrypted_content``, else ``summary``."""

    type: Literal["reasoning"]
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: Status | None = None


class ItemReference(Strict):
    """An item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: str


_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _item_tag(value: Any) -> str | None:
    default = "message" if isinstance(value, dict) and "role" in value else "item_reference"
    if isinstance(value, dict) and value.get("type", "") is None:
        value = {}
    return _tagged(value, _KINDS, default)


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(
        _item_tag,
        custom_error_type="item",
        custom_error_message="an object of the type " + ", ".join(_KINDS[:-1]) + f" or {_KINDS[-1]}",
    ),
]


class FunctionTool(Strict):
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")],
    Discriminator(
        lambda value: _tagged(value, ("function",)),
        custom_error_type="tool",
        custom_error_message="an object of the type function; this server has no tools of its own",
    ),
]


class NamedFunction(Strict):
    """The function that must be called."""

    type: Literal["function"]
    name: FunctionName


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[NamedFunction, Tag("<object>")],
    Discriminator(
        choice_tag,
        custom_error_type="tool_choice",
        custom_error_message='"none", "auto", "required" or {"type": "function", "name": "NAME OF A TOOL"}',
    ),
]


class JsonObject(Strict):
    """The answer is some JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """The answer is JSON of a schema. It is enforced whatever ``strict`` says."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


_FORMATS = ("text", "json_object", "json_schema")
Format = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObject, Tag("<json_object>")]
    | Annotated[JsonSchema, Tag("<json_schema>")],
    Discriminator(
        lambda value: _tagged(value, _FORMATS),
        custom_error_type="format",
        custom_error_message="an object whose type is text, json_object or json_schema",
    ),
]


class TextConfig(Strict):
    """What the answer looks like."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Strict):
    """How much the model reasons, and how that is shown. ``summary``: the reasoning comes as the summary of
    its item, in full, instead of as its content. ``max_tokens`` is an extension."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: None = None


LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


class ResponsesBody(Strict):
    """``POST /v1/responses``."""

    not_offered = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": (),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "modalities": (["text"],),
        "moderation": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory", "24h"),  # how long is not promised
        "service_tier": ("auto", "default"),
        "truncation": ("disabled",),
    }

    model: str
    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[Item], Field(min_length=1), Tag("<list>")],
        text_or_list("items"),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    # extensions, as in chat completions
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # accepted because they cannot change the answer
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
