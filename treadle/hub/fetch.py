"""Fetches one file over HTTP, continuing where an earlier try stopped (RFC 9110, sections 13.1.5 and 14)."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx2

from treadle.core import TreadleError
from treadle.hub.names import Source
from treadle.hub.store import Progress, beside, check_space

TRIES = 5  # in a row without a byte of progress
_PAUSE = 0.5  # seconds before the second try, doubled for each further one


def fetch(source: Source, part: Path, progress: Progress) -> str | None:
    """Complete ``part`` from ``source``. Returns the SHA-256 that the server states for the file, if it does.

    Raises TreadleError when the server refuses or no try gets further; ``part`` then stays for the next call.
    """
    tries = 0
    while True:
        before = _size(part)
        try:
            with httpx2.Client(follow_redirects=True, timeout=httpx2.Timeout(30, connect=15)) as client:
                return _attempt(client, source, part, progress)
        except (httpx2.TransportError, _Incomplete) as error:
            tries = 1 if _size(part) > before else tries + 1
            if tries >= TRIES:
                raise TreadleError(
                    f"cannot fetch {source.url}: {error or type(error).__name__}. What has arrived is kept; "
                    "the same command continues. Without a network give the path of a .gguf file instead"
                ) from None
            time.sleep(_PAUSE * 2 ** (tries - 1))
        except (httpx2.InvalidURL, httpx2.TooManyRedirects) as error:
            raise TreadleError(f"cannot fetch {source.url}: {error}") from None


class _Incomplete(Exception):
    """The body ended before its announced length, or does not belong to what is on disk."""


def _attempt(client: httpx2.Client, source: Source, part: Path, progress: Progress) -> str | None:
    have = _size(part)
    tag_file = beside(part, ".etag")
    tag = tag_file.read_text() if tag_file.exists() else ""
    headers = {**source.headers, "Accept-Encoding": "identity"}
    if have and tag:
        headers |= {"Range": f"bytes={have}-", "If-Range": tag}
    with client.stream("GET", source.url, headers=headers) as response:
        if response.status_code == 416:
            if response.headers.get("Content-Range") == f"bytes */{have}":  # all of it is on disk
                return _stated_sha256(response)
            part.unlink()
            raise _Incomplete("the server has no such range; starting again")
        _check_status(response, source.url)
        have = _resume_at(response, have)
        length = int(response.headers.get("Content-Length", 0))
        total = have + length if length else 0
        check_space(part.parent, length)
        if not have:
            tag = response.headers.get("ETag", "") or response.headers.get("Last-Modified", "")
            tag_file.write_text("" if tag.startswith("W/") else tag)  # weak: does not promise equal bytes
        with part.open("ab" if have else "wb") as target:
            progress(have, total)
            for chunk in response.iter_raw():
                target.write(chunk)
                have += len(chunk)
                progress(have, total)
        if total and have != total:
            raise _Incomplete(f"the connection ended after {have} of {total} bytes")
        return _stated_sha256(response)


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _resume_at(response: httpx2.Response, have: int) -> int:
    """How many of the bytes on disk the body continues. Raises _Incomplete if it is of another range."""
    if response.status_code != 206:
        return 0
    content_range = response.headers.get("Content-Range", "")
    if not re.fullmatch(rf"bytes {have}-\d+/(\d+|\*)", content_range):
        raise _Incomplete(f"the server sent the range {content_range!r} for bytes from {have}")
    return have


def _check_status(response: httpx2.Response, url: str) -> None:
    status = response.status_code
    if status in (200, 206):
        return
    if status in (408, 429) or status >= 500:
        raise _Incomplete(f"HTTP status {status}")
    hint = {
        401: "it needs a token: set HF_TOKEN for Hugging Face",
        403: "access is refused: accept the model's licence on its page, or set HF_TOKEN",
        404: "there is no such file: check the owner, the repository and the file name",
    }.get(status, "see the page of the model")
    raise TreadleError(f"cannot fetch {url}: HTTP status {status}; {hint}")


def _stated_sha256(response: httpx2.Response) -> str | None:
    """Hugging Face states the hash of a large file in a header of its first answer, before the redirect."""
    for answer in (*response.history, response):
        stated = answer.headers.get("X-Linked-ETag", "").strip('"').lower()
        if re.fullmatch(r"[0-9a-f]{64}", stated):
            return str(stated)
    return None
