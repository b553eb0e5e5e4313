"""The text side of a real model, put together from ``treadle.text``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treadle.server.textside import ChatOptions, ChatPrompt
from treadle.text.detokenizer import Detokenizer
from treadle.text.reasoning import OPEN, ReasoningSplitter
from treadle.text.tokenizer import Tokenizer, think_ids

Render = Callable[[list[dict[str, Any]], ChatOptions], list[str | int]]


class ModelText:
    """Implements TextSide. ``render`` turns a conversation into pieces: template text and user text as
    strings, the template's control tokens as ids, so that nothing a user writes becomes a control token."""

    def __init__(self, tokenizer: Tokenizer, render: Render) -> None:
        self._tokenizer = tokenizer
        self._render = render
        self._reasons = OPEN in (tokenizer.chat_template or "") or think_ids(tokenizer)[0] is not None
        self._think = think_ids(tokenizer)[0]

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._tokenizer.vocab_size

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """See TextSide."""
        return self._tokenizer.encode(text, add_bos=add_special)

    def encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions) -> ChatPrompt:
        """See TextSide."""
        pieces = self._render(messages, options)
        return ChatPrompt(ids=self._tokenizer.encode_pieces(pieces), thinking=self._opens_reasoning(pieces))

    def _opens_reasoning(self, pieces: list[str | int]) -> bool:
        """Whether the prompt ends with the opening tag, blanks aside."""
        for piece in reversed(pieces):
            if isinstance(piece, int):
                return piece == self._think
            if piece.strip():
                return piece.rstrip().endswith(OPEN)
        return False

    def decode(self, token_ids: Sequence[int]) -> str:
        """See TextSide."""
        return self._tokenizer.decode(token_ids, skip_specials=False)

    def token_bytes(self, token_id: int) -> bytes:
        """See TextSide."""
        return self._tokenizer.token_bytes(token_id)

    def answer(self, *, stop: tuple[str, ...], include_stop: bool, skip_special: bool) -> Detokenizer:
        """See TextSide."""
        return Detokenizer(self._tokenizer, stop, include_stop=include_stop, skip_specials=skip_special)

    def reasoning(self, *, thinking: bool) -> ReasoningSplitter | None:
        """See TextSide."""
        return ReasoningSplitter(started=thinking) if self._reasons else None
