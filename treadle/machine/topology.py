"""Physical cores, their NUMA nodes and L3 caches, from sysfs (kernel docs: admin-guide/cputopology)."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from treadle.machine import cgroup, files


@dataclass(frozen=True)
class Core:
    """One physical core, as far as this process may use it."""

    cpus: tuple[int, ...]  # logical CPU ids of its hardware threads that may be used, ascending; never empty
    node: int  # NUMA node whose memory is nearest
    l3: int  # lowest logical CPU id that shares its L3; its NUMA node's lowest where sysfs names no L3


@dataclass(frozen=True)
class Topology:
    """Usable cores, ordered by NUMA node, L3 and id: the first n are as close together as possible."""

    cores: tuple[Core, ...]
    quota: float | None  # CPUs' worth of time per second allowed by control groups, None if unlimited

    def threads(self) -> list[int]:
        """One logical CPU id per usable core; at least one, at most the whole CPUs of the quota."""
        limit = len(self.cores) if self.quota is None else max(1, int(self.quota))
        return [core.cpus[0] for core in self.cores[:limit]]


def threads() -> list[int]:
    """Logical CPU ids for workers: one per physical core ∩ affinity, within the cgroup quota."""
    return read_topology().threads()


def read_topology(root: Path = Path("/"), affinity: Collection[int] | None = None) -> Topology:
    """Reads ``root``/sys and ``root``/proc. ``affinity``: CPUs this process may use, None: asks the kernel.

    Whatever a machine does not tell (VMs and containers hide much) is taken as one node, one L3, no SMT.
    """
    allowed = set(os.sched_getaffinity(0) if affinity is None else affinity)
    system = root / "sys/devices/system"
    allowed &= set(files.ids(files.text(system / "cpu/online"))) or allowed
    node_of = _nodes(system / "node")
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(allowed):
        folder = system / f"cpu/cpu{cpu}"
        siblings = tuple(files.ids(files.text(folder / "topology/thread_siblings_list"))) or (cpu,)
        node = node_of.get(cpu, 0)
        alike = [other for other, its in node_of.items() if its == node] or [min(allowed)]
        l3 = min(_l3(folder / "cache") or alike)
        usable = tuple(sibling for sibling in siblings if sibling in allowed)
        cores[siblings] = Core(usable or (cpu,), node, l3)
    ordered = sorted(cores.values(), key=lambda core: (core.node, core.l3, core.cpus))
    return Topology(tuple(ordered), cgroup.cpu_quota(root))


def _nodes(folder: Path) -> dict[int, int]:
    """NUMA node of every CPU. A node without memory stands for the nearest node that has some."""
    nodes = {int(path.name.removeprefix("node")): path for path in folder.glob("node[0-9]*")}
    with_memory = {number for number, path in nodes.items() if _has_memory(path)} or set(nodes)
    order = sorted(nodes)  # the columns of `distance`
    result = {}
    for number, path in nodes.items():
        nearest = number
        if number not in with_memory:
            distances = zip(map(int, files.text(path / "distance").split()), order, strict=False)
            nearest = min((pair for pair in distances if pair[1] in with_memory), default=(0, number))[1]
        result.update(dict.fromkeys(files.ids(files.text(path / "cpulist")), nearest))
    return result


def _has_memory(node: Path) -> bool:
    return files.size(node / "meminfo", "MemTotal") != 0


def _l3(folder: Path) -> list[int]:
    for index in folder.glob("index[0-9]*"):
        if files.text(index / "level") == "3":
            return files.ids(files.text(index / "shared_cpu_list"))
    return []
