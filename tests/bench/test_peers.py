"""The side-by-side runner, with stand-ins for the programs of its peers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers" / "run.py"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peers_run", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "peers_run", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def llama_bin(tmp_path: Path) -> Path:
    """Programs that print what llama.cpp prints, and log how they were called."""
    outputs = {
        "llama-bench": '[{"n_prompt": 512, "n_gen": 0, "avg_ts": 80.5}]',
        "llama-batched-bench": 'noise\\n{"pp": 1, "tg": 8, "pl": 20, "speed_tg": 40.25}\\n',
    }
    for name, output in outputs.items():
        program = tmp_path / name
        program.write_text(
            f"#!/bin/sh\necho $0 \"$@\" >> {tmp_path}/log\nprintf '{output}'\n", encoding="utf-8"
        )
        program.chmod(0o755)
    return tmp_path


def test_llama_cpp_is_asked_for_the_same_work(peers: ModuleType, llama_bin: Path) -> None:
    peer = peers.LlamaCpp(llama_bin, Path("m.gguf"), threads=2, steps=8)
    assert peer.measure(peers.Case("prefill", 512))[0] == 80.5
    assert peer.measure(peers.Case("decode", 2048))[0] == 80.5
    assert peer.measure(peers.Case("decode", 1, 20))[0] == 40.25
    prefill, decode, batch = (llama_bin / "log").read_text().splitlines()
    assert prefill.endswith("llama-bench -m m.gguf -t 2 -p 512 -n 0 -r 1 -o json")
    assert decode.endswith("llama-bench -m m.gguf -t 2 -p 0 -n 8 -d 2048 -r 1 -o json")
    assert batch.endswith("-c 180 -npp 1 -ntg 8 -npl 20 --output-format jsonl")


def test_openvino_is_asked_for_the_same_work(peers: ModuleType, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/log\n'
        """printf 'noise\n{"version": "2026.4", "tokens_per_s": 90.5}\n'""",
        encoding="utf-8",
    )
    python.chmod(0o755)
    peer = peers.OpenVino(str(python), Path("folder"), threads=2, steps=8)
    assert peer.measure(peers.Case("prefill", 512))[0] == 90.5
    assert peer.measure(peers.Case("decode", 1, 20))[0] == 90.5
    assert peer.version() == "2026.4"
    prefill, batch = (tmp_path / "log").read_text().splitlines()
    assert prefill.endswith("genai_bench.py folder --threads 2 --steps 8 prefill 512 --batch 1")
    assert batch.endswith("genai_bench.py folder --threads 2 --steps 8 decode 1 --batch 20")


def test_rounds_alternate_and_the_table_has_ratios(peers: ModuleType) -> None:
    calls: list[str] = []

    class Engine:
        def __init__(self, name: str, rate: float, foreign: float) -> None:
            self.name, self.rate, self.foreign = name, rate, foreign

        def measure(self, case: object) -> tuple[float, float]:
            calls.append(self.name)
            return self.rate, self.foreign

    measured = peers.compare(
        Engine("a", 300.0, 0.0), Engine("b", 100.0, 0.2), [peers.Case("prefill", 512)], 2
    )
    assert calls == ["a", "b", "a", "b"]
    table = peers.table(measured, "b")
    assert " b token/s |" in table and "3.00" in table and "20 % (noisy)" in table
    json.dumps([peers.asdict(entry) for entry in measured])


def test_missing_and_failing_programs_are_named(peers: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="llama-bench is not in"):
        peers.LlamaCpp(tmp_path, Path("m.gguf"), threads=2, steps=8)
    with pytest.raises(peers.Failure, match="cannot open"):
        peers.run(["sh", "-c", "echo cannot open m.gguf >&2; exit 3"])


def test_a_run_gives_its_output(peers: ModuleType) -> None:
    output, share = peers.run(["sh", "-c", "echo hello"])
    assert output == "hello\n"
    assert share >= 0
