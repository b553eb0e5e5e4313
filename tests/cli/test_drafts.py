"""``--draft``: for which of the served models each draft model guesses."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.cli.load import find_drafts
from treadle.core import TreadleError


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_a_single_model_needs_no_name(small: Path) -> None:
    assert find_drafts((str(small),), ["large"]) == {"large": small}
    assert find_drafts((), ["large"]) == {}


def test_one_of_several_models_is_named(small: Path) -> None:
    assert find_drafts((f"b={small}",), ["a", "b"]) == {"b": small}


@pytest.mark.parametrize(
    ("drafts", "said"),
    [
        (["{small}"], "several models are served; say for which it guesses: --draft a={small}"),
        (["c={small}"], "no model c is served; there are: a, b"),
        (["a={small}", "a={small}"], "a has a draft model already"),
        (["a=nosuch"], "there is no model or file 'nosuch'"),
    ],
)
def test_what_is_unclear_is_refused(small: Path, drafts: list[str], said: str) -> None:
    given = tuple(draft.format(small=small) for draft in drafts)
    with pytest.raises(TreadleError) as refused:
        find_drafts(given, ["a", "b"])
    assert said.format(small=small) in str(refused.value)
