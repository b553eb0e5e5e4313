"""Memory that can be filled without swapping and without being killed."""

from __future__ import annotations

from pathlib import Path

from treadle.core import TreadleError
from treadle.machine import cgroup
from treadle.machine.topology import id_list


def available_memory(root: Path = Path("/")) -> int:
    """Bytes: the least of what the kernel calls MemAvailable, what the control groups leave, and what is free
    on the NUMA nodes that its cpuset allows (cpuset(7)).
    """
    path = root / "proc/meminfo"
    available = _value(path, "MemAvailable")
    if available is None:
        raise TreadleError(f"{path} has no line MemAvailable; Linux 3.14 or newer is needed")
    limits = (available, cgroup.free_memory(root), _free_on_allowed_nodes(root))
    return min(limit for limit in limits if limit is not None)


def _free_on_allowed_nodes(root: Path) -> int | None:
    """Bytes, None if all nodes are allowed. Inactive file cache counts as free."""
    for line in _lines(root / "proc/self/status"):
        if line.startswith("Mems_allowed_list:"):
            allowed = set(id_list(line.partition(":")[2].strip()))
            nodes = {int(path.name[4:]): path for path in root.glob("sys/devices/system/node/node[0-9]*")}
            if not nodes or allowed >= nodes.keys():
                return None
            names = ("MemFree", "Inactive(file)")
            return sum(
                _value(nodes[n] / "meminfo", name) or 0 for n in nodes.keys() & allowed for name in names
            )
    return None


def _value(path: Path, name: str) -> int | None:
    """Bytes that a line of a meminfo file states; a node's lines begin with its number."""
    for line in _lines(path):
        label, _, value = line.partition(":")
        if label.split()[-1:] == [name]:
            return int(value.split()[0]) * 1024
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


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
