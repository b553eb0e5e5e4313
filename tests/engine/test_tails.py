"""Answers to one prompt at the same time copy what its last block has; a real model then goes on as alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models import tiny
from treadle.core import Request, SamplingParams
from treadle.engine.engine import Engine, EngineConfig
from treadle.engine.runner import Runner, RunnerConfig
from treadle.weights.gguf import open_gguf


def answers(engine: Engine, prompt: list[int], seeds: range) -> tuple[dict[str, list[int]], list[int]]:
    """The tokens of one answer per seed, asked for at once, and the tokens that each found in the cache."""
    for seed in seeds:
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=seed)
        engine.add(Request(id=str(seed), prompt_ids=prompt, params=params))
    tokens: dict[str, list[int]] = {str(seed): [] for seed in seeds}
    cached = dict[str, int]()
    while engine.has_work:
        for output in engine.step():
            tokens[output.id] += output.token_ids
            if output.usage is not None:
                cached[output.id] = output.usage.cached_tokens
    engine.check()
    return tokens, [cached[str(seed)] for seed in seeds]


@pytest.mark.parametrize("kv_dtype", ["bf16", "q8"])
@pytest.mark.parametrize("length", [20, 50])
def test_answers_at_once_are_those_of_each_alone(tmp_path: Path, kv_dtype: str, length: int) -> None:
    path = tmp_path / "model.gguf"
    tiny.write(path, tiny.make("qwen2"), "qwen2")
    prompt = [int(i) for i in np.random.default_rng(length).integers(0, tiny.VOCAB, length)]

    def start() -> Engine:
        config = RunnerConfig(context=256, max_sequences=4, max_tokens=64, kv_dtype=kv_dtype)
        return Engine(Runner(open_gguf(path), frozenset(), config), EngineConfig())

    together, cached = answers(start(), prompt, range(6))
    assert cached == [0] + 5 * [length - 1]
    for seed in range(6):
        alone, _ = answers(start(), prompt, range(seed, seed + 1))
        assert alone[str(seed)] == together[str(seed)]
