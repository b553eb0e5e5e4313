"""What a process frees goes back to the system."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
from treadle import machine
machine.give_back_freed_memory()
kept = []
for _ in range(3):
    large = []
    for _ in range(100):
        large.append(bytes(1 << 20))
        kept.append(bytes(20_000))  # fits no old hole, and is in the way of what lies below
    del large
print(machine.resident_memory(os.getpid()) >> 20)
"""


def test_freed_memory_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 60  # MiB; 110 as glibc does it when nobody asks
