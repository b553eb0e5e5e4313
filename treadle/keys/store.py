"""Keys, their usage and the audit log in one SQLite file, which servers and `treadle key` use at once."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import secrets
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from treadle.core import TreadleError
from treadle.keys.records import Key, Limits, digest_of, new_secret
from treadle.keys.schema import APPLICATION_ID, SCHEMA, VERSION
from treadle.keys.usage import Counts, Used

FILE = "treadle.db"
_PATIENCE = 5.0  # seconds to wait for a lock

# A key that can still be used, with the secrets that stand for it: digest -> (key, until when)
Secrets = dict[bytes, tuple[Key, float | None]]


class StoreError(TreadleError):
    """The key store cannot be used, for a reason meant for the administrator."""


class NoStore(StoreError):
    """There is no key store and none can be made."""


def data_dir(setting: str | None) -> Path:
    """The folder of the key store: ``setting``, else ``$XDG_DATA_HOME/treadle``, else
    ``~/.local/share/treadle``."""
    if setting is not None:
        return Path(setting).expanduser()
    base = os.environ.get("XDG_DATA_HOME")
    return Path(base or Path(os.environ.get("HOME", "~"), ".local", "share")).expanduser() / "treadle"


class Store:
    """One open key store. Use it from one thread at a time.

    Methods raise StoreError if the file is locked, damaged or out of reach, and TreadleError for a name or id
    that does not exist.
    """

    def __init__(self, folder: Path, *, actor: str, durable: bool = True) -> None:
        """Open or create the store in ``folder``.

        actor: who is named in the audit log. durable: False may lose the last second in a power failure.
        """
        self.path = folder / FILE
        self.actor = actor
        self._file = _create(self.path)
        with self._explained():
            self._db = sqlite3.connect(self.path, _PATIENCE, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._migrate()
            self._seen = self._data_version()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _migrate(self) -> None:
        if self._version() == VERSION:
            return
        self._db.execute("PRAGMA journal_mode = WAL")
        with self._writing():
            version, made_by = self._version(), self._pragma("application_id")
            if (version, made_by) == (0, 0) and not self._db.execute(
                "SELECT 1 FROM sqlite_master"
            ).fetchone():
                for statement in SCHEMA:
                    self._db.execute(statement)
            elif made_by != APPLICATION_ID:
                raise StoreError(f"{self.path} is a database of another program; set another --data-dir")
            elif version != VERSION:
                raise StoreError(
                    f"the key store {self.path} has version {version}; this Treadle knows version {VERSION}: "
                    "use the Treadle that wrote it, or set another --data-dir"
                )

    def _pragma(self, name: str) -> int:
        value: int = self._db.execute(f"PRAGMA {name}").fetchone()[0]
        return value

    def _version(self) -> int:
        return self._pragma("user_version") if self._pragma("application_id") == APPLICATION_ID else 0

    def _data_version(self) -> int:
        return self._pragma("data_version")

    # ------------------------------------------------------------------ for servers

    def changed(self) -> bool:
        """Whether another connection has written since the last call. StoreError if the file is gone or is
        another one by now."""
        try:
            found = self.path.stat()
        except OSError:
            raise StoreError(f"the key store {self.path} is gone; the keys known so far go on") from None
        if (found.st_dev, found.st_ino) != self._file:
            raise StoreError(f"the key store {self.path} was replaced by another file")
        with self._explained():
            version = self._data_version()
        changed, self._seen = version != self._seen, version
        return changed

    def secrets(self) -> tuple[Secrets, bool]:
        """Secrets of all keys that are not revoked, and whether there was ever a key."""
        with self._explained():
            keys = {key.id: key for key in self._keys()}
            rows = self._db.execute("SELECT digest, key, until FROM secrets").fetchall()
        found = {bytes(digest): (keys[id], until) for digest, id, until in rows if not keys[id].revoked}
        return found, bool(keys)

    def first_key(self, file: Path) -> str | None:
        """Make a key with every scope if there was never one, and write it to ``file``, mode 0600. Returns
        its id, or None if there are keys."""
        with self._explained(), self._writing():
            if self._db.execute("SELECT 1 FROM keys").fetchone():
                return None
            key = Key(id=_new_id(), name="first", created=time.time())
            secret = new_secret()
            _write_private(file, secret + "\n")
            self._insert(key, secret, "create")
        return key.id

    def add_usage(self, usage: dict[Used, Counts]) -> None:
        """Add what was used."""
        columns = tuple(Counts.__struct_fields__)
        placeholders = ", ".join("?" * (3 + len(columns)))
        sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in columns if name != "last_used")
        statement = (
            f"INSERT INTO usage (key, model, day, {', '.join(columns)}) VALUES ({placeholders}) "  # noqa: S608
            f"ON CONFLICT DO UPDATE SET {sums}, last_used = max(last_used, excluded.last_used)"
        )
        rows = [(*used, *(getattr(counts, name) for name in columns)) for used, counts in usage.items()]
        with self._explained(), self._writing():
            self._db.executemany(statement, rows)

    def month_tokens(self, month: str) -> dict[str, int]:
        """Tokens of prompts and answers per key id in a month (``2027-01``)."""
        query = "SELECT key, sum(prompt_tokens + completion_tokens) FROM usage WHERE day >= ? AND day < ? "
        with self._explained():
            rows = self._db.execute(query + "GROUP BY key", (month, month + "~")).fetchall()
        return dict(rows)

    # ------------------------------------------------------------------ for administrators

    def create(self, key: Key) -> str:
        """Add a key, with an id of its own, and return its secret. TreadleError if the name is taken."""
        secret = new_secret()
        with self._explained(), self._writing():
            if self._db.execute(
                "SELECT 1 FROM keys WHERE name = ? AND revoked IS NULL", (key.name,)
            ).fetchone():
                raise TreadleError(
                    f"there is a key {key.name!r} already: choose another name, or revoke or rotate that one"
                )
            self._insert(key, secret, "create")
        return secret

    def all_keys(self) -> list[Key]:
        """Every key, revoked ones included, oldest first."""
        with self._explained():
            return self._keys()

    def find(self, name: str) -> Key:
        """The key with this name or id that is not revoked."""
        for key in self.all_keys():
            if key.revoked is None and name in (key.name, key.id):
                return key
        raise TreadleError(f"there is no key {name!r}; `treadle key list` shows the keys")

    def revoke(self, name: str) -> Key:
        """End a key now and for ever."""
        with self._explained(), self._writing():
            key = self.find(name)
            self._db.execute("UPDATE keys SET revoked = ? WHERE id = ?", (time.time(), key.id))
            self._audit("revoke", key, {})
        return key

    def rotate(self, name: str, keep_old: float) -> tuple[Key, str]:
        """Give a key a new secret; the present ones work for ``keep_old`` more seconds."""
        secret, now = new_secret(), time.time()
        with self._explained(), self._writing():
            key = self.find(name)
            query = "UPDATE secrets SET until = ? WHERE key = ? AND (until IS NULL OR until > ?)"
            self._db.execute(query, (now + keep_old, key.id, now + keep_old))
            self._insert_secret(key, secret)
            self._audit("rotate", key, {"keep_old_seconds": keep_old})
        return key, secret

    def change(self, name: str, columns: dict[str, Any]) -> Key:
        """Set limits, scopes, models or expiry of a key. ``columns``: those of the table ``keys``."""
        sets = ", ".join(f"{column} = ?" for column in columns)
        with self._explained(), self._writing():
            key = self.find(name)
            query = f"UPDATE keys SET {sets} WHERE id = ?"  # noqa: S608  (names of columns, from our own code)
            self._db.execute(query, (*columns.values(), key.id))
            self._audit("change", key, columns)
            return self.find(key.id)

    def hints(self) -> dict[str, str]:
        """How the newest secret of each key id ends, to recognise a key by."""
        with self._explained():
            return dict(self._db.execute("SELECT key, hint FROM secrets ORDER BY created").fetchall())

    def last_used(self) -> dict[str, float]:
        """When each key id was used last, in seconds since 1970."""
        with self._explained():
            return dict(self._db.execute("SELECT key, max(last_used) FROM usage GROUP BY key").fetchall())

    def usage(self, since: str, until: str) -> list[tuple[Used, Counts]]:
        """Usage per key, model and day, for days (``2027-01-31``) from ``since`` to ``until``."""
        columns = ", ".join(Counts.__struct_fields__)
        query = (
            f"SELECT key, model, day, {columns} FROM usage WHERE day BETWEEN ? AND ? ORDER BY day, key, model"  # noqa: S608
        )
        with self._explained():
            rows = self._db.execute(query, (since, until)).fetchall()
        return [(Used(*row[:3]), Counts(*row[3:])) for row in rows]

    def audit(self) -> list[dict[str, Any]]:
        """Administrative acts, oldest first: time, actor, action, key, name, details."""
        with self._explained():
            rows = self._db.execute(
                "SELECT time, actor, action, key, name, details FROM audit ORDER BY rowid"
            ).fetchall()
        names = ("time", "actor", "action", "key", "name")
        return [{**dict(zip(names, row[:5], strict=True)), "details": json.loads(row[5])} for row in rows]

    # ------------------------------------------------------------------ rows

    def _keys(self) -> list[Key]:
        rows = self._db.execute("SELECT * FROM keys ORDER BY rowid")
        names = [column[0] for column in rows.description]
        return [_key(dict(zip(names, row, strict=True))) for row in rows]

    def _insert(self, key: Key, secret: str, action: str) -> None:
        columns = row_of(key)
        query = f"INSERT INTO keys ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"  # noqa: S608
        self._db.execute(query, tuple(columns.values()))
        self._insert_secret(key, secret)
        told = {name: value for name, value in columns.items() if value is not None}
        self._audit(action, key, {n: v for n, v in told.items() if n not in ("id", "name", "created")})

    def _insert_secret(self, key: Key, secret: str) -> None:
        self._db.execute(
            "INSERT INTO secrets (digest, key, hint, created) VALUES (?, ?, ?, ?)",
            (digest_of(secret), key.id, secret[-4:], time.time()),
        )

    def _audit(self, action: str, key: Key, details: dict[str, Any]) -> None:
        self._db.execute(
            "INSERT INTO audit (time, actor, action, key, name, details) VALUES (?, ?, ?, ?, ?, ?)",
            (time.time(), self.actor, action, key.id, key.name, json.dumps(details)),
        )

    # ------------------------------------------------------------------ transactions and errors

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(_explain(self.path, error)) from None


def _explain(path: Path, error: sqlite3.Error) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return (
            f"the key store {path} was locked by another program for more than {_PATIENCE:g} s; try again, "
            "or end the program that holds it"
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return (
            f"the key store {path} is damaged or no SQLite database ({error}); restore it from a backup, or "
            "move it away to begin with no keys"
        )
    if code == sqlite3.SQLITE_FULL:
        return f"the key store {path} cannot be written: the disk is full"
    return f"the key store {path} cannot be used: {error}"


def _create(path: Path) -> tuple[int, int]:
    """Make sure that the file is there, ours and private; returns its device and inode."""
    exists = path.exists()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        kind = StoreError if exists else NoStore
        owner = f"; it belongs to {_owner(path)}" if isinstance(error, PermissionError) and exists else ""
        reason = error.strerror or str(error)
        raise kind(f"cannot open the key store {path}: {reason}{owner}; set another --data-dir") from None
    try:
        found = os.fstat(handle)
        if not exists and os.geteuid() == 0:  # root prepares the folder of a service
            parent = path.parent.stat()
            os.fchown(handle, parent.st_uid, parent.st_gid)
    finally:
        os.close(handle)
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"the key store {path} is no regular file; set another --data-dir")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise StoreError(
            f"other users can read or write the key store {path} (mode {mode:04o}): chmod 600 it"
        )
    return found.st_dev, found.st_ino


def _owner(path: Path) -> str:
    with contextlib.suppress(OSError, KeyError):
        return pwd.getpwuid(path.stat().st_uid).pw_name
    return "another user"


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(handle)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StoreError(f"cannot write the first key to {path}: {error.strerror}") from None


def _new_id() -> str:
    return "key_" + secrets.token_hex(6)


def new_key(
    name: str, scopes: Iterable[str], models: Iterable[str], limits: Limits, expires: float | None
) -> Key:
    """A key to create now."""
    return Key(
        id=_new_id(),
        name=name,
        scopes=frozenset(scopes),
        models=frozenset(models),
        limits=limits,
        created=time.time(),
        expires=expires,
    )


def row_of(key: Key) -> dict[str, Any]:
    """The columns of a key in the table ``keys``."""
    return {
        "id": key.id,
        "name": key.name,
        "scopes": json.dumps(sorted(key.scopes)),
        "models": json.dumps(sorted(key.models)),
        **asdict(key.limits),
        "created": key.created,
        "expires": key.expires,
        "revoked": key.revoked,
    }


def _key(row: dict[str, Any]) -> Key:
    limits = Limits(**{name: row.pop(name) for name in Limits.__dataclass_fields__})
    scopes, models = (frozenset(json.loads(row.pop(name))) for name in ("scopes", "models"))
    return Key(**row, scopes=scopes, models=models, limits=limits)
