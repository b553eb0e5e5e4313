"""What a key may still use, and what it has used: limits and quotas before a request, usage after it."""

from __future__ import annotations

import calendar
import math
import time
from typing import Any, Protocol

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle.keys.limits import Level, Limiter, LimitReached, Ticket
from treadle.keys.records import Key
from treadle.keys.ring import Keyring
from treadle.keys.usage import Counts
from treadle.server.auth import scope_of
from treadle.server.errors import ApiError


class Work(Protocol):
    """What a request makes an engine do. A route that starts some puts it into ``request.state.work``, so
    that the log, the limits and the usage of the key count it."""

    @property
    def first_token(self) -> float | None:
        """When the first token came, on the clock of ``time.perf_counter``."""
        ...

    def usage(self) -> dict[str, Any]:
        """The ``usage`` object so far: at least ``prompt_tokens`` and ``completion_tokens``."""
        ...


def counts_of(state: dict[str, Any], status: int) -> Counts:
    """What a request has used so far. One that was refused has used nothing."""
    counts = Counts(requests=1, errors=int(status >= 400))
    work: Work | None = state.get("work")
    if work is not None and (status < 400 or status in (499, 500)):
        usage = work.usage()
        counts.prompt_tokens = usage["prompt_tokens"]
        counts.completion_tokens = usage.get("completion_tokens", 0)
        counts.cached_tokens = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return counts


class Metering:
    """ASGI middleware behind ``Auth``: every POST of the scope ``inference`` is held to the limits of its key
    and counted in the key's usage."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self.app = app
        self.keyring = keyring
        self.limiter = Limiter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope_of(scope["path"]) != "inference":
            await self.app(scope, receive, send)
            return
        state, status = scope["state"], 500
        key: Key = state["key"]

        async def send_with_levels(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for what, level in self.limiter.levels(key).items():
                    headers[f"x-ratelimit-limit-{what}"] = str(level.limit)
                    headers[f"x-ratelimit-remaining-{what}"] = str(level.left)
                    headers[f"x-ratelimit-reset-{what}"] = _duration(level)
            await send(message)

        ticket: Ticket | None = None
        try:
            ticket = self._admit(key, state)
        except ApiError as error:
            await error.response()(scope, receive, send_with_levels)
        else:
            await self.app(scope, receive, send_with_levels)
        finally:
            counts = counts_of(state, status)
            if ticket is not None:
                self.limiter.leave(ticket, counts.tokens)
            self.keyring.add(key, state.get("model", ""), counts)

    def _admit(self, key: Key, state: dict[str, Any]) -> Ticket:
        quota = key.limits.monthly_tokens
        if quota is not None:
            used = self.keyring.month_tokens(key) + self.limiter.live_tokens(key)
            if used >= quota:
                raise _over_quota(key, used, quota)
        try:
            return self.limiter.enter(key, lambda: counts_of(state, 200).tokens)
        except LimitReached as reached:
            seconds = max(math.ceil(reached.wait), 1)
            raise ApiError(
                429,
                f"the key {key.name} has reached its limit of {reached.limit} {reached.what}; "
                f"try again in {seconds} s",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(seconds)},
            ) from None


def _over_quota(key: Key, used: int, quota: int) -> ApiError:
    now = time.gmtime()
    year, month = (now.tm_year, now.tm_mon + 1) if now.tm_mon < 12 else (now.tm_year + 1, 1)
    end = calendar.timegm((year, month, 1, 0, 0, 0))
    return ApiError(
        429,
        f"the key {key.name} has used {used} of its {quota} tokens of this month; it may go on in the next "
        "month (UTC), or when the administrator raises the quota",
        code="insufficient_quota",
        headers={"Retry-After": str(max(end - int(time.time()), 1)), "x-should-retry": "false"},
    )


def _duration(level: Level) -> str:
    """As the OpenAI API writes it: ``6m0s``, ``1s``, ``120ms``."""
    if level.full_in < 1:
        return f"{math.ceil(level.full_in * 1000)}ms"
    minutes, seconds = divmod(math.ceil(level.full_in), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
