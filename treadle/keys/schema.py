"""The tables of the key store."""

from __future__ import annotations

APPLICATION_ID = 0x5472646C  # "Trdl", in the header of the file
VERSION = 1

SCHEMA = (
    """CREATE TABLE keys (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        scopes TEXT NOT NULL,  -- JSON array
        models TEXT NOT NULL,  -- JSON array; empty: all
        requests_per_minute INTEGER,
        tokens_per_minute INTEGER,
        concurrent INTEGER,
        monthly_tokens INTEGER,
        created REAL NOT NULL,  -- times are seconds since 1970, UTC
        expires REAL,
        revoked REAL
    )""",
    "CREATE UNIQUE INDEX keys_by_name ON keys (name) WHERE revoked IS NULL",
    """CREATE TABLE secrets (  -- several per key while a rotated one may still be used
        digest BLOB PRIMARY KEY,  -- SHA-256
        key TEXT NOT NULL REFERENCES keys (id),
        hint TEXT NOT NULL,  -- the last characters
        created REAL NOT NULL,
        until REAL  -- when a rotated one ends
    ) WITHOUT ROWID""",
    """CREATE TABLE usage (
        key TEXT NOT NULL,  -- an id of keys, `local`, or `config-N` for the Nth --api-key
        model TEXT NOT NULL,  -- empty if the request named none that is served
        day TEXT NOT NULL,  -- in UTC, 2027-01-31
        requests INTEGER NOT NULL,
        errors INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        last_used REAL NOT NULL,
        PRIMARY KEY (key, model, day)
    ) WITHOUT ROWID""",
    "CREATE INDEX usage_by_day ON usage (day)",
    """CREATE TABLE audit (
        time REAL NOT NULL,
        actor TEXT NOT NULL,
        action TEXT NOT NULL,
        key TEXT NOT NULL,
        name TEXT NOT NULL,
        details TEXT NOT NULL  -- JSON object
    )""",
    """CREATE TRIGGER audit_is_kept_1 BEFORE UPDATE ON audit
        BEGIN SELECT raise(ABORT, 'the audit log is only ever added to'); END""",
    """CREATE TRIGGER audit_is_kept_2 BEFORE DELETE ON audit
        BEGIN SELECT raise(ABORT, 'the audit log is only ever added to'); END""",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)
