"""What a model can be called, and where its files are for each kind of name."""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from urllib.parse import unquote, urlsplit

from treadle.core import TreadleError
from treadle.hub.store import models_dir

SPLIT = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")
_REPOSITORY = re.compile(r"(?P<owner>[\w.-]+)/(?P<repo>[\w.-]+)/(?P<file>[\w./-]+\.gguf)")
_PINNED = re.compile(r"(?P<name>.+)#sha256=(?P<sha256>[0-9a-fA-F]{64})")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model of the catalogue; see catalogue.toml."""

    name: str
    file: str
    sha256: str
    size: int
    package: str
    version: str
    member: str
    license: str

    @property
    def path(self) -> Path:
        return models_dir() / self.name.replace(":", "-") / self.file


@dataclass(frozen=True)
class Source:
    """Where a file is. ``headers`` go to the host of ``url`` only, not along with redirects to others."""

    url: str
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Remote:
    """A file on a server. ``sha256``: given by the user as ``NAME#sha256=HEX``."""

    name: str
    source: Source
    path: Path
    sha256: str | None


@cache
def catalogue() -> dict[str, Entry]:
    """By name, the default first."""
    text = files("treadle.hub").joinpath("catalogue.toml").read_text("utf-8")
    return {name: Entry(name=name, **fields) for name, fields in tomllib.loads(text).items()}


def is_remote(name: str) -> bool:
    """Whether this is the name of a file on a server, rather than of the catalogue or a path."""
    return name.startswith(("hf:", "ms:", "https://", "http://"))


def remote(name: str) -> Remote:
    """The place of ``hf:OWNER/REPO/FILE.gguf``, ``ms:OWNER/REPO/FILE.gguf`` or a URL. Raises TreadleError."""
    pinned = _PINNED.fullmatch(name)
    sha256 = pinned["sha256"].lower() if pinned else None
    name = pinned["name"] if pinned else name
    if pinned and SPLIT.fullmatch(name):
        raise TreadleError(
            f"{name} is one of several files; #sha256= can be given for a model of one file only"
        )
    if name.startswith(("http://", "https://")):
        return _url(name, sha256)
    kind, _, rest = name.partition(":")
    match = _REPOSITORY.fullmatch(rest)
    if not match or any(set(piece) <= {"."} for piece in rest.split("/")):
        raise TreadleError(f"{name!r} is no model name; expected {kind}:OWNER/REPO/FILE.gguf")
    owner, repo, file = match["owner"], match["repo"], match["file"]
    headers = {}
    if kind == "hf":
        host = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        url = f"{host}/{owner}/{repo}/resolve/main/{file}"
        if token := os.environ.get("HF_TOKEN"):
            headers["Authorization"] = f"Bearer {token}"
    else:
        host = os.environ.get("MODELSCOPE_ENDPOINT", "https://modelscope.cn").rstrip("/")
        url = f"{host}/models/{owner}/{repo}/resolve/master/{file}"
    return Remote(name, Source(url, headers), models_dir() / kind / owner / repo / file, sha256)


def _url(url: str, sha256: str | None) -> Remote:
    parts = urlsplit(url)
    file = unquote(parts.path).rpartition("/")[2]
    if not parts.hostname or not file.endswith(".gguf") or file.startswith("."):
        raise TreadleError(f"{url!r} does not name a .gguf file; expected https://HOST/PATH/FILE.gguf")
    # The folder tells apart equal file names; the files of a split model share it.
    folder = hashlib.sha256(url.replace(parts.path, parts.path.rpartition("/")[0]).encode()).hexdigest()[:16]
    return Remote(url, Source(url, {}), models_dir() / "url" / folder / file, sha256)


def split_names(name: str) -> list[str]:
    """The names of all files of a model, given the name of any of them."""
    match = SPLIT.fullmatch(name)
    if not match:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
