"""Measured limits are plausible on any machine; no timing is asserted beyond that."""

from __future__ import annotations

import msgspec
import pytest

from treadle import _native, machine
from treadle.bench.machine import MachineReport, machine_table, measure_peaks
from treadle.bench.report import summarise


def test_peaks_of_this_cpu() -> None:
    cpus = machine.threads()[:1]
    peaks = measure_peaks(cpus, [1], seconds=0.005, repeats=2)
    kinds = {(peak.isa, peak.type) for peak in peaks}
    assert {("avx2", "int8"), ("avx2", "f32")} <= kinds == set(_native.bench_peaks())
    assert all(peak.gop_per_s.low > 0 for peak in peaks)


def test_isa_limit_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_ISA", "avx2")
    assert set(_native.bench_peaks()) == {("avx2", "int8"), ("avx2", "f32")}


def test_unknown_peak_is_an_error() -> None:
    with pytest.raises(ValueError, match="no int4 peak for ISA avx2"):
        _native.bench_peak(_native.Pool(1, machine.threads()[:1]), "avx2", "int4", 0.01, 1)


def test_reads_are_timed_once_per_pass() -> None:
    seconds = _native.bench_read(_native.Pool(1, machine.threads()[:1]), 4 << 20, 3)
    assert len(seconds) == 3
    assert all(s > 0 for s in seconds)


def test_report_prints_and_becomes_json() -> None:
    peaks = measure_peaks(machine.threads()[:1], [1], seconds=0.002, repeats=1)
    report = MachineReport("cpu", [0], 0.0, [], peaks)
    assert "avx2 int8" in machine_table(report)
    assert msgspec.json.decode(msgspec.json.encode(report), type=MachineReport) == report
    assert report.best_peak("int8") == 1e9 * max(p.gop_per_s.median for p in peaks if p.type == "int8")
    assert report.best_peak("none") == 0.0
    assert str(summarise([2.0, 2.0])) == "2 ±0 %"
