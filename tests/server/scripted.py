"""An engine that plays a script and a tokenizer of bytes: tests decide what is slow, breaks or is
cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from treadle.core import FinishReason, Output, Request, TokenLogprobs, TreadleError, Usage
from treadle.server.textside import ChatOptions, ChatPrompt
from treadle.text.tokenizer import Tokenizer


class ScriptedEngine:
    """Answers every request with the same tokens, one output each."""

    def __init__(
        self, text: str = "Hello", *, delay: float = 0.0, first: float = 0.0, fail_after: int | None = None
    ) -> None:
        self.token_ids = list(text.encode())
        self.delay = delay  # seconds between tokens
        self.first = first  # seconds before the first one
        self.fail_after = fail_after
        self.state = "ready"
        self.error: str | None = None
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.closed = False

    @property
    def stats(self) -> Mapping[str, float]:
        return {"running": 0.0}

    async def submit(self, request: Request) -> AsyncIterator[Output]:
        self.requests.append(request)
        await asyncio.sleep(self.first)
        usage = Usage(prompt_tokens=len(request.prompt_ids), cached_tokens=0)
        limit = request.params.max_tokens or 10**9
        for count, token in enumerate(self.token_ids[:limit], 1):
            if count - 1 == self.fail_after:
                error = "the engine process died"
                yield Output(id=request.id, token_ids=[], finish_reason="error", error=error)
                return
            last = count == min(len(self.token_ids), limit)
            reason: FinishReason | None = None if not last else "length" if count == limit else "stop"
            entry = TokenLogprobs(logprob=-0.5, top=[(token, -0.5)])
            logprobs = None if request.params.logprobs is None else [entry]
            output = Output(id=request.id, token_ids=[token], logprobs=logprobs, finish_reason=reason)
            output.usage = usage if last else None
            yield output
            await asyncio.sleep(self.delay)

    async def cancel(self, id: str) -> None:
        self.cancelled.append(id)

    async def close(self) -> None:
        self.closed = True


class ByteText:
    """Token ids are bytes. A conversation is its contents, one after the other; `refuse` makes the template
    fail."""

    vocab_size = 256
    tools = None

    def __init__(self, reasons: bool = False) -> None:
        self.reasons = reasons
        self.conversations: list[list[dict[str, Any]]] = []

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions) -> ChatPrompt:
        self.conversations.append(messages)
        text = "".join(message["content"] or "" for message in messages)
        if "refuse" in text:
            raise TreadleError("Conversation roles must alternate user/assistant")
        return ChatPrompt(ids=list(text.encode()), thinking=self.reasons)

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def answer(
        self, *, stop: tuple[str, ...], include_stop: bool, skip_special: bool, calls: bool
    ) -> ByteAnswer:
        return ByteAnswer(stop)

    def reasoning(self, *, thinking: bool) -> UntilClose | None:
        return UntilClose() if self.reasons else None


class ByteAnswer:
    """Holds everything back while a stop string may still begin."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stopped: str | None = None
        self._stop = stop
        self._held = b""

    def push(self, token_ids: Sequence[int]) -> str:
        self._held += bytes(token_ids)
        for stop in self._stop:
            if stop.encode() in self._held:
                self.stopped = stop
                self._held = self._held[: self._held.index(stop.encode())]
        try:
            text = self._held.decode()
        except UnicodeDecodeError:
            return ""
        if self._stop and self.stopped is None:
            return ""
        self._held = b""
        return text

    def finish(self) -> str:
        return self._held.decode("utf-8", "replace")


class UntilClose:
    """Everything before `|` is reasoning."""

    def __init__(self) -> None:
        self._closed = False

    def push(self, text: str) -> tuple[str, str]:
        if self._closed:
            return "", text
        before, mark, after = text.partition("|")
        self._closed = bool(mark)
        return before, after

    def finish(self) -> tuple[str, str]:
        return "", ""


def byte_tokenizer(directory: Path, template: str, marks: list[str]) -> Tokenizer:
    """A real tokenizer of the 256 bytes, and ``marks`` as control tokens; ``<|end|>`` ends the text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(marks)
    backend.save(str(directory / "tokenizer.json"))
    settings = {
        "chat_template": template,
        "eos_token": "<|end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text("{}")
    return Tokenizer.from_directory(directory)
