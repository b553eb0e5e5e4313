"""Rate limits of keys: two buckets that fill evenly over a minute, and a count of running requests.

They live in the memory of one server. Tokens are charged as they are used, so an answer may go beyond its
key's limit; the next requests then wait until that is made up for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from treadle.keys.records import Key, Limits


class LimitReached(Exception):
    """A request that must wait. ``what`` names the limit, ``wait`` is in seconds."""

    def __init__(self, what: str, limit: int, wait: float) -> None:
        super().__init__(what)
        self.what = what
        self.limit = limit
        self.wait = wait


@dataclass(frozen=True)
class Level:
    """How a limit per minute stands: what is left, and seconds until all of it is there again."""

    limit: int
    left: int
    full_in: float


class _Bucket:
    """What is left of a limit per minute."""

    def __init__(self) -> None:
        self.level = math.inf
        self._at = 0.0

    def fill(self, limit: int | None, now: float) -> None:
        """Bring ``level`` up to date: full where there is no limit, or there was none."""
        gained = (now - self._at) * (limit or 0) / 60
        self.level = math.inf if limit is None else min(self.level + gained, limit)
        self._at = now


@dataclass
class _Meter:
    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)
    running: set[Ticket] = field(default_factory=set)

    def live(self) -> int:
        return sum(ticket.tokens() for ticket in self.running)


@dataclass(eq=False)
class Ticket:
    """A request that was let in: hand it back with ``Limiter.leave``."""

    key: Key
    tokens: Callable[[], int]  # used by the request so far


class Limiter:
    """Holds requests to the limits of their keys."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meters: dict[str, _Meter] = {}

    def enter(self, key: Key, tokens: Callable[[], int]) -> Ticket:
        """Let a request in; ``tokens`` tells what it has used so far. Raises LimitReached."""
        ticket = Ticket(key, tokens)
        limits = key.limits
        if limits == Limits():
            return ticket
        meter = self._meter(key)
        if limits.concurrent is not None and len(meter.running) >= limits.concurrent:
            raise LimitReached("concurrent requests", limits.concurrent, 1)
        if (limit := limits.requests_per_minute) is not None and meter.requests.level < 1:
            raise LimitReached("requests per minute", limit, (1 - meter.requests.level) * 60 / limit)
        if (limit := limits.tokens_per_minute) is not None:
            left = meter.tokens.level - meter.live()
            if left < 1:
                raise LimitReached("tokens per minute", limit, (1 - left) * 60 / limit)
        meter.requests.level -= 1
        meter.running.add(ticket)
        return ticket

    def leave(self, ticket: Ticket, tokens: int) -> None:
        """A request has ended, and has used ``tokens``."""
        meter = self._meters.get(ticket.key.id)
        if meter is not None and ticket in meter.running:
            meter.running.remove(ticket)
            meter.tokens.level -= tokens

    def live_tokens(self, key: Key) -> int:
        """Tokens that the running requests of a key have used."""
        meter = self._meters.get(key.id)
        return meter.live() if meter is not None else 0

    def levels(self, key: Key) -> dict[str, Level]:
        """How the limits per minute of a key stand: ``requests`` and ``tokens``, those that it has."""
        found = {}
        limits = key.limits
        if limits.requests_per_minute is not None or limits.tokens_per_minute is not None:
            meter = self._meter(key)
            if (limit := limits.requests_per_minute) is not None:
                found["requests"] = _level(limit, meter.requests.level)
            if (limit := limits.tokens_per_minute) is not None:
                found["tokens"] = _level(limit, meter.tokens.level - meter.live())
        return found

    def _meter(self, key: Key) -> _Meter:
        """The meter of a key, filled up to now."""
        now = self._clock()
        meter = self._meters.setdefault(key.id, _Meter())
        meter.requests.fill(key.limits.requests_per_minute, now)
        meter.tokens.fill(key.limits.tokens_per_minute, now)
        return meter


def _level(limit: int, left: float) -> Level:
    return Level(limit, max(math.floor(left), 0), (limit - left) * 60 / limit)
