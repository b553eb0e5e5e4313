"""`treadle eval` against transformers in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.evaluation.oracle import from_gguf
from tests.models import tiny
from treadle import hub
from treadle.text.tokenizer import Tokenizer
from treadle.weights.gguf import open_gguf

TEXT = (
    "The licences for most software are designed to take away your freedom to share and change it. By "
    "contrast, a free licence is intended to guarantee your freedom to share and change the software. "
) * 3


def evaluate(*arguments: str | Path, fails: bool = False) -> Any:
    """The JSON that `treadle eval` prints, or the line with which it fails."""
    command = [sys.executable, "-m", "treadle.cli", "eval", *map(str, arguments)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == int(fails), done.stderr
    return done.stderr if fails else json.loads(done.stdout)


def log_probabilities(model: PreTrainedModel, ids: list[int], size: int, stride: int) -> np.ndarray:
    """float64 [tokens - 1, vocab]: the prediction of every token but the first, by windows."""
    out, done = [], 1
    while done < len(ids):
        end = size if done == 1 else min(done + stride, len(ids))
        begin = max(0, end - size)
        logits = tiny.logits(model, ids[begin:end])[done - 1 - begin : len(ids[begin:end]) - 1]
        out.append(torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy())
        done = begin + len(ids[begin:end])
    return np.concatenate(out)


def check_divergence(report: dict[str, Any], p: np.ndarray, q: np.ndarray, ids: list[int]) -> None:
    """The report is that of log-probabilities ``p`` against ``q``, [tokens - 1, vocab] each."""
    result, targets = report["result"], ids[1:]
    kl = (np.exp(q) * (q - p)).sum(1)
    assert result["tokens"] == len(targets)
    assert result["kl"]["value"] == pytest.approx(kl.mean(), rel=1e-3, abs=1e-7)
    assert result["kl"]["error"] == pytest.approx(kl.std(ddof=1) / len(kl) ** 0.5, rel=1e-3, abs=1e-7)
    for percent, value in result["percentiles"].items():
        assert value == pytest.approx(np.percentile(kl, float(percent)), rel=1e-2, abs=1e-6)
    assert result["top1"]["value"] == pytest.approx(
        (p.argmax(1) == q.argmax(1)).mean(), abs=0.01
    )  # near ties
    loss, base = (-x[np.arange(len(targets)), targets] for x in (p, q))
    assert result["perplexity"]["value"] == pytest.approx(np.exp(loss.mean()), rel=1e-4)
    assert result["reference_perplexity"]["value"] == pytest.approx(np.exp(base.mean()), rel=1e-4)
    assert result["ratio"]["value"] == pytest.approx(np.exp((loss - base).mean()), rel=1e-4)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_two_models_are_compared_as_transformers_and_numpy_do(tmp_path: Path, text: Path) -> None:
    one = tiny.make("qwen2", initializer_range=0.2)
    with torch.no_grad():
        other = tiny.make("qwen2", initializer_range=0.2)
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    tiny.write(tmp_path / "one.gguf", one, "qwen2", tokenizer=True)
    tiny.write(tmp_path / "other.gguf", other, "qwen2", tokenizer=True)
    ids = tiny.byte_ids(TEXT)
    p, q = (log_probabilities(model, ids, 200, 60) for model in (one, other))
    reading = ("--text", text, "--context", "200", "--stride", "60")
    saved = tmp_path / "logits.npy"

    check_divergence(
        evaluate("kl", tmp_path / "one.gguf", "--reference", tmp_path / "other.gguf", *reading), p, q, ids
    )
    alone = evaluate("perplexity", tmp_path / "other.gguf", *reading, "--save-logits", saved)
    losses = -q[np.arange(len(ids) - 1), ids[1:]]
    assert alone["result"]["nll"]["value"] == pytest.approx(losses.mean(), rel=1e-4)
    error = losses.std(ddof=1) / len(losses) ** 0.5
    assert alone["result"]["nll"]["error"] == pytest.approx(error, rel=1e-3)
    assert alone["result"]["perplexity"]["error"] == pytest.approx(np.exp(losses.mean()) * error, rel=1e-3)
    assert alone["context"] == 200 and alone["stride"] == 60
    check_divergence(evaluate("kl", tmp_path / "one.gguf", "--reference", saved, *reading), p, q, ids)

    half = np.zeros(len(ids) - 1, dtype=[("token", "<i4"), ("logits", "<f2", (tiny.VOCAB,))])
    half["token"], half["logits"] = ids[1:], p
    np.save(tmp_path / "half.npy", half)
    same = evaluate("kl", tmp_path / "one.gguf", "--reference", tmp_path / "half.npy", *reading)
    assert same["result"]["kl"]["value"] < 1e-5
    assert same["reference"]["source"] == "half.npy"


def test_smollm2_is_as_good_as_transformers_says(text: Path, tmp_path: Path) -> None:
    path = Path(hub.resolve(None))
    ids = Tokenizer.from_gguf(open_gguf(path).metadata).encode(TEXT)
    exact = log_probabilities(from_gguf(path), ids, 64, 32)
    records = np.zeros(len(exact), dtype=[("token", "<i4"), ("logits", "<f4", (exact.shape[1],))])
    records["token"], records["logits"] = ids[1:], exact
    np.save(tmp_path / "exact.npy", records)
    reading = ("--text", text, "--context", "64", "--reference", tmp_path / "exact.npy")
    served = evaluate("kl", *reading)["result"]
    assert served["reference_perplexity"]["value"] == pytest.approx(
        np.exp(-exact[np.arange(len(exact)), ids[1:]].mean()), rel=1e-6
    )
    float32, int8 = (
        evaluate("kl", *reading, "--activations", kind)["result"] for kind in ("float32", "int8")
    )
    # Beside the activations only keys and values are rounded, to bf16.
    assert float32["kl"]["value"] < 5e-4
    assert served["kl"]["value"] < 5e-4
    assert served["kl"]["value"] < int8["kl"]["value"] < 0.01
    assert served["ratio"]["value"] == pytest.approx(1, abs=0.005)
    assert served["top1"]["value"] > 0.95


def test_smollm2_against_itself_with_a_smaller_cache(text: Path) -> None:
    options = ("--text", text, "--context", "96", "--reference-activations", "auto")
    assert evaluate("kl", *options)["result"]["kl"]["value"] == 0
    eight, four = (
        evaluate("kl", *options, "--kv-dtype", kind)["result"]["kl"]["value"] for kind in ("q8", "q4")
    )
    assert 0 < eight < 0.01
    assert eight < four < 0.5


def test_wrong_references_are_explained(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tiny.write(path, tiny.make("qwen2"), "qwen2", tokenizer=True)
    count = len(tiny.byte_ids(TEXT)) - 1
    reading = ("kl", path, "--text", text, "--reference", tmp_path / "l.npy")

    def refused(array: np.ndarray | bytes) -> str:
        if isinstance(array, bytes):
            (tmp_path / "l.npy").write_bytes(array)
        else:
            np.save(tmp_path / "l.npy", array)
        line = evaluate(*reading, fails=True)
        assert line.count("\n") == 1
        return str(line)

    def records(count: int, vocab: int) -> np.ndarray:
        return np.zeros(count, dtype=[("token", "<i4"), ("logits", "<f4", (vocab,))])

    assert "no file of logits" in refused(b"nothing of that kind")
    assert "records of float64" in refused(np.zeros(4))
    assert f"4 predictions, but this text has {count}" in refused(records(4, tiny.VOCAB))
    assert "the same vocabulary" in refused(records(count, 7))
    assert "another text, from prediction 0 on" in refused(records(count, tiny.VOCAB))
    broken = records(count, tiny.VOCAB)
    broken["token"], broken["logits"] = tiny.byte_ids(TEXT)[1:], np.nan
    assert "not finite" in refused(broken)
    assert "is made for 2048" in evaluate("perplexity", path, "--text", text, "--context", "4096", fails=True)
