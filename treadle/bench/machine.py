"""What the machine can do at most: read bandwidth and arithmetic peaks, measured now."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from treadle import _native, machine
from treadle.bench.report import Summary, markdown_table, summarise
from treadle.core import TreadleError

READ_BYTES = 512 << 20  # at least this; four times the last-level cache where that is more


class Bandwidth(msgspec.Struct, frozen=True):
    """Read bandwidth in GB/s (1e9 bytes) with this many threads."""

    threads: int
    gb_per_s: Summary


class Peak(msgspec.Struct, frozen=True):
    """Arithmetic peak in 1e9 operations/s; a multiply-add counts as two."""

    isa: str
    type: str  # int8, bf16 or f32
    threads: int
    gop_per_s: Summary


class MachineReport(msgspec.Struct, frozen=True):
    """Everything ``treadle bench machine`` measures."""

    cpu: str
    cpus: list[int]  # logical ids, one per physical core that this process may use
    load_before: float  # 1-minute load average when the measurement started
    bandwidth: list[Bandwidth]
    peaks: list[Peak]

    def best_bandwidth(self) -> float:
        """Bytes per second at the best thread count."""
        return 1e9 * max(entry.gb_per_s.median for entry in self.bandwidth)

    def best_peak(self, kind: str) -> float:
        """Operations per second of number type ``kind`` with all threads; 0.0 when nothing computes it."""
        return 1e9 * max((p.gop_per_s.median for p in self.peaks if p.type == kind), default=0.0)


def cpu_model() -> str:
    """The kernel's name of the processor, or "unknown"."""
    match = re.search(
        r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE
    )
    return match[1] if match else "unknown"


def thread_counts(most: int) -> list[int]:
    """1, 2, 3, 4, then steps of half an octave up to and including ``most``."""
    counts = {most}
    for power in range(most.bit_length()):
        counts |= {1 << power, 3 << power}
    return sorted(count for count in counts if count <= most)


def last_level_cache() -> int:
    """Bytes of the largest cache of CPU 0, 0 when the kernel does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [
        path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max((int(text[:-1]) * units[text[-1]] for text in sizes), default=0)


def measure_bandwidth(cpus: Sequence[int], counts: Sequence[int], passes: int = 9) -> list[Bandwidth]:
    """Read bandwidth with the first n of ``cpus`` for each n in ``counts``."""
    size = max(READ_BYTES, 4 * last_level_cache())
    found = []
    for threads in counts:
        seconds = _native.bench_read(_native.Pool(threads, list(cpus[:threads])), size, passes)
        found.append(Bandwidth(threads, summarise([size / 1e9 / s for s in seconds])))
    return found


def measure_peaks(
    cpus: Sequence[int], counts: Sequence[int], seconds: float = 0.1, repeats: int = 5
) -> list[Peak]:
    """Every arithmetic peak of this CPU with each number of threads; about ``seconds`` per repeat.

    Raises TreadleError if this CPU lacks the level that TREADLE_ISA names.
    """
    try:
        kinds = _native.bench_peaks()
    except RuntimeError as error:
        raise TreadleError(str(error)) from None
    found = []
    for threads in counts:
        pool = _native.Pool(threads, list(cpus[:threads]))
        for isa, kind in kinds:
            rates = _native.bench_peak(pool, isa, kind, seconds, repeats)
            found.append(Peak(isa, kind, threads, summarise([rate / 1e9 for rate in rates])))
    return found


def measure_machine(threads: int | None = None, seconds: float = 0.1, passes: int = 9) -> MachineReport:
    """Bandwidth with 1..``threads`` threads, peaks with one and with all; default: every usable core."""
    cpus = machine.threads()
    most = min(threads or len(cpus), len(cpus))
    load = os.getloadavg()[0]
    return MachineReport(
        cpu=cpu_model(),
        cpus=cpus,
        load_before=load,
        bandwidth=measure_bandwidth(cpus, thread_counts(most), passes),
        peaks=measure_peaks(cpus, sorted({1, most}), seconds),
    )


def machine_table(report: MachineReport) -> str:
    """Two Markdown tables: bandwidth by threads, peaks by ISA, type and threads."""
    bandwidth = [(entry.threads, entry.gb_per_s) for entry in report.bandwidth]
    peaks = [(f"{p.isa} {p.type}", p.threads, p.gop_per_s) for p in report.peaks]
    return "\n\n".join(
        [
            f"{report.cpu}, {len(report.cpus)} usable cores",
            markdown_table(["threads", "read GB/s"], bandwidth),
            markdown_table(["peak", "threads", "GOP/s"], peaks),
        ]
    )
