"""A message being written, as a whole or as events."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from treadle.server.anthropic.errors import error_body
from treadle.server.anthropic.schema import MessagesBody, ThinkingOff
from treadle.server.blocks import Begin, Block, BlockAnswer, End, Step
from treadle.server.errors import ApiError
from treadle.server.generation import Job
from treadle.server.sse import typed_event

PING = typed_event({"type": "ping"})
_FIELDS = {"text": "text", "reasoning": "thinking", "call": "partial_json"}  # of deltas
_SIGNATURE = "unsigned"  # clients drop thinking that has none


class MessageAnswer:
    """One message. Reasoning is left out unless ``thinking`` is asked for."""

    def __init__(self, job: Job, body: MessagesBody) -> None:
        self._job = job
        self._body = body
        self._answer = BlockAnswer(job)
        self._shown: list[Block] = []
        self._shows_thinking = not (body.thinking is None or isinstance(body.thinking, ThinkingOff))
        self._omits = getattr(body.thinking, "display", None) == "omitted"
        self._id = "msg_" + secrets.token_hex(12)

    async def complete(self) -> dict[str, Any]:
        """The message when it is complete."""
        await self._answer.complete()
        content = [self._whole(block) for block in self._answer.blocks if self._shows(block)]
        return self._message(content, self._usage(), **self._stop())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Events from ``message_start`` to ``message_stop``, or to ``error`` if the engine fails."""
        begun = self._message([], self._usage(), stop_reason=None, stop_sequence=None)
        yield typed_event({"type": "message_start", "message": begun})
        yield PING
        try:
            async with contextlib.aclosing(self._answer.steps()) as steps:
                async for step in steps:
                    for event in self._events(step):
                        yield event
        except ApiError as error:
            yield error_event(error)
            return
        yield typed_event({"type": "message_delta", "delta": self._stop(), "usage": self._usage()})
        yield typed_event({"type": "message_stop"})

    def _shows(self, block: Block) -> bool:
        return block.kind != "reasoning" or self._shows_thinking

    def _events(self, step: Step) -> Iterator[bytes]:
        block = step.block
        if not self._shows(block):
            return
        if isinstance(step, Begin):
            self._shown.append(block)
        index = len(self._shown) - 1
        if isinstance(step, Begin):
            empty = self._block(block, "", {})
            yield typed_event({"type": "content_block_start", "index": index, "content_block": empty})
        elif isinstance(step, End):
            if block.kind == "reasoning":
                yield _delta(index, "signature", _SIGNATURE)
            yield typed_event({"type": "content_block_stop", "index": index})
        elif step.text and not (block.kind == "reasoning" and self._omits):
            yield _delta(index, _FIELDS[block.kind], step.text)

    def _whole(self, block: Block) -> dict[str, Any]:
        text = "" if block.kind == "reasoning" and self._omits else block.text
        return self._block(block, text, _input(block.text) if block.kind == "call" else {}, _SIGNATURE)

    @staticmethod
    def _block(block: Block, text: str, input: dict[str, Any], signature: str = "") -> dict[str, Any]:
        match block.kind:
            case "text":
                return {"type": "text", "text": text, "citations": None}
            case "reasoning":
                return {"type": "thinking", "thinking": text, "signature": signature}
            case "call":
                return {"type": "tool_use", "id": block.id, "name": block.name, "input": input}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any], **stop: Any) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._body.model}
        return {**head, "content": content, **stop, "usage": usage}

    def _stop(self) -> dict[str, Any]:
        """``stop_reason`` and ``stop_sequence``."""
        stopped = self._answer.stopped
        match self._answer.finish:
            case "tool_calls":
                reason = "tool_use"
            case "length":
                cut = self._job.choices[0].request.params.max_tokens or 0
                reason = "max_tokens" if cut >= self._body.max_tokens else "model_context_window_exceeded"
            case _:
                reason = "end_turn" if stopped is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stopped if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        """As far as it is known; how much came from the cache is told at the end."""
        usage = self._job.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        thinking = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": thinking},
        }


def error_event(error: ApiError) -> bytes:
    """The event that ends a failed stream."""
    return typed_event(error_body(error.status, error.message))


def _delta(index: int, field: str, text: str) -> bytes:
    kind = "input_json" if field == "partial_json" else field
    delta = {"type": kind + "_delta", field: text}
    return typed_event({"type": "content_block_delta", "index": index, "delta": delta})


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as the object that the API wants. A model may write others, or be cut off in them."""
    try:
        value = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
