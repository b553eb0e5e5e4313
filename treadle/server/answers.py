"""What the routes answer, for the OpenAPI document. Tests hold real answers against it.

The answers themselves are built without these classes, which would only slow them down.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

State = Literal["loading", "ready", "failed"]
ModelState = Literal["unloaded", "loading", "ready", "restarting", "failed", "stopped"]
Finish = Literal["stop", "length", "tool_calls"]


class Answered(BaseModel):
    """Base of all answers: no other fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorInfo(Answered):
    """What was wrong. ``param``: the field of the body."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answered):
    """Every error has this form."""

    error: ErrorInfo


class Health(Answered):
    """The state of the server."""

    status: State


class ModelCard(Answered):
    """A served model. ``max_model_len``: context in tokens. ``state``: that of its engine."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    aliases: list[str]
    state: ModelState
    task: Literal["generate", "embed"]


class ModelStatus(Answered):
    """A served model, and why its engine failed, died last, or could not be loaded."""

    id: str
    state: ModelState
    error: str | None


class Ready(Answered):
    """The state of the server and of its models, with the reason of a failure."""

    status: State
    error: str | None
    models: list[ModelStatus]


class VersionAnswer(Answered):
    """The version of the server."""

    version: str


class ModelList(Answered):
    """The served models that the key may use."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Answered):
    """Token ids; ``token_strs`` if they were asked for."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] = Field(default_factory=list)


class DetokenizeAnswer(Answered):
    """The text of token ids."""

    prompt: str


class PromptTokens(Answered):
    """Of the prompt's tokens, those from the prefix cache."""

    cached_tokens: int


class CompletionTokens(Answered):
    """Of the answer's tokens, those of reasoning."""

    reasoning_tokens: int


class UsageAnswer(Answered):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class TokenEntry(Answered):
    """A token and its log-probability (natural logarithm)."""

    token: str
    logprob: float
    bytes: list[int]


class TokenChoice(TokenEntry):
    """The token that was chosen, and the most likely ones."""

    top_logprobs: list[TokenEntry]


class ChatLogprobs(Answered):
    """Log-probabilities of an answer's tokens."""

    content: list[TokenChoice]
    refusal: None


class CalledFunction(Answered):
    """``arguments`` is JSON in a string, unless the answer was cut off in it."""

    name: str
    arguments: str


class CallAnswer(Answered):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Answered):
    """The message of the assistant."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CallAnswer] = Field(default_factory=list)
    reasoning_content: str = ""
    reasoning: str = ""


class ChatChoice(Answered):
    """One answer of ``n``."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatAnswer(Answered):
    """``chat.completion``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer


class TextLogprobs(Answered):
    """Four lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Answered):
    """One answer of ``n`` for one prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextAnswer(Answered):
    """``text_completion``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageAnswer


class EmbeddingItem(Answered):
    """The vector of input ``index``: numbers, or float32 values, little endian, in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Answered):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(Answered):
    """One vector per input, in order."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingsUsage


class ResponseAnswer(BaseModel):
    """A response of the Responses API."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None


class DeletedResponse(Answered):
    """A response that is stored no longer."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(Answered):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageAnswer(Answered):
    """A message of the Messages API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: dict[str, Any]


class CountAnswer(Answered):
    """The number of tokens of a prompt."""

    input_tokens: Annotated[int, Field(ge=0)]


class MessagesErrorInfo(Answered):
    """What was wrong."""

    type: str
    message: str


class MessagesError(Answered):
    """Errors of the Messages API have this form."""

    type: Literal["error"]
    error: MessagesErrorInfo
    request_id: str
