"""What a key is: a random secret that stands for a name, with what it may do and how much."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

SCOPES = ("inference", "metrics", "admin")
ALL_SCOPES = frozenset(SCOPES)
PREFIX = "sk-treadle-"  # tells people and secret scanners what they have found


def new_secret() -> str:
    """A key: the prefix and 256 random bits as 64 hexadecimal digits."""
    return PREFIX + secrets.token_hex(32)


def digest_of(secret: str) -> bytes:
    """SHA-256 of a key, the only form in which it is kept.

    A slow or salted hash protects secrets that can be guessed, such as passwords. 256 random bits cannot be,
    so one fast hash is enough, and every request can afford it.
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one key may use. None: as much as there is."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers
    concurrent: int | None = None  # requests at once
    monthly_tokens: int | None = None  # of prompts and answers, per calendar month in UTC


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key as it was created; its secret is known to its owner only. Times are seconds since 1970, UTC."""

    id: str
    name: str
    scopes: frozenset[str] = ALL_SCOPES
    models: frozenset[str] = frozenset()  # names it may use; empty: all
    limits: Limits = field(default_factory=Limits)
    created: float = 0.0
    expires: float | None = None
    revoked: float | None = None

    def may_use(self, names: set[str]) -> bool:
        """Whether the key may use a model that has these names."""
        return not self.models or not self.models.isdisjoint(names)


LOCAL = Key(id="local", name="local")  # programs on this machine, where no key is needed
