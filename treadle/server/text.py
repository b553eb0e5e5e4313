"""The text side of a real model, put together from ``treadle.text``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from llguidance import LLTokenizer

from treadle.core import TreadleError
from treadle.engine.vocabulary import index
from treadle.server.textside import ChatOptions, ChatPrompt
from treadle.text.chat import ChatTemplate
from treadle.text.detokenizer import Detokenizer
from treadle.text.reasoning import CLOSE, ReasoningSplitter
from treadle.text.tokenizer import Tokenizer, think_ids
from treadle.text.tools import ToolFormat, mark_ids


class ModelText:
    """Implements TextSide. A model without a usable chat template still completes texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._chat: ChatTemplate | None = None
        self._no_chat = ""
        try:
            self._chat = ChatTemplate(tokenizer)
        except TreadleError as error:
            self._no_chat = str(error)
        source = self._chat.source if self._chat else ""
        self._reasons = CLOSE in source or None not in think_ids(tokenizer)
        self._tools = self._chat.tools if self._chat else None
        self._marks = mark_ids(tokenizer, self._tools)
        self.longest_token = max(len(tokenizer.token_bytes(id)) for id in range(tokenizer.vocab_size))

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._tokenizer.vocab_size

    @property
    def model_name(self) -> str:
        """Name of the model by its own metadata; may be empty."""
        return self._tokenizer.name

    @property
    def tools(self) -> ToolFormat | None:
        """See TextSide."""
        return self._tools

    @cached_property
    def grammar_tokens(self) -> LLTokenizer:
        """See TextSide."""
        return index(self._tokenizer, self.vocab_size)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """See TextSide."""
        return self._tokenizer.encode(text, add_bos=add_special)

    def encode_whole(self, text: str) -> list[int]:
        """See TextSide."""
        return self._tokenizer.encode_whole(text)

    def encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions) -> ChatPrompt:
        """See TextSide."""
        if self._chat is None:
            raise TreadleError(self._no_chat)
        prompt = self._chat.render(
            messages,
            options.tools,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **options.template_kwargs,
        )
        over = options.continue_final_message or prompt.text.rstrip().endswith(CLOSE)
        may_think = self._reasons and not prompt.in_reasoning and not over
        return ChatPrompt(ids=prompt.ids, thinking=prompt.in_reasoning, may_think=may_think)

    def decode(self, token_ids: Sequence[int]) -> str:
        """See TextSide."""
        return self._tokenizer.decode(token_ids, skip_specials=False)

    def token_id(self, text: str) -> int | None:
        """See TextSide."""
        return self._tokenizer.token_id(text)

    def token_bytes(self, token_id: int) -> bytes:
        """See TextSide."""
        return self._tokenizer.token_bytes(token_id)

    def answer(
        self, *, stop: tuple[str, ...], include_stop: bool, skip_special: bool, calls: bool
    ) -> Detokenizer:
        """See TextSide."""
        return Detokenizer(
            self._tokenizer,
            stop,
            include_stop=include_stop,
            skip_specials=skip_special,
            keep=self._marks if calls else frozenset(),
        )

    def reasoning(self, *, thinking: bool) -> ReasoningSplitter | None:
        """See TextSide."""
        return ReasoningSplitter(started=thinking) if self._reasons else None
