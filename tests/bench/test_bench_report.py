"""Statistics against NumPy, tables by eye."""

from __future__ import annotations

import numpy as np
import pytest

from treadle.bench.machine import thread_counts
from treadle.bench.report import markdown_table, percentile, summarise


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).normal(size=37).tolist()
    for percent in (0, 1, 25, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_summary() -> None:
    summary = summarise([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (summary.median, summary.low, summary.high, summary.count) == (3.0, 1.0, 5.0, 5)
    assert summary.spread == pytest.approx(1 / 3)
    assert summarise([7.0]).spread == 0
    with pytest.raises(ValueError, match="nothing was measured"):
        summarise([])


def test_table_lines_up() -> None:
    assert markdown_table(("case", "token/s"), [("a", 1), ("longer", "22.5")]) == (
        "| case   | token/s |\n|--------|--------:|\n| a      |       1 |\n| longer |    22.5 |"
    )


def test_thread_counts_end_with_all() -> None:
    assert thread_counts(1) == [1]
    assert thread_counts(2) == [1, 2]
    assert thread_counts(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
