"""What a benchmark's record says of its run."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest

from treadle.bench.provenance import provenance


def test_a_run_is_described_without_the_folders_of_whoever_ran_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TREADLE_ISA", raising=False)
    script = Path(__file__).parents[2] / "benchmarks" / "peers" / "run.py"
    argv = ["/usr/bin/python3", str(script), str(tmp_path / "m.gguf"), "--threads", "2"]
    run = provenance({"llama.cpp": "1.2"}, argv)
    assert run.command == "python3 benchmarks/peers/run.py m.gguf --threads 2"
    assert run.versions["llama.cpp"] == "1.2"
    assert run.versions["treadle"]
    date = datetime.datetime.fromisoformat(run.date)
    assert abs((datetime.datetime.now(datetime.UTC) - date).total_seconds()) < 120
    assert 1 <= run.cores <= (os.cpu_count() or 1)
    assert run.memory_gib > 0.1
    monkeypatch.setenv("TREADLE_ISA", "avx2")
    typed = provenance(argv=["/opt/bin/python3", "/opt/bin/treadle", "eval", "kl", "--text", "/home/me/a b"])
    assert typed.command == "TREADLE_ISA=avx2 treadle eval kl --text 'a b'"
