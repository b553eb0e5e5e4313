"""Memory that can be filled without swapping and without being killed."""

from __future__ import annotations

from pathlib import Path

from treadle.core import TreadleError
from treadle.machine import cgroup


def available_memory(root: Path = Path("/")) -> int:
    """Bytes: what the kernel calls MemAvailable, or what the control group leaves if that is less."""
    path = root / "proc/meminfo"
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available = int(value.split()[0]) * 1024
            limit = cgroup.free_memory(root)
            return available if limit is None else min(available, limit)
    raise TreadleError(f"{path} has no line MemAvailable; Linux 3.14 or newer is needed")


def resident_memory(pid: int, root: Path = Path("/")) -> int:
    """Bytes of memory that a process has filled, without mapped files; 0 if there is no such process."""
    try:
        status = (root / f"proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
