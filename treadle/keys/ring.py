"""The keys of a running server: looked up in memory, kept in step with the store by a thread.

The event loop never waits for a disk. The thread looks at the store twice a second, so a key that
`treadle key` makes, changes or revokes counts from then on; usage is written in the same round.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from treadle.keys.records import LOCAL, Key, digest_of, new_secret
from treadle.keys.store import Secrets, Store, StoreError
from treadle.keys.usage import Counts, Used, today

log = logging.getLogger("treadle.keys")

_ROUND = 0.5  # seconds


class Refused(Exception):
    """A key that may not be used; the text says why."""


@dataclass(frozen=True)
class _Known:
    """What the store said last. Replaced as a whole."""

    secrets: Secrets = field(default_factory=dict)
    ever: bool = False  # whether there was ever a key
    month: str = ""
    tokens: dict[str, int] = field(default_factory=dict)  # per key id, in that month


class Keyring:
    """Keys of ``--api-key``, which may do everything, and those of a store."""

    def __init__(
        self,
        configured: Iterable[str] = (),
        open_store: Callable[[], Store] | None = None,
        *,
        may_be_open: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """open_store: opens the store, also again after an error. None: usage is not kept.
        may_be_open: whether no key at all means that none is needed, as it does on loopback.
        """
        self._clock = clock
        self._fixed: Secrets = {}
        for number, secret in enumerate(configured, 1):
            self._fixed[digest_of(secret)] = (Key(id=f"config-{number}", name=f"config-{number}"), None)
        self._may_be_open = may_be_open and not self._fixed
        self._open_store = open_store
        self._store = open_store() if open_store else None
        self._known = _Known()
        self._lock = threading.Lock()  # around the next two
        self._pending: dict[Used, Counts] = {}
        self._writing: dict[Used, Counts] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if self._store is not None:
            self._load(self._store)
            self._thread = threading.Thread(target=self._keep, name="treadle-keys", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write what is not yet written, and close the store. A second call does nothing."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # ------------------------------------------------------------------ looking up

    @property
    def open(self) -> bool:
        """Whether no key is needed: there never was one. Revoking the last key does not open the server."""
        return self._may_be_open and not self._known.ever

    def find(self, secret: str) -> Key:
        """The key that ``secret`` stands for. Raises Refused.

        Digests are what is compared, and nobody can choose the digest of a guess, so the time that this takes
        says nothing about the keys.
        """
        digest = digest_of(secret)
        found = self._fixed.get(digest) or self._known.secrets.get(digest)
        if found is None:
            raise Refused("the API key is not valid")
        key, until = found
        now = self._clock()
        if key.expires is not None and key.expires <= now:
            raise Refused("the API key has expired")
        if until is not None and until <= now:
            raise Refused("the API key was replaced by a new one")
        return key

    def own_secret(self) -> str:
        """A key for this process itself, which ends with it."""
        secret = new_secret()
        self._fixed[digest_of(secret)] = (LOCAL, None)
        return secret

    # ------------------------------------------------------------------ usage

    def add(self, key: Key, model: str, counts: Counts) -> None:
        """Count what a request has used. Cheap, and never fails."""
        if self._store is None:
            return
        counts.last_used = self._clock()
        used = Used(key.id, model, today(counts.last_used))
        with self._lock:
            self._pending.setdefault(used, Counts()).add(counts)

    def month_tokens(self, key: Key) -> int:
        """Tokens that a key has used in this month; those of other servers on the store count a second
        later."""
        month = today(self._clock())[:7]
        with self._lock:
            known = self._known
            counted = known.tokens.get(key.id, 0) if known.month == month else 0
            for part in (self._writing, self._pending):
                counted += sum(
                    counts.tokens
                    for used, counts in part.items()
                    if used.key == key.id and used.day.startswith(month)
                )
        return counted

    # ------------------------------------------------------------------ the thread

    def _keep(self) -> None:
        trouble = ""
        while True:
            last = self._stopping.wait(_ROUND)
            try:
                self._round()
                if trouble:
                    log.warning("the key store can be used again")
                    trouble = ""
            except StoreError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    log.error("%s; keys stay as they were, and usage is written later", trouble)
                self._reopen()
            except Exception:
                log.exception("the key store failed")
            if last:
                break
        if self._store is not None:
            self._store.close()

    def _round(self) -> None:
        store = self._store
        if store is None:
            return
        changed = store.changed()
        with self._lock:
            self._writing, self._pending = self._pending, {}
            writing = self._writing
        if writing:
            try:
                store.add_usage(writing)
            except BaseException:
                with self._lock:
                    for used, counts in self._pending.items():
                        writing.setdefault(used, Counts()).add(counts)
                    self._pending, self._writing = writing, {}
                raise
        if changed or writing or self._known.month != today(self._clock())[:7]:
            self._load(store)

    def _load(self, store: Store) -> None:
        month = today(self._clock())[:7]
        secrets, ever = store.secrets()
        tokens = store.month_tokens(month)
        with self._lock:  # what was being written is in `tokens` now
            self._known, self._writing = _Known(secrets, ever, month, tokens), {}

    def _reopen(self) -> None:
        """Open what now stands at the place of the store, if anything does."""
        if self._open_store is None or self._store is None or not self._store.path.exists():
            return
        try:
            store = self._open_store()
        except StoreError:
            return  # the next round meets the same error and tells it
        self._store.close()
        self._store = store
        try:
            self._load(store)
        except StoreError:
            return
