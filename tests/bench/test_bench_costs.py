"""Costs and kernel measurements on a synthetic file, counted independently."""

from __future__ import annotations

from pathlib import Path

import gguf
import msgspec
import pytest

from treadle.bench.costs import model_costs
from treadle.bench.kernel import KernelReport, kernel_table, measure_kernels
from treadle.bench.shapes import Shape
from treadle.bench.synth import write_synthetic
from treadle.core import TreadleError

UNTIED = Shape("tiny", "qwen2", 3, 256, 512, 4, 2, 512, 1024, 1e6, 1e-6, head_dim=64)
TIED = Shape("tiny", "smollm2", 3, 256, 512, 4, 2, 512, 1024, 1e6, 1e-6, head_dim=64, tied=True)
LAYER_WEIGHTS = 256 * 256 * 2 + 128 * 256 * 2 + 512 * 256 * 3  # q and o, k and v, gate, up and down


@pytest.mark.parametrize("shape", [UNTIED, TIED])
def test_costs_count_what_one_token_touches(tmp_path: Path, shape: Shape) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(shape, "Q4_K_M", path)
    costs, linear = model_costs(path)
    assert costs.layer_ops == 2 * 3 * LAYER_WEIGHTS
    assert costs.output_ops == 2 * 512 * 256
    assert costs.kv_values == 3 * 2 * (64 + 64)
    assert costs.arithmetic == "int8"
    tensors = gguf.GGUFReader(path).tensors
    skipped = "" if shape.tied else "token_embd.weight"  # one row of it per token
    assert costs.weight_bytes == sum(int(t.n_bytes) for t in tensors if t.name != skipped)
    assert sum(len(entry.names) for entry in linear) == 3 * 7 + 1


def test_float_files_compute_in_float(tmp_path: Path) -> None:
    write_synthetic(UNTIED, "BF16", tmp_path / "m.gguf")
    assert model_costs(tmp_path / "m.gguf")[0].arithmetic == "float"


def test_no_gguf_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"not a model")
    with pytest.raises(TreadleError, match=r"m\.gguf"):
        model_costs(tmp_path / "m.gguf")


def test_every_linear_shape_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.bench.machine.READ_BYTES", 1 << 20)
    write_synthetic(UNTIED, "Q4_K_M", tmp_path / "m.gguf")
    report = measure_kernels(tmp_path / "m.gguf", 1, [1, 3], seconds=0.001, repeats=2)
    assert {(r.type, r.rows, r.cols) for r in report.results} >= {("Q4_K", 512, 256), ("Q6_K", 512, 256)}
    assert {r.tokens for r in report.results} == {1, 3}
    assert all(r.gop_per_s > 0 and r.share > 0 for r in report.results)
    assert kernel_table(report).count("\n") == len(report.results) + 1
    assert msgspec.json.decode(msgspec.json.encode(report), type=KernelReport) == report
