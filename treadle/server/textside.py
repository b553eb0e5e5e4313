"""What the server needs to turn text into tokens and tokens into text. ``treadle.text`` does the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llguidance import LLTokenizer

from treadle.text.tools import ToolFormat


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A rendered conversation. ``thinking``: it ends inside a reasoning block, so the answer starts there.
    ``may_think``: the model may begin such a block itself."""

    ids: list[int]
    thinking: bool = False
    may_think: bool = False


class AnswerText(Protocol):
    """Text of one answer as its tokens come: whole characters only, and nothing that may become a stop
    string."""

    @property
    def stopped(self) -> str | None:
        """The stop string that was found."""
        ...

    @property
    def offsets(self) -> Sequence[int]:
        """Per token: characters of text before it."""
        ...

    def push(self, ids: Sequence[int], /) -> str:
        """Text that is certain after these tokens."""
        ...

    def finish(self) -> str:
        """What was held back; called once, at the end."""
        ...


class Reasoning(Protocol):
    """Splits answer text into (reasoning, content), both without the tags."""

    @property
    def length(self) -> int:
        """Characters of text that belong to the reasoning so far, tags included."""
        ...

    def push(self, text: str, /) -> tuple[str, str]:
        """The parts that are certain."""
        ...

    def finish(self) -> tuple[str, str]:
        """The parts that were held back."""
        ...


class TextSide(Protocol):
    """Tokenizer and chat template of one model. Methods are safe to call from several threads."""

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to one less."""
        ...

    @property
    def longest_token(self) -> int:
        """Bytes of the longest token."""
        ...

    @property
    def tools(self) -> ToolFormat | None:
        """How the model writes tool calls; None if it cannot be told of tools."""
        ...

    @property
    def grammar_tokens(self) -> LLTokenizer:
        """The vocabulary for grammars; made at the first use, which takes up to a second. Raises ValueError
        if the model cannot follow grammars."""
        ...

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of raw text. Control tokens written in it are plain text; ``add_special``: BOS where the model
        wants it."""
        ...

    def encode_whole(self, text: str) -> list[int]:
        """Ids of a text to be embedded: with BOS and EOS where the model wants them."""
        ...

    def encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions) -> ChatPrompt:
        """Ids of a conversation. Raises TreadleError with the template's own message if it refuses."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        ...

    def token_id(self, text: str) -> int | None:
        """Id of a control token by its spelling."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        ...

    def answer(
        self, *, stop: tuple[str, ...], include_stop: bool, skip_special: bool, calls: bool
    ) -> AnswerText:
        """A new answer. ``calls``: the marks of tool calls are shown although they are special tokens."""
        ...

    def reasoning(self, *, thinking: bool) -> Reasoning | None:
        """A new splitter, or None if the model does not reason. ``thinking``: see ChatPrompt."""
        ...
