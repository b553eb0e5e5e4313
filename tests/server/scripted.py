"""An engine that plays a script and a tokenizer of bytes: tests decide what is slow, breaks or is
cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from llguidance import LLTokenizer, TokenizerWrapper

from treadle.core import FinishReason, Output, Request, TokenLogprobs, TreadleError, Usage
from treadle.engine.interfaces import Admission
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
        self.cached: list[int] = []  # prompt tokens found in the cache, of the next requests
        self.admission = Admission(1000)  # never left
        self.usages: dict[str, Usage] = {}
        self.playing: dict[str, Played] = {}
        self.stats: Mapping[str, float] = {"running": 0.0}

    def submit_all(self, requests: list[Request]) -> list[Played]:
        self.admission.enter(requests[0].user, len(requests))
        for request in requests:
            cached = self.cached.pop(0) if self.cached else 0
            self.usages[request.id] = Usage(prompt_tokens=len(request.prompt_ids), cached_tokens=cached)
            self.playing[request.id] = Played(self.submit(request))
        return [self.playing[request.id] for request in requests]

    async def submit(self, request: Request) -> AsyncIterator[Output]:
        self.requests.append(request)
        await asyncio.sleep(self.first)
        usage = self.usages[request.id]
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

    summary = "a script"

    async def ready(self) -> None:
        pass

    async def cancel(self, id: str) -> None:
        self.cancelled.append(id)
        last = Output(id=id, token_ids=[], finish_reason="cancelled", usage=self.usages[id])
        self.playing[id].stop(last)

    async def close(self) -> None:
        self.closed = True


class Played(AsyncIterator[Output]):
    """Outputs of one request. They come while nobody reads; a cancelled one ends with an output that says
    so."""

    def __init__(self, outputs: AsyncIterator[Output]) -> None:
        self._queue: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self._task = asyncio.create_task(self._play(outputs))

    async def _play(self, outputs: AsyncIterator[Output]) -> None:
        try:
            async for output in outputs:
                self._queue.put_nowait(output)
            self._queue.put_nowait(StopAsyncIteration())
        except Exception as error:
            self._queue.put_nowait(error)
            self._queue.put_nowait(StopAsyncIteration())

    def stop(self, last: Output) -> None:
        if not self._task.done():
            self._task.cancel()
            self._queue.put_nowait(last)
            self._queue.put_nowait(StopAsyncIteration())

    async def __anext__(self) -> Output:
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item


class ByteText:
    """Token ids are bytes. A conversation is its contents, one after the other; `refuse` makes the template
    fail."""

    vocab_size = 256
    longest_token = 1
    tools = None

    @cached_property
    def grammar_tokens(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self))

    bos_token_id = None
    eos_token_id = 255
    special_token_ids = (255,)

    def token_id(self, text: str) -> int | None:
        return None

    tokens = (*(bytes([byte]) for byte in range(255)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def __init__(self, reasons: bool = False) -> None:
        self.reasons = reasons
        self.conversations: list[list[dict[str, Any]]] = []

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def encode_whole(self, text: str) -> list[int]:
        return [*text.encode(), self.eos_token_id]

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
        self.offsets: list[int] = []
        self._stop = stop
        self._held = b""

    def push(self, token_ids: Sequence[int]) -> str:
        self.offsets += [0] * len(token_ids)
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
        self.length = 0
        self._closed = False

    def push(self, text: str) -> tuple[str, str]:
        if self._closed:
            return "", text
        before, mark, after = text.partition("|")
        self.length += len(before + mark)
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
