"""Whole models in every quantised format, against transformers on the values that `gguf` decodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.kernels.test_linear import INTEGER, decoded, random_weights
from tests.models import tiny
from tests.models.test_logits import IDS, load, run

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}


@pytest.mark.parametrize("name", INTEGER)
def test_logits_differ_by_the_rounding_of_activations_only(name: str, tmp_path: Path) -> None:
    model = tiny.make("qwen2", **SHAPE)
    values, raw = tiny.tensors(model, "qwen2"), {}
    for index, (key, array) in enumerate(values.items()):
        if array.ndim == 2:
            rows, cols = array.shape
            deviation = decoded(name, random_weights(name, rows, cols, index), rows, cols).std()
            raw[key] = random_weights(name, rows, cols, index, factor=0.05 / float(deviation))
            values[key] = decoded(name, raw[key], rows, cols)
    tiny.assign(model, values)
    tiny.write(tmp_path / "m.gguf", model, "qwen2", name, raw=raw)
    exact = tiny.logits(model, IDS)
    difference = run(load(tmp_path / "m.gguf"), IDS) - exact
    # 8 bits, one scale per up to 256 values: rounding is uniform and max / 127 wide, so its deviation is
    # max / (127 * sqrt(12)). The largest of 256 normal values is about 3 deviations, of products of two such
    # (the input of ffn_down) about 6. Six linear operations of the first kind and one of the second in each
    # of two layers, and the output matrix, add up like independent errors; half as much again is allowed.
    rounding = np.sqrt(2 * (6 * 3**2 + 6**2) + 3**2) / (127 * np.sqrt(12))
    assert np.sqrt((difference**2).mean()) < 1.5 * rounding * exact.std()
