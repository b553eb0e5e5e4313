"""What this machine gives to this process: CPUs, memory, instruction sets."""

from __future__ import annotations

from treadle.machine.isa import require_isa
from treadle.machine.memory import available_memory, give_back_freed_memory, resident_memory
from treadle.machine.topology import Core, Topology, read_topology, threads
from treadle.machine.usage import Usage, usage

__all__ = [
    "Core",
    "Topology",
    "Usage",
    "available_memory",
    "give_back_freed_memory",
    "read_topology",
    "require_isa",
    "resident_memory",
    "threads",
    "usage",
]
