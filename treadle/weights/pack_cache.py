"""Packed weights on disk, so that a restart maps them instead of packing the model again.

A model has one file, DIR/IDENTITY.pack. IDENTITY is a hash over the model (treadle.weights.identity) and over
the layouts in which its matrices are packed, which are the same on every ISA level. A file appears under its
name complete or not at all, and is never changed then, so any number of processes may map it. Its parts:

    header        magic, version, layout, sizes of index and file, checksum over these and the index
    index         msgpack: identity, checksum over the matrices, and of each its name, format, shape, place
    from 2 MiB    the matrices, at whole pages

Where the page cache does not hold the file in huge pages, because the file system or the kernel cannot, the
matrices are copied to memory that does: reading weights in small pages would cost a sixth of the decode speed
(docs/performance.md), at every token.

Everything is checked when the file is mapped, at the speed of memory. A file that is cut, damaged or of
another version is one that is not there, and is written anew.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from treadle import _native
from treadle.weights.gguf import GgufModelFile
from treadle.weights.identity import model_identity

log = logging.getLogger("treadle.weights")

VERSION = 1  # of the file format
_MAGIC = b"TRDLPACK"
_HEADER = struct.Struct("<8sIIQQ")  # magic, version, layout, bytes of the index, bytes of the file
_SUM = 16  # bytes of the checksum behind it
_HUGE = 2 << 20  # bytes of a huge page
_PAGE = 4096
_PIECE = 64 << 20  # bytes written at once
_DIRTY = 512 << 20  # bytes that may wait to get to the disk

Matrices = Mapping[str, _native.Matrix]


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    format: str
    rows: int
    cols: int
    offset: int
    nbytes: int


class _Index(msgspec.Struct, frozen=True, array_like=True):
    identity: bytes
    sum: int
    entries: list[_Entry]


class _Damaged(Exception):
    """The file cannot be used; the text says why."""


class PackCache:
    """The file of one model in a folder that takes at most ``size`` bytes, of all models together."""

    def __init__(self, folder: Path, size: int, file: GgufModelFile, pool: _native.Pool) -> None:
        self._folder, self._size, self._pool = folder, size, pool
        self._identity = model_identity(file, "packed", VERSION, _native.PACKED_LAYOUT)
        self._path = folder / f"{self._identity.hex()}.pack"

    def load(self) -> Matrices:
        """The matrices of the file by name; none if there is no file that can be used."""
        try:
            with self._path.open("rb") as file:
                matrices = self._map(file.fileno())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, msgspec.MsgspecError, _Damaged) as error:
            why = error.strerror if isinstance(error, OSError) else error
            log.warning("packed weights in %s cannot be used (%s); packing again", self._path, why)
            return {}
        with suppress(OSError):  # of another user, or on a read-only disk
            os.utime(self._path)
        return matrices

    def _map(self, fd: int) -> Matrices:
        size = os.fstat(fd).st_size
        head = os.pread(fd, _HEADER.size + _SUM, 0)
        if len(head) < _HEADER.size + _SUM or not head.startswith(_MAGIC):
            raise _Damaged("it is no such file")
        _, version, layout, length, total = _HEADER.unpack_from(head)
        if (version, layout) != (VERSION, _native.PACKED_LAYOUT):
            raise _Damaged("it is of another version of Treadle")
        if total != size or length > total:
            raise _Damaged(f"it has {size} bytes instead of {total}")
        payload = os.pread(fd, length, len(head))
        if _head(payload, total) != head:
            raise _Damaged("its index is damaged")
        index = msgspec.msgpack.decode(payload, type=_Index)
        if index.identity != self._identity:
            raise _Damaged("it is of another model")
        content = _content(fd, size)
        if _native.checksum(self._pool, content[_HUGE:]) != index.sum:
            raise _Damaged("its matrices are damaged")
        matrices = {
            e.name: _native.packed(e.format, content[e.offset : e.offset + e.nbytes], e.rows, e.cols)
            for e in index.entries
        }
        if huge_bytes(content) < size // 2:
            return {name: _native.copied(self._pool, matrix) for name, matrix in matrices.items()}
        return matrices

    def store(self, matrices: Matrices) -> None:
        """Write the file. Nothing depends on it: where that fails, a warning says why."""
        entries, end = [], _HUGE
        for name, matrix in matrices.items():
            entries.append(_Entry(name, matrix.format, matrix.rows, matrix.cols, end, matrix.nbytes))
            end += -(-matrix.nbytes // _PAGE) * _PAGE
        part = self._folder / f".{self._path.stem}.{os.getpid()}.part"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._in_work():
                return  # by another process that loads the same model
            self._make_room(end)
            try:
                with part.open("x+b", buffering=0) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._write(file.fileno(), matrices, entries, end)
                    part.replace(self._path)
            finally:
                part.unlink(missing_ok=True)
            _sync_folder(self._folder)
        except OSError as error:
            log.warning(
                "packed weights cannot be kept in %s (%s); the model is packed again at every start",
                self._folder,
                error.strerror,
            )
        else:
            log.info("packed weights are kept in %s (%.2f GiB)", self._path, end / 2**30)

    def _write(self, fd: int, matrices: Matrices, entries: list[_Entry], size: int) -> None:
        os.posix_fallocate(fd, 0, size)  # a disk that is full says so now
        waiting = 0
        for entry in entries:
            data, done = matrices[entry.name].data.data, 0
            while done < entry.nbytes:
                written = os.pwrite(fd, data[done : done + _PIECE], entry.offset + done)
                done, waiting = done + written, waiting + written
                if waiting >= _DIRTY:
                    os.fdatasync(fd)
                    waiting = 0
        sum = _native.checksum(self._pool, _content(fd, size)[_HUGE:])
        payload = msgspec.msgpack.encode(_Index(self._identity, sum, entries))
        if len(payload) > _HUGE - _PAGE:
            raise OSError(0, "the model has too many matrices")
        os.pwrite(fd, _head(payload, size) + payload, 0)
        os.fsync(fd)

    def _in_work(self) -> bool:
        """Whether another process is writing the file. Removes what dead ones left behind."""
        found = False
        for part in self._folder.glob(".*.part"):
            with suppress(FileNotFoundError), part.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    found |= part.name.startswith(f".{self._path.stem}.")
                else:
                    part.unlink()
        return found

    def _make_room(self, size: int) -> None:
        """Remove the files used least recently until ``size`` more bytes fit; OSError if they never will."""
        if size > self._size:
            raise OSError(0, f"they take {size} bytes, and --pack-cache-size is {self._size}")
        files = []
        for path in self._folder.glob("*.pack"):
            with suppress(FileNotFoundError):
                info = path.stat()
                files.append((info.st_mtime, info.st_size, path))
        files.sort(reverse=True)
        total = sum(taken for _, taken, path in files if path != self._path)
        while files and total + size > self._size:
            _, taken, path = files.pop()
            if path != self._path:
                path.unlink(missing_ok=True)
                total -= taken


def _head(payload: bytes, total: int) -> bytes:
    """Everything before the index."""
    header = _HEADER.pack(_MAGIC, VERSION, _native.PACKED_LAYOUT, len(payload), total)
    return header + blake2b(header + payload, digest_size=_SUM).digest()


def _content(fd: int, size: int) -> NDArray[np.uint8]:
    """The whole file, mapped."""
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    with suppress(OSError):  # page caches with large folios map them as huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def huge_bytes(content: NDArray[np.uint8]) -> int:
    """How much of a file, mapped and read, is in huge pages."""
    begin = f"{content.ctypes.data:08x}-"
    with Path("/proc/self/smaps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(begin):
                field = next((line for line in lines if line.startswith("FilePmdMapped:")), ": 0")
                return int(field.split()[1]) * 1024
    return 0


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
