"""Files whose container is right and whose model is not: refused in one sentence that names the culprit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models import tiny
from tests.models.test_logits import load
from treadle.core import TreadleError

Arrays = dict[str, np.ndarray]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("embedding_length", 64),
        ("feed_forward_length", 5),
        ("context_length", 0),
        ("attention.head_count", 0),
        ("attention.head_count", 7),
        ("attention.head_count", 10**6),
        ("attention.head_count_kv", 0),
        ("attention.head_count_kv", 4),
        ("attention.head_count_kv", 6),
        ("attention.key_length", 24),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("attention.layer_norm_rms_epsilon", -1.0),
        ("rope.dimension_count", 0),
        ("rope.dimension_count", 15),
        ("rope.dimension_count", 128),
        ("rope.dimension_count", 2**31),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", float("nan")),
        ("rope.scaling.factor", 0.0),
        ("rope.scaling.type", "longrope"),
    ],
)
def test_impossible_hyper_parameters(key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tiny.write(path, tiny.make("qwen2"), "qwen2", metadata={key: value})
    with pytest.raises(TreadleError) as caught:
        load(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    # Of sizes that contradict each other either is named: the key, or the first tensor of another size.
    assert key in message or "tensor" in message


def halved(name: str) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name] = arrays[name][: len(arrays[name]) // 2]

    return change


def swapped(arrays: Arrays) -> None:
    q, k = "blk.1.attn_q.weight", "blk.1.attn_k.weight"
    arrays[q], arrays[k] = arrays[k], arrays[q]


def flat(arrays: Arrays) -> None:
    arrays["token_embd.weight"] = arrays["token_embd.weight"].reshape(-1)


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        (halved("blk.0.attn_q.weight"), "blk.0.attn_q.weight"),
        (halved("blk.1.attn_v.weight"), "blk.1.attn_v.weight"),
        (halved("blk.0.ffn_up.weight"), "blk.0.ffn_up.weight"),
        (halved("blk.0.attn_norm.weight"), "blk.0.attn_norm.weight"),
        (halved("output_norm.weight"), "output_norm.weight"),
        (halved("blk.0.attn_q.bias"), "attn_q"),
        (swapped, "blk.1.attn_q.weight"),
        (flat, "token_embd.weight"),
    ],
)
def test_tensors_of_wrong_shapes(
    change: Callable[[Arrays], None], culprit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.make("qwen2")
    arrays = tiny.tensors(model, "qwen2")
    change(arrays)
    monkeypatch.setattr(tiny, "tensors", lambda *_: arrays)
    path = tmp_path / "m.gguf"
    tiny.write(path, model, "qwen2")
    with pytest.raises(TreadleError, match=culprit) as caught:
        load(path)
    assert str(path) in str(caught.value)
