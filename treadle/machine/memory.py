"""Memory that can be filled without swapping and without being killed."""

from __future__ import annotations

import ctypes
from pathlib import Path

from treadle.core import TreadleError
from treadle.machine import cgroup, files

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGE_PIECE = 128 << 10  # bytes


def available_memory(root: Path = Path("/")) -> int:
    """Bytes: the least of what the kernel calls MemAvailable, what the control groups leave, and what is free
    on the NUMA nodes that its cpuset allows (cpuset(7)).
    """
    path = root / "proc/meminfo"
    available = files.size(path, "MemAvailable")
    if available is None:
        raise TreadleError(f"{path} has no line MemAvailable; Linux 3.14 or newer is needed")
    limits = (available, cgroup.free_memory(root), _free_on_allowed_nodes(root))
    return min(limit for limit in limits if limit is not None)


def _free_on_allowed_nodes(root: Path) -> int | None:
    """Bytes, None if all nodes are allowed. Inactive file cache counts as free."""
    allowed = files.value(root / "proc/self/status", "Mems_allowed_list")
    nodes = {int(path.name[4:]): path for path in root.glob("sys/devices/system/node/node[0-9]*")}
    chosen = nodes.keys() & set(nodes if allowed is None else files.ids(allowed))
    if len(chosen) == len(nodes):
        return None
    names = ("MemFree", "Inactive(file)")
    return sum(files.size(nodes[node] / "meminfo", name) or 0 for node in chosen for name in names)


def resident_memory(pid: int, root: Path = Path("/")) -> int:
    """Bytes of memory that a process has filled, without mapped files; 0 if there is no such process."""
    return files.size(root / f"proc/{pid}/status", "RssAnon") or 0


def give_back_freed_memory() -> None:
    """Have glibc return what this process frees from now on, in pieces of 128 KiB and more.

    By default it raises that limit to the size of every larger piece that is freed, up to 32 MiB, and keeps
    pieces below it in a heap with holes (mallopt(3), M_MMAP_THRESHOLD). Every piece costs a system call and
    fresh pages: for a process that moves text, not for one that computes. Other C libraries have no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_PIECE)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_PIECE)
