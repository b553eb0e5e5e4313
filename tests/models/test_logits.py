"""Whole models against transformers in float32."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import tiny
from treadle.core import TreadleError
from treadle.engine.runner import Runner, RunnerConfig
from treadle.weights.gguf import open_gguf

ARCHITECTURES = ["llama", "qwen2", "qwen3"]
IDS = [int(i) for i in np.random.default_rng(7).integers(0, tiny.VOCAB, 300)]


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def run(runner: Runner, ids: list[int], chunk: int = 10**9, slot: int = 0, most: int = 64) -> np.ndarray:
    """Logits of every token [tokens, vocab], in steps of at most ``chunk`` tokens and ``most`` rows."""
    runner.tables[slot] = np.arange(runner.tables.shape[1]) + slot * runner.tables.shape[1]
    out = []
    step = min(chunk, most)
    for past in range(0, len(ids), step):
        part = ids[past : past + step]
        runner.run(i32(*part), i32(len(part)), i32(past), i32(slot), np.arange(len(part), dtype=np.int32))
        out.append(np.array(runner.logits))
    return np.concatenate(out)


def load(path: Path, threads: int | None = None) -> Runner:
    return Runner(open_gguf(path), frozenset(), RunnerConfig(threads=threads, context=1024, max_sequences=64))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Any, Path]]:
    model = tiny.make(request.param)
    path = tmp_path_factory.mktemp(request.param) / "f32.gguf"
    tiny.write(path, model, request.param)
    yield request.param, model, path


def test_float32_logits_equal_those_of_transformers(case: tuple[str, Any, Path]) -> None:
    _, model, path = case
    exact = tiny.logits(model, IDS)
    assert exact.std() > 0.15  # the comparison means something
    np.testing.assert_allclose(run(load(path), IDS), exact, atol=1e-3)


def test_a_bf16_cache_costs_little_against_a_float32_one(case: tuple[str, Any, Path]) -> None:
    architecture, _, path = case
    exact = tiny.logits(tiny.make(architecture, attn_implementation="eager"), IDS)
    difference = run(load(path), IDS) - exact
    # bf16 keeps 8 bits: a value is off by 2^-9 / sqrt(3) of itself on average; four operands, three layers.
    assert np.sqrt((difference**2).mean()) < np.sqrt(4 * 3 / 3) * 2.0**-9 * exact.std()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_64_greedy_tokens_equal_those_of_transformers(
    case: tuple[str, Any, Path], kind: str, tmp_path: Path
) -> None:
    architecture, model, _ = case
    path = tmp_path / f"{kind}.gguf"
    tiny.write(path, model, architecture, kind)
    prompt = IDS[:20]
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    rounded = tiny.make(architecture)
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.to(dtype).float())
    expected = tiny.greedy(rounded, prompt, 64)
    runner = load(path)
    ids = list(prompt)
    runner.tables[0] = np.arange(runner.tables.shape[1])
    runner.run(i32(*ids), i32(len(ids)), i32(0), i32(0), i32(len(ids) - 1))
    for _ in range(64):
        ids.append(int(np.argmax(runner.logits[0])))
        runner.run(i32(ids[-1]), i32(1), i32(len(ids) - 1), i32(0), i32(0))
    assert ids[20:] == expected


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_1"])
def test_results_do_not_depend_on_chunks_threads_or_batch(
    case: tuple[str, Any, Path], kind: str, tmp_path: Path
) -> None:
    architecture, model, _ = case
    path = tmp_path / "model.gguf"
    tiny.write(path, model, architecture, kind)
    one, two = load(path, threads=1), load(path, threads=2)
    whole = run(two, IDS)
    np.testing.assert_array_equal(run(one, IDS), whole)
    np.testing.assert_array_equal(run(two, IDS, chunk=7), whole)
    # Eight sequences at once: each prompt in one step, then each token in one step.
    per = two.tables.shape[1]
    for slot in range(8):
        two.tables[slot] = np.arange(per) + slot * per
    shifted = [IDS[slot : slot + 40] for slot in range(8)]
    two.run(
        np.array([i for ids in shifted for i in ids[:-1]], np.int32),
        np.full(8, 39, np.int32), np.zeros(8, np.int32), np.arange(8, dtype=np.int32), i32(),
    )  # fmt: skip
    last = np.array([ids[-1] for ids in shifted], np.int32)
    slots = np.arange(8, dtype=np.int32)
    two.run(last, np.ones(8, np.int32), np.full(8, 39, np.int32), slots, slots)
    together = np.array(two.logits)
    for slot in range(8):
        np.testing.assert_array_equal(together[slot], run(one, shifted[slot])[-1])


def test_decode_beyond_one_attention_split(case: tuple[str, Any, Path]) -> None:
    _, model, path = case
    ids = (IDS * 3)[:700]
    runner = load(path)
    exact = tiny.logits(model, ids)
    whole = run(runner, ids)
    np.testing.assert_allclose(whole[-1], exact[-1], atol=1e-3)
    runner.run(i32(ids[-1]), i32(1), i32(len(ids) - 1), i32(0), i32(0))  # the last token again, as a decode
    np.testing.assert_array_equal(runner.logits[0], whole[-1])


@pytest.mark.parametrize(
    ("parameters", "metadata"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
        ),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_rope_scaling(
    architecture: str, parameters: dict[str, Any], metadata: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny.make(architecture, rope_parameters={"rope_theta": 10000.0, **parameters})
    tiny.write(tmp_path / "m.gguf", model, architecture, metadata=metadata)
    np.testing.assert_allclose(run(load(tmp_path / "m.gguf"), IDS), tiny.logits(model, IDS), atol=1e-3)


def test_llama3_rope_scaling(tmp_path: Path) -> None:
    plain = tiny.make("llama")
    scaled = tiny.make(
        "llama",
        rope_parameters={
            "rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
        },
    )  # fmt: skip
    divisors = (plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq).numpy()
    tiny.write(tmp_path / "m.gguf", scaled, "llama", extra={"rope_freqs.weight": divisors})
    np.testing.assert_allclose(run(load(tmp_path / "m.gguf"), IDS), tiny.logits(scaled, IDS), atol=1e-3)


def test_tied_embeddings(tmp_path: Path) -> None:
    model = tiny.make("llama", tie_word_embeddings=True)
    tiny.write(tmp_path / "m.gguf", model, "llama")
    np.testing.assert_allclose(run(load(tmp_path / "m.gguf"), IDS), tiny.logits(model, IDS), atol=1e-3)


def test_a_tensor_that_the_architecture_does_not_know_is_named(tmp_path: Path) -> None:
    tiny.write(tmp_path / "m.gguf", tiny.make("llama"), "llama", extra={"blk.0.surprise.weight": np.ones(4)})
    with pytest.raises(TreadleError, match="surprise"):
        load(tmp_path / "m.gguf")


def test_loading_does_not_hold_the_weights_twice(tmp_path: Path) -> None:
    wide = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 2}
    tiny.write(tmp_path / "m.gguf", tiny.make("llama", **wide), "llama", "Q8_0")
    program = (
        "import sys, pathlib\n"
        "from treadle.engine.runner import Runner, RunnerConfig\n"
        "from treadle.weights.gguf import open_gguf\n"
        "status = lambda: open('/proc/self/status').read()\n"
        "peak = lambda: int(status().split('VmHWM:')[1].split()[0]) * 1024\n"
        "before = peak()\n"
        "config = RunnerConfig(context=64, max_sequences=2, max_tokens=16)\n"
        "runner = Runner(open_gguf(sys.argv[1]), frozenset(), config)\n"
        "print(peak() - before, runner.weight_bytes)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "m.gguf")]
    grown, weights = map(
        int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    )
    assert weights > 70e6
    # Beside the packed weights: one matrix of the file at a time, a small cache and the buffers of 16 tokens.
    assert grown < 1.4 * weights


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tiny.write(tmp_path / "m.gguf", tiny.make("llama"), "qwen3")
    with pytest.raises(TreadleError, match=r"blk\.0\.attn_q_norm\.weight"):
        load(tmp_path / "m.gguf")
