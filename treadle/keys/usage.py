"""What keys have used: counted in memory, and added to the store by the thread of the key ring."""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec


class Used(NamedTuple):
    """What usage is counted by."""

    key: str  # id
    model: str
    day: str  # 2027-01-31, UTC


class Counts(msgspec.Struct):
    """How much was used. The fields are the columns of the table ``usage``."""

    requests: int = 0
    errors: int = 0  # of these, answered with a status of 400 or more
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens, those found in the prefix cache
    completion_tokens: int = 0
    last_used: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of prompts and answers."""
        return self.prompt_tokens + self.completion_tokens

    def add(self, other: Counts) -> None:
        """Add what another has counted."""
        self.requests += other.requests
        self.errors += other.errors
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        self.last_used = max(self.last_used, other.last_used)


def today(now: float) -> str:
    """The day of a time, in UTC: ``2027-01-31``. Its first seven characters are the month."""
    return time.strftime("%Y-%m-%d", time.gmtime(now))
