"""Every token is predicted once, after as much text as was promised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from treadle import hub
from treadle.core import TreadleError
from treadle.evaluation.windows import Text, read_text
from treadle.text.tokenizer import Tokenizer
from treadle.weights.gguf import open_gguf


@pytest.mark.parametrize("bos", [None, 999])
@pytest.mark.parametrize(
    ("length", "size", "stride"),
    [(2, 2, 1), (10, 4, 2), (10, 4, 3), (9, 4, 1), (100, 16, 8), (5, 64, 32), (65, 64, 63), (64, 64, 32)],
)
def test_each_token_is_predicted_once_after_the_text_before_it(
    length: int, size: int, stride: int, bos: int | None
) -> None:
    text = Text(np.arange(100, 100 + length, dtype=np.int32), size, stride, bos)
    predicted: list[int] = []
    for number, window in enumerate(text.windows()):
        assert len(window.ids) <= size
        if bos is not None:
            assert window.ids[0] == bos
        for i, target in enumerate(window.targets.tolist()):
            seen = window.ids[: window.first + i + 1].tolist()
            assert seen, "something stands before it"
            before = seen[bos is not None :]
            assert before == list(range(target - len(before), target))
            if number:
                assert len(seen) >= size - stride
            elif bos is None:
                assert len(before) == target - 100
            predicted.append(target)
    first = 100 if bos is not None else 101
    assert predicted == list(range(first, 100 + length))
    assert text.scored == len(predicted)


@pytest.mark.parametrize(
    ("size", "stride", "length", "named"),
    [
        (1, 1, 9, "context is 1"),
        (8, 8, 9, "stride is 8"),
        (8, 0, 9, "stride is 0"),
        (8, 4, 1, "has 1 tokens"),
    ],
)
def test_impossible_readings_are_explained(size: int, stride: int, length: int, named: str) -> None:
    with pytest.raises(TreadleError, match=named):
        Text(np.zeros(length, np.int32), size, stride, None)


def test_texts_that_cannot_be_read_are_explained(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(open_gguf(hub.resolve(None)).metadata)
    (tmp_path / "latin1").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(TreadleError, match="latin1 is no UTF-8 text: byte 2"):
        read_text(tmp_path / "latin1", tokenizer, 64, 32)
    with pytest.raises(TreadleError, match=r"cannot read the text .*missing: No such file"):
        read_text(tmp_path / "missing", tokenizer, 64, 32)
    (tmp_path / "empty").touch()
    with pytest.raises(TreadleError, match="has 0 tokens"):
        read_text(tmp_path / "empty", tokenizer, 64, 32)
    (tmp_path / "text").write_text("one two three four five six", encoding="utf-8")
    assert len(read_text(tmp_path / "text", tokenizer, 64, 32, most=4).ids) == 4
