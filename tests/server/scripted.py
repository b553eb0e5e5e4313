"""An engine that plays a script, so that tests decide when it is slow, breaks or is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from treadle.core import Output, Request, TokenLogprobs, Usage


class ScriptedEngine:
    """Answers every request with the same tokens, one output each."""

    def __init__(self, token_ids: list[int], *, delay: float = 0.0, first: float = 0.0, fail_after: int | None = None):
        self.token_ids = token_ids
        self.delay = delay  # seconds between tokens
        self.first = first  # seconds before the first one
        self.fail_after = fail_after
        self.state = "ready"
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
                yield Output(id=request.id, token_ids=[], finish_reason="error", error="the engine process died")
                return
            last = count == min(len(self.token_ids), limit)
            reason = None if not last else "length" if count == limit else "stop"
            entry = TokenLogprobs(logprob=-0.5, top=[(token, -0.5)])
            logprobs = None if request.params.logprobs is None else [entry]
            yield Output(
                id=request.id, token_ids=[token], logprobs=logprobs, finish_reason=reason, usage=usage if last else None
            )
            await asyncio.sleep(self.delay)

    async def cancel(self, id: str) -> None:
        self.cancelled.append(id)

    async def close(self) -> None:
        self.closed = True
