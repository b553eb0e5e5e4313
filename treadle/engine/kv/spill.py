"""KV blocks on disk, so that prompts stay warm over a restart.

Every full block of a prompt or answer is copied out when its step has ended, and a thread writes it to a file
of its own: DIR/IDENTITY/NAME. NAME is the block's name in the prefix cache, a hash over all tokens up to its
end and the request's ``cache_salt``; IDENTITY is a hash over all that the content depends on besides (see
treadle.weights.identity). A file appears under its name complete or not at all, and carries a checksum; one
that is cut, damaged or of another version is a block that is not there.

The folder never takes more than its size: the files used least recently go first, of whichever model.
Within a prompt the later blocks count as older, since they are of no use without those before them.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import struct
import threading
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.core import TreadleError

log = logging.getLogger("treadle.engine")

VERSION = 1  # of the file format and of the meaning of its content
_HEADER = struct.Struct("<8s16s16s16sQ")  # magic, identity, name, checksum, bytes of content
_MAGIC = b"TRDLKV%02d" % VERSION
_WAITING = 64  # blocks that may wait to be written, in memory; more are left out
_SLACK = 0.05  # of the size, freed at once when it is full
_RANK = 1e-3  # seconds by which a block counts as older than the one before it

Content = NDArray[np.uint8]


class BlockStore(Protocol):
    """Where blocks are copied from and to: treadle._native.Program."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        ...

    def read_block(self, block: int) -> Content:
        """A copy of a block's content."""
        ...

    def write_block(self, block: int, data: Content) -> None:
        """Put such content into a block."""
        ...


class Spill:
    """The blocks of one model on disk. ``store`` and ``load`` belong to the engine's thread."""

    def __init__(self, folder: Path, size: int, identity: bytes, blocks: BlockStore) -> None:
        """Use at most ``size`` bytes of ``folder``, which is made if need be. Raises TreadleError if that
        cannot be.
        """
        self._folder, self._size, self._identity, self._blocks = folder, size, identity, blocks
        self._home = folder / identity.hex()
        if size < (least := blocks.block_bytes + _HEADER.size):
            raise TreadleError(
                f"--kv-spill-size is {size} bytes, but one block of this model's KV cache takes {least}; "
                "give more"
            )
        try:
            for path in (folder, self._home):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner()
            for part in self._home.glob(".*"):  # left behind by an engine that died
                part.unlink(missing_ok=True)
        except OSError as error:
            raise TreadleError(f"--kv-spill: {folder} cannot be used: {error.strerror}") from None
        self._total = 0
        self._names: set[bytes] = set()  # of this model, written or waiting
        self._make_room(0)
        self._waiting: queue.SimpleQueue[tuple[bytes, Content | None, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="kv-spill", daemon=True)
        self._thread.start()

    def _check_owner(self) -> None:
        """KV content tells what was said: nobody else may read it, or put something in its place."""
        info = self._folder.stat()
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise TreadleError(
                f"--kv-spill: {self._folder} must belong to the user of the server, and be closed to others "
                "(chmod 700)"
            )

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def used(self, names: list[bytes], since: float) -> None:
        """A prompt of these blocks came in at ``since`` (time.time): they count as used then."""
        for rank, name in enumerate(names):
            if name in self._names:
                self._waiting.put((name, None, since - rank * _RANK))

    def store(self, name: bytes, rank: int, block: int, since: float) -> None:
        """Have the content of a full block written, unless it is there. ``rank``: blocks before it."""
        if name in self._names or self._waiting.qsize() >= _WAITING:
            return
        self._names.add(name)
        self._waiting.put((name, self._blocks.read_block(block), since - rank * _RANK))

    def load(self, name: bytes, block: int) -> bool:
        """Bring the content of that name into ``block``. False if it is not there, or not whole."""
        if name not in self._names:
            return False
        try:
            data = np.fromfile(self._path(name), np.uint8)
        except OSError:
            data = np.zeros(0, np.uint8)  # not written yet, or removed for another model
        content = data[_HEADER.size :]
        whole = len(content) == self._blocks.block_bytes
        if not whole or data[: _HEADER.size].tobytes() != self._header(name, content):
            return False
        self._blocks.write_block(block, content)
        return True

    def forget(self, names: list[bytes]) -> None:
        """These blocks are to be written anew when they are computed again."""
        self._names.difference_update(names)

    def close(self) -> None:
        """Write what is waiting, and end the thread."""
        self._waiting.put(None)
        self._thread.join()

    def _path(self, name: bytes) -> Path:
        return self._home / name.hex()

    def _header(self, name: bytes, content: Content) -> bytes:
        key = self._identity + name
        checksum = blake2b(content.data, digest_size=16, key=key).digest()
        return _HEADER.pack(_MAGIC, self._identity, name, checksum, content.nbytes)

    # ------------------------------------------------------------------ the thread

    def _write_all(self) -> None:
        while (job := self._waiting.get()) is not None:
            name, content, used = job
            try:
                if content is None:
                    os.utime(self._path(name), (used, used))
                else:
                    self._write(name, content, used)
            except FileNotFoundError:
                self._names.discard(name)  # removed meanwhile
            except OSError as error:
                self._names.discard(name)
                log.warning("a KV block could not be written to %s: %s", self._folder, error.strerror)

    def _write(self, name: bytes, content: Content, used: float) -> None:
        size = _HEADER.size + content.nbytes
        if self._total + size > self._size:
            self._make_room(size)
        part = self._home / f".{os.getpid()}"
        try:
            part.touch(0o600)
            with part.open("wb") as file:
                file.write(self._header(name, content))
                file.write(content.data)
            os.utime(part, (used, used))
            part.rename(self._path(name))
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._total += size

    def _make_room(self, size: int) -> None:
        """Look at the files of all models, and remove the oldest until ``size`` more bytes fit."""
        files = []
        for home in os.scandir(self._folder):
            if home.is_dir(follow_symlinks=False):
                for entry in os.scandir(home):
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if len(entry.name) == 32 and stat.S_ISREG(info.st_mode):
                        files.append((info.st_mtime, info.st_size, Path(entry.path)))
        files.sort(reverse=True)
        self._total = sum(file_size for _, file_size, _ in files)
        if self._total + size > self._size:
            while files and self._total + size > self._size * (1 - _SLACK):
                _, file_size, path = files.pop()
                path.unlink(missing_ok=True)
                self._total -= file_size
                if path.parent == self._home:
                    self._names.discard(bytes.fromhex(path.name))
        if not size:
            self._names = {bytes.fromhex(path.name) for *_, path in files if path.parent == self._home}
