"""Who uses the CPUs: the process being measured, or others that disturb it."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """CPU seconds that the whole machine has worked since boot, over all CPUs."""
    first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def tree_seconds(pid: int) -> dict[int, float]:
    """CPU seconds of a process and of its living descendants, by process id."""
    seconds: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        one = int(path.parent.name)
        seconds[one] = (int(fields[11]) + int(fields[12])) / _TICKS
        children.setdefault(int(fields[1]), []).append(one)
    tree, todo = {}, [pid]
    while todo:
        one = todo.pop()
        tree[one] = seconds.get(one, 0.0)
        todo += children.get(one, [])
    return tree
