"""Limits that control groups put on this process (kernel docs: admin-guide/cgroup-v1 and cgroup-v2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 2**60  # version 1 writes "unlimited" as a number near 2**63


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time per second that this process may use, None if unlimited."""
    quotas: list[float] = []
    for folder in _folders(root, "cpu"):
        if (text := _read(folder / "cpu.max")) is not None:
            quota, period = text.split()
        elif (text := _read(folder / "cpu.cfs_quota_us")) is not None:
            quota, period = text, _read(folder / "cpu.cfs_period_us") or "100000"
        else:
            continue
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still use, None if unlimited. Inactive file cache counts as free."""
    free: list[int] = []
    for folder in _folders(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit is None or used is None or limit == "max" or int(limit) >= _NO_LIMIT:
            continue
        stat = dict(line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
        cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        free.append(max(0, int(limit) - max(0, int(used) - cache)))
    return min(free, default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The group of this process and all above it; a container sees only the top."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup" / controller]
        else:
            continue
        for mount in mounts:
            folder = mount / path.lstrip("/")
            yield folder
            while folder != mount and mount in folder.parents:
                folder = folder.parent
                yield folder


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
