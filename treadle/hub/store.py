"""The models on this machine, under ``$TREADLE_HOME/models`` (default ``~/.cache/treadle/models``).

A model file stands at its place only once it is complete and verified; beside it ``FILE.json`` says where it
came from. While it is fetched it is ``FILE.part``, and ``FILE.lock`` keeps a second fetch waiting.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from treadle.core import TreadleError

# Called with (bytes done, bytes in total); the total is 0 while it is unknown.
Progress = Callable[[int, int], None]

_CHUNK = 2**20


@dataclass(frozen=True)
class Model:
    """A model that can be named. ``path``: its (first) GGUF file, None when it is not on this machine."""

    name: str
    path: Path | None
    size: int  # bytes of all its files; of the catalogue when it is not on this machine

    def __fspath__(self) -> str:
        if self.path is None:
            raise TreadleError(
                f"model {self.name!r} is not on this machine; fetch it: treadle pull {self.name}"
            )
        return str(self.path)


class Record(msgspec.Struct, frozen=True):
    """``FILE.json``, written last. ``files``: number of files of the model, this one included."""

    name: str
    sha256: str
    size: int
    files: int = 1


def models_dir() -> Path:
    """Where models are kept; may not exist yet."""
    home = os.environ.get("TREADLE_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "treadle") / "models"


def beside(file: Path, suffix: str) -> Path:
    """``FILE.suffix`` in the same folder."""
    return file.with_name(file.name + suffix)


def read_record(file: Path) -> Record | None:
    """The record of a complete file, or None when the file is absent, incomplete or of another size."""
    try:
        record = msgspec.json.decode(beside(file, ".json").read_bytes(), type=Record)
        return record if file.stat().st_size == record.size else None
    except (OSError, msgspec.MsgspecError):
        return None


def stored_models() -> list[tuple[Path, Record]]:
    """Every complete first file with its record, by name."""
    found = [(file, read_record(file)) for file in models_dir().rglob("*.gguf")]
    complete = [(file, record) for file, record in found if record is not None and record.name]
    return sorted(complete, key=lambda pair: pair[1].name)


def check_space(folder: Path, needed: int) -> None:
    """Raises TreadleError when the file system of ``folder`` has less than ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise TreadleError(
            f"{folder} has {free / 1e6:.0f} MB free, but {needed / 1e6:.0f} MB are needed; free some space "
            "or point TREADLE_HOME to a larger disk"
        )


def finish(part: Path, file: Path, record: Record, sha256: str | None) -> None:
    """Verify ``part`` and put it in place. If it is the wrong file, deletes it and raises TreadleError.

    ``sha256``: what is expected, None when nobody says; ``record.sha256`` is replaced by what was found.
    """
    digest = hashlib.sha256()
    with part.open("rb") as stream:
        magic = stream.read(4)
        digest.update(magic)
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
        os.fsync(stream.fileno())
    found = digest.hexdigest()
    wrong = None
    if sha256 is not None and found != sha256:
        wrong = f"its SHA-256 is {found}; expected {sha256}"
    elif magic != b"GGUF":
        wrong = f"it is not a GGUF file, it starts with {magic!r}"
    if wrong:
        part.unlink()
        raise TreadleError(
            f"{file.name} was fetched, but {wrong}. It was deleted; try again or use another source"
        )
    part.rename(file)
    written = beside(file, ".json.part")
    written.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, sha256=found)))
    written.rename(beside(file, ".json"))


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold ``FILE.lock``, waiting for another fetch of the same file to end. Creates the folder.

    Raises TreadleError for what goes wrong with the disk.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with beside(file, ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
            yield
    except OSError as error:
        raise TreadleError(
            f"cannot write to {file.parent}: {error.strerror or error}; point TREADLE_HOME to a folder that "
            "can be written and has space"
        ) from None
