"""CPU time of the machine, and of a server on it, from a tree of procfs files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from treadle import machine

TICK = 1 / os.sysconf("SC_CLK_TCK")


def state(root: Path, cpu: int, others: int, own: dict[int, int]) -> machine.Usage:
    """``cpu`` was busy for ``others`` ticks and those of ``own`` by process id."""
    parent = os.getppid()
    busy = others + sum(own.values())
    lines = [f"cpu  {9 * busy} 0 0 0 0 0 0 0 0 0", f"cpu{cpu} {busy - 3} 1 1 5000 700 1 0 0 0 0"]
    lines.append("cpu4095 1000000 0 0 0 0 0 0 0 0 0")  # not for this process
    files = {"stat": "\n".join(lines), f"{parent}/task/{parent}/children": " ".join(map(str, own))}
    for pid, ticks in own.items():
        files[f"{pid}/stat"] = f"{pid} (a (b) c) S 1 1 1 0 -1 0 0 0 0 0 {ticks - 2} 2 0 0 20 0 1 0 0"
    for name, text in files.items():
        path = root / "proc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return machine.usage(root)


def test_what_others_use_is_the_rest(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    parent, this, sibling = os.getppid(), os.getpid(), 4_000_000
    before = state(tmp_path, cpu, 1000, {parent: 100, this: 50, sibling: 10})
    after = state(tmp_path, cpu, 1300, {parent: 110, this: 90, sibling: 40, sibling + 1: 25})
    assert after.others_since(before) == pytest.approx(300 * TICK)
    assert before.others_since(before) == 0.0


def test_memory_that_a_process_has_filled(tmp_path: Path) -> None:
    folder = tmp_path / "proc" / "7"
    folder.mkdir(parents=True)
    (folder / "status").write_text("Name:\tx\nVmRSS:\t  900 kB\nRssAnon:\t     500 kB\nRssFile:\t 400 kB\n")
    assert machine.resident_memory(7, tmp_path) == 500 * 1024
    assert machine.resident_memory(8, tmp_path) == 0
