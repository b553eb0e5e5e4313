"""A response being written, as a whole or as typed events."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from treadle.server.blocks import Begin, Block, BlockAnswer, End, Step
from treadle.server.errors import ApiError
from treadle.server.generation import Job
from treadle.server.responses.items import in_summary, item_id, output_item, plain, reasoning_part, text_part
from treadle.server.responses.schema import ResponsesBody
from treadle.server.sse import typed_event

Response = dict[str, Any]

_TOOL = {"description": None, "strict": False, "parameters": None}


class ResponseAnswer:
    """One response. ``keep`` is called with its final form, before a client can ask for that."""

    def __init__(self, job: Job, body: ResponsesBody, keep: Callable[[Response], None]) -> None:
        self._job = job
        self._body = body
        self._keep = keep
        self._answer = BlockAnswer(job)
        self._ids: list[str] = []  # of the items
        self._number = 0  # of the next event
        self._head = _head(job, body)

    async def complete(self) -> Response:
        """The response when it is complete."""
        await self._answer.complete()
        return self._final()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Events from ``response.created`` to ``response.completed``, ``.incomplete`` or ``.failed``."""
        begun = self._response("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        try:
            async with contextlib.aclosing(self._answer.steps()) as steps:
                async for step in steps:
                    for event in self._events(step):
                        yield event
        except ApiError as error:
            failed = self._failed(error)
            yield self.error_event(error)
            yield self._event("response.failed", response=failed)
            return
        if not self._answer.blocks:
            empty = Block("text", 0)
            self._answer.blocks.append(empty)
            for step in (Begin(empty), End(empty)):
                for event in self._events(step):
                    yield event
        final = self._final()
        yield self._event("response." + final["status"], response=final)

    def error_event(self, error: ApiError) -> bytes:
        """The event that tells why a stream ends early."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return typed_event({"type": kind, "sequence_number": number, **fields})

    def _events(self, step: Step) -> Iterator[bytes]:
        block = step.block
        where: dict[str, Any] = {"item_id": self._id(block), "output_index": block.index}
        if isinstance(step, Begin):
            item = self._item(block, "in_progress")
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind != "call":
                yield self._event(self._part_event(block, "added"), **where, **self._part(block))
        elif isinstance(step, End):
            yield self._event(self._event_name(block, "done"), **where, **self._whole(block))
            if block.kind != "call":
                yield self._event(self._part_event(block, "done"), **where, **self._part(block))
            item = self._whole_item(block)
            yield self._event("response.output_item.done", output_index=block.index, item=item)
        else:
            more: dict[str, Any] = {"delta": step.text, **self._place(block)}
            if block.kind == "text":
                more["logprobs"] = [token.chat() for token in step.tokens]
            yield self._event(self._event_name(block, "delta"), **where, **more)

    def _event_name(self, block: Block, end: str) -> str:
        name = {
            "text": "output_text",
            "call": "function_call_arguments",
            "reasoning": "reasoning_summary_text" if in_summary(self._body) else "reasoning_text",
        }[block.kind]
        return f"response.{name}.{end}"

    def _part_event(self, block: Block, end: str) -> str:
        summary = block.kind == "reasoning" and in_summary(self._body)
        return f"response.{'reasoning_summary_part' if summary else 'content_part'}.{end}"

    def _place(self, block: Block) -> dict[str, int]:
        """Which part of an item; all have one only."""
        if block.kind == "call":
            return {}
        summary = block.kind == "reasoning" and in_summary(self._body)
        return {"summary_index" if summary else "content_index": 0}

    def _part(self, block: Block) -> dict[str, Any]:
        part = text_part(block) if block.kind == "text" else reasoning_part(block, self._body)
        return {**self._place(block), "part": part}

    def _whole(self, block: Block) -> dict[str, Any]:
        if block.kind == "call":
            return {"arguments": block.text}
        whole: dict[str, Any] = {"text": block.text, **self._place(block)}
        if block.kind == "text":
            whole["logprobs"] = [token.chat() for token in block.tokens]
        return whole

    def _id(self, block: Block) -> str:
        if block.index == len(self._ids):
            self._ids.append(item_id(block.kind))
        return self._ids[block.index]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        return output_item(block, self._id(block), self._body, status)

    def _whole_item(self, block: Block) -> dict[str, Any]:
        return self._item(block, "completed" if self._answer.is_whole(block) else "incomplete")

    def _final(self) -> Response:
        status = "incomplete" if self._answer.cut else "completed"
        output = [self._whole_item(block) for block in self._answer.blocks or [Block("text", 0)]]
        details = {"reason": "max_output_tokens"} if self._answer.finish == "length" else None
        final = self._response(status, output, incomplete_details=details, usage=self._usage())
        final["completed_at"] = int(time.time()) if status == "completed" else None
        self._keep(final)
        return final

    def _failed(self, error: ApiError) -> Response:
        output = [self._item(block, "incomplete") for block in self._answer.blocks]
        details = {"code": "server_error", "message": error.message}
        failed = self._response("failed", output, error=details, usage=self._usage())
        self._keep(failed)
        return failed

    def _response(self, status: str, output: list[dict[str, Any]], **fields: Any) -> Response:
        return {**self._head, "status": status, "output": output, **fields}

    def _usage(self) -> dict[str, Any]:
        usage = self._job.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


def _head(job: Job, body: ResponsesBody) -> Response:
    """The fields that never change, and those that change with their first values."""
    params = job.choices[0].request.params
    choice = body.tool_choice
    return {
        "id": "resp_" + secrets.token_hex(24),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **(plain(body.reasoning) or {})},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **(plain(body.text) or {})},
        "tool_choice": choice if isinstance(choice, str) else plain(choice) or "auto",
        "tools": [_TOOL | plain(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "metadata": body.metadata or {},
    }
