"""What a process frees goes back to the system."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys
from treadle import machine
if sys.argv[1] == "back":
    machine.give_back_freed_memory()
kept = []
for _ in range(3):
    large = []
    for _ in range(100):
        large.append(bytes(1 << 20))
        kept.append(bytes(600))  # small, and in the way of what lies below
    del large
print(machine.resident_memory(os.getpid()) >> 20)
"""


def resident_mib(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_freed_memory_goes_back_to_the_system() -> None:
    assert resident_mib("back") < 60 < resident_mib("default")
