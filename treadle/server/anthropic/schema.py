"""What the bodies of ``/v1/messages`` may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from treadle.server.schema import Count, FunctionName, StopText, Strict, text_or_list


def _tagged(value: Any, known: tuple[str, ...]) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in known else None


class CacheControl(Strict):
    """Accepted because it cannot change the answer: every prompt is cached while there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Strict):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Strict):
    """What the assistant thought. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Strict):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


def _text_tag(value: Any) -> str | None:
    return _tagged(value, ("text",))


Texts = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("<text>")],
            Discriminator(
                _text_tag,
                custom_error_type="block",
                custom_error_message="an object of the type text; there are no images or documents",
            ),
        ]
    ],
    Field(max_length=4096),
]
TextOrBlocks = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Texts, Tag("<list>")], text_or_list("blocks")
]


class ToolResultBlock(Strict):
    """What the tool returned. ``is_error``: the model sees the content after ``Error: ``."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrBlocks | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


_KINDS = ("text", "thinking", "tool_use", "tool_result")
Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        lambda value: _tagged(value, _KINDS),
        custom_error_type="block",
        custom_error_message="an object of the type text, thinking, tool_use or tool_result; there are no "
        "images or documents",
    ),
]


class Message(Strict):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[Block], Field(max_length=4096), Tag("<list>")],
        text_or_list("blocks"),
    ]


class CustomTool(Strict):
    """A function of the client. ``eager_input_streaming`` changes nothing: input is always streamed as it is
    written."""

    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None


Tool = Annotated[
    Annotated[CustomTool, Tag("<custom>")],
    Discriminator(
        lambda value: (
            "<custom>" if isinstance(value, dict) and value.get("type") in (None, "custom") else None
        ),
        custom_error_type="tool",
        custom_error_message="an object of the type custom; this server has no tools of its own",
    ),
]


class AnyChoice(Strict):
    """``auto``: the model decides; ``any``: it must call; ``none``: it must not."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Strict):
    """The tool that must be called."""

    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


ToolChoice = Annotated[
    Annotated[AnyChoice, Tag("<any>")] | Annotated[NamedChoice, Tag("<tool>")],
    Discriminator(
        lambda value: "<tool>" if isinstance(value, dict) and value.get("type") == "tool" else "<any>"
    ),
]
Display = Literal["summarized", "omitted"]


class ThinkingOn(Strict):
    """The model reasons with at most ``budget_tokens``. ``display``: ``omitted`` leaves thinking blocks
    empty; otherwise they hold all of it."""

    type: Literal["enabled"]
    budget_tokens: Count
    display: Display | None = None


class ThinkingAdaptive(Strict):
    """The model reasons as much as it wants."""

    type: Literal["adaptive"]
    display: Display | None = None


class ThinkingOff(Strict):
    """The model does not reason."""

    type: Literal["disabled"]


Thinking = Annotated[
    Annotated[ThinkingOn, Tag("<enabled>")]
    | Annotated[ThinkingAdaptive, Tag("<adaptive>")]
    | Annotated[ThinkingOff, Tag("<disabled>")],
    Discriminator(
        lambda value: _tagged(value, ("enabled", "adaptive", "disabled")),
        custom_error_type="thinking",
        custom_error_message="an object whose type is enabled, adaptive or disabled",
    ),
]


class JsonFormat(Strict):
    """The answer is JSON of a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """How much the model reasons, and what the answer looks like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(Strict):
    """Accepted because it cannot change the answer."""

    user_id: str | None = None


class CountBody(Strict):
    """``POST /v1/messages/count_tokens``."""

    not_offered = {
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "user_profile_id": (),
        "workspace_id": (),
    }

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    system: TextOrBlocks | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesBody(CountBody):
    """``POST /v1/messages``. ``max_tokens`` may be more than the context has room for."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: Metadata | None = None
