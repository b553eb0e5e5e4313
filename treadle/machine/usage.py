"""CPU time that the machine has spent so far, and how much of it for this server (proc(5))."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from treadle.machine import files

_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds


@dataclass(frozen=True)
class Usage:
    """Seconds of CPU time since the system started."""

    busy: float  # of the CPUs that this process may use
    own: dict[int, float]  # of this process, its parent and the parent's other children, by process id

    def others_since(self, earlier: Usage) -> float:
        """Seconds that processes outside of this server have used since then."""
        own = sum(seconds - earlier.own.get(pid, 0.0) for pid, seconds in self.own.items())
        return max(0.0, self.busy - earlier.busy - own)


def usage(root: Path = Path("/")) -> Usage:
    """The present state. ``root``/proc is read."""
    proc = root / "proc"
    parent = os.getppid()
    family = {os.getpid(), parent}
    for tasks in (proc / str(parent) / "task").glob("*/children"):
        family.update(map(int, files.text(tasks).split()))
    return Usage(
        _busy(files.text(proc / "stat")), {pid: _of_process(proc / str(pid) / "stat") for pid in family}
    )


def _busy(text: str) -> float:
    allowed = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
    ticks = 0
    for line in text.splitlines():
        name, *fields = line.split()
        if name in allowed:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks * _TICK


def _of_process(path: Path) -> float:
    fields = files.text(path).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK if len(fields) > 12 else 0.0
