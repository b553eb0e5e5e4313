"""The key store: what is in the file, what several processes do at once, what is said when it is broken.
Case J05: one of several first starts makes the first key."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.keys.server import treadle_key
from treadle.core import TreadleError
from treadle.keys import store as store_module
from treadle.keys.records import Limits
from treadle.keys.ring import Keyring, Refused
from treadle.keys.store import Store, StoreError, new_key
from treadle.keys.usage import Counts, Used


def make(folder: Path, name: str = "alice", **limits: int) -> str:
    with contextlib.closing(Store(folder, actor="test")) as store:
        return store.create(new_key(name, ["inference"], [], Limits(**limits), None))


def test_a_key_is_random_and_kept_as_its_hash_only(tmp_path: Path) -> None:
    secrets = {make(tmp_path, f"key{i}") for i in range(3)}
    assert all(len(secret) == len("sk-treadle-") + 64 for secret in secrets) and len(secrets) == 3
    data = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    for secret in secrets:
        assert secret.encode() not in data and secret[11:40].encode() not in data
        assert bytes.fromhex(secret[11:]) not in data
        assert hashlib.sha256(secret.encode()).digest() in data


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "data"
    program = (
        "import os, pathlib, sys; os.umask(0)\nfrom treadle.keys.store import Store\n"
        "folder = pathlib.Path(sys.argv[1]); store = Store(folder, actor='t')\n"
        "store.first_key(folder / 'first-key')\n"
        "print(*(oct(f.stat().st_mode & 0o777) for f in [folder, *folder.iterdir()]))\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert shown[0] == "0o700" and set(shown[1:]) == {"0o600"} and len(shown) >= 3


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_store_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    make(tmp_path)
    (tmp_path / "treadle.db").chmod(mode)
    with pytest.raises(StoreError, match=f"mode {mode:04o}.*chmod 600"):
        treadle_key(tmp_path, "list")


def test_rotation_revocation_and_expiry(tmp_path: Path) -> None:
    now = [1e9]
    secret = make(tmp_path)
    with contextlib.closing(Store(tmp_path, actor="test")) as store:
        _, second = store.rotate("alice", 0)
        _, third = store.rotate("alice", 3600)
        store.change("alice", {"expires": 4e9})
    ring = Keyring((), lambda: Store(tmp_path, actor="test"), clock=lambda: now[0])
    with contextlib.closing(ring):
        now[0] = 3e9  # long after both rotations
        for old in (secret, second):
            with pytest.raises(Refused, match="replaced"):
                ring.find(old)
        assert ring.find(third).name == "alice"
        now[0] = 4e9
        with pytest.raises(Refused, match="expired"):
            ring.find(third)
        with pytest.raises(Refused, match="not valid"):
            ring.find("sk-treadle-" + "0" * 64)
    with contextlib.closing(Store(tmp_path, actor="test")) as store:
        store.revoke("alice")
        assert store.secrets() == ({}, True)
        with pytest.raises(TreadleError, match="no key 'alice'"):
            store.rotate("alice", 0)
        store.create(new_key("alice", ["inference"], [], Limits(), None))  # the name is free again
        with pytest.raises(TreadleError, match="already"):
            store.create(new_key("alice", ["inference"], [], Limits(), None))
        acts = [(act["actor"], act["action"], act["name"]) for act in store.audit()]
    assert acts == [
        ("test", act, "alice") for act in ("create", "rotate", "rotate", "change", "revoke", "create")
    ]


def test_revoking_the_last_key_does_not_open_the_server(tmp_path: Path) -> None:
    ring = Keyring((), lambda: Store(tmp_path, actor="test"))
    with contextlib.closing(ring):
        assert ring.open
    make(tmp_path)
    with contextlib.closing(Store(tmp_path, actor="test")) as store:
        store.revoke("alice")
    with contextlib.closing(Keyring((), lambda: Store(tmp_path, actor="test"))) as ring:
        assert not ring.open
    assert not Keyring((), may_be_open=False).open
    assert not Keyring(("k",)).open


def test_the_audit_log_is_only_added_to(tmp_path: Path) -> None:
    make(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "treadle.db")) as db:
        for statement in ("DELETE FROM audit", "UPDATE audit SET actor = 'nobody'"):
            with pytest.raises(sqlite3.Error, match="only ever added to"):
                db.execute(statement)


def test_many_processes_at_once(tmp_path: Path) -> None:
    """Half a dozen programs open a store that is not there, each for the first key, and add usage."""
    program = (
        "import pathlib, sys\nfrom treadle.keys.store import Store\n"
        "from treadle.keys.usage import Counts, Used\n"
        "folder = pathlib.Path(sys.argv[1]); store = Store(folder, actor='t')\n"
        "print(store.first_key(folder / 'first-key') is not None)\n"
        "used = Used('k', 'm', '2027-01-31')\n"
        "for _ in range(20): store.add_usage({used: Counts(requests=1, prompt_tokens=3)})\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    made = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * 6
    assert sorted(made) == ["False"] * 5 + ["True"]
    with contextlib.closing(Store(tmp_path, actor="test")) as store:
        assert store.usage("2027-01-31", "2027-01-31") == [
            (Used("k", "m", "2027-01-31"), Counts(requests=120, prompt_tokens=360))
        ]
        (key,) = store.all_keys()
        assert (key.name, sorted(key.scopes)) == ("first", ["admin", "inference", "metrics"])
    file = tmp_path / "first-key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ring = Keyring((), lambda: Store(tmp_path, actor="test"))
    with contextlib.closing(ring):
        assert ring.find(file.read_text().strip()).name == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first-key", "treadle.db"]


def test_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    monkeypatch.setattr(store_module, "_PATIENCE", 0.1)
    with contextlib.closing(sqlite3.connect(tmp_path / "treadle.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with contextlib.closing(Store(tmp_path, actor="test")) as store:
            assert [key.name for key in store.all_keys()] == ["alice"]  # readers do not wait
            with pytest.raises(StoreError, match="locked by another program"):
                store.revoke("alice")
            other.execute("ROLLBACK")
            store.revoke("alice")


def test_damaged_foreign_and_newer(tmp_path: Path) -> None:
    file = tmp_path / "treadle.db"
    file.write_bytes(b"not a database, but quite long enough to be one" * 100)
    file.chmod(0o600)
    command = [sys.executable, "-m", "treadle.cli", "key", "list", "--data-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and result.stdout == ""
    assert "damaged" in result.stderr and str(file) in result.stderr and result.stderr.count("\n") == 1
    file.unlink()
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE recipes (name TEXT)")
    file.chmod(0o600)
    with pytest.raises(StoreError, match="another program"):
        treadle_key(tmp_path, "create", "x")
    file.unlink()
    make(tmp_path)
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="version 99"):
        treadle_key(tmp_path, "list")


def test_usage_is_counted_while_it_is_written(tmp_path: Path) -> None:
    make(tmp_path)
    opened = Store(tmp_path, actor="test")
    ring = Keyring((), lambda: opened)
    key = next(iter(opened.secrets()[0].values()))[0]
    sums = []
    watching = threading.Event()

    def watch() -> None:
        while not watching.is_set():
            sums.append(ring.month_tokens(key))

    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(300):
        ring.add(key, "toy", Counts(requests=1, prompt_tokens=2, completion_tokens=3))
        threading.Event().wait(0.004)
    watching.set()
    thread.join()
    ring.close()
    assert sums == sorted(sums)  # never counted twice, never lost
    with contextlib.closing(Store(tmp_path, actor="test")) as store:
        assert sum(counts.tokens for _, counts in store.usage("2000", "2999")) == 1500
