"""What steps read from memory, and what share of the machine's limit that is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engine.engine_model import Results, make_engine, prompt, request
from treadle import hub
from treadle.engine.engine import EngineConfig
from treadle.engine.load import LoadConfig, load_runner


def test_bytes_of_steps_are_added_up() -> None:
    engine, model = make_engine(EngineConfig(read_limit=1e6, speculation=False))
    results = Results(engine)
    engine.add(request("a", prompt(1, 100), 5))
    results.run()
    # The toy reads 1000 bytes per step, 100 per wanted row and 1 per token of KV.
    lengths = [length for (length,) in model.steps]
    assert sum(lengths) == 104
    kv = sum(sum(lengths[: i + 1]) for i in range(len(lengths)))
    stats = engine.stats()
    assert stats.read_bytes_total == 1000 * len(lengths) + 100 * 5 + kv
    assert stats.read_bytes_per_second == pytest.approx(stats.read_bytes_total / stats.step_seconds_total)
    assert stats.read_share == pytest.approx(stats.read_bytes_per_second / 1e6)
    before = stats.read_bytes_total, stats.step_seconds_total
    engine.add(request("b", prompt(2, 100), 5))
    results.run()
    newest = (engine.stats().read_bytes_total - before[0]) / (engine.stats().step_seconds_total - before[1])
    assert engine.stats().read_bytes_per_second == pytest.approx(newest)
    assert engine.stats().read_bytes_per_second == pytest.approx(newest), "idle, it stays"


def test_without_a_limit_there_is_no_share() -> None:
    engine, _ = make_engine()
    engine.add(request("a", prompt(1, 10), 2))
    Results(engine).run()
    assert engine.stats().read_bytes_per_second > 0 and engine.stats().read_share == 0


def test_bytes_of_a_real_model() -> None:
    runner = load_runner(LoadConfig(path=str(Path(hub.resolve(None))), context=512, kv_memory=64 << 20))
    none, one = np.zeros(0, np.int32), np.array([1], np.int32)
    decode = runner.step_bytes(one, np.array([200], np.int32), one)
    without_logits = runner.step_bytes(one, np.array([200], np.int32), none)
    # 30 layers, 3 kv heads of 64, keys and values of 2 bytes
    assert runner.step_bytes(one, np.array([201], np.int32), one) - decode == 30 * 3 * 64 * 2 * 2
    file = Path(hub.resolve(None)).stat().st_size
    assert 0.9 * file < decode < 1.15 * file, "a decode reads about the whole file"
    # The output matrix: 49152 x 576 numbers of 5 bits (Q4_1), or what it is packed as
    assert 0.15 < (decode - without_logits) / decode < 0.35
    assert 1e8 < runner.measure_read_limit() < 1e13
