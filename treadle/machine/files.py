"""Files of the kernel: /proc and /sys."""

from __future__ import annotations

from pathlib import Path


def text(path: Path) -> str:
    """The content of a file, stripped; nothing if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def value(path: Path, name: str) -> str | None:
    """What a line ``name: …`` says, stripped; None if there is none. Lines of a NUMA node's meminfo begin
    with its number.
    """
    for line in text(path).splitlines():
        label, colon, said = line.partition(":")
        if colon and label.split()[-1:] == [name]:
            return said.strip()
    return None


def size(path: Path, name: str) -> int | None:
    """Bytes that a line ``name: … kB`` states; None if there is none."""
    said = value(path, name)
    return None if said is None else int(said.split()[0]) * 1024


def ids(listed: str) -> list[int]:
    """Ids of CPUs or nodes: ``0-3,8`` as [0, 1, 2, 3, 8]; [] of nothing."""
    found: list[int] = []
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return sorted(found)
