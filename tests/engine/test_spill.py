"""KV blocks on disk: an engine that starts anew finds the prompts of the one before it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.models import tiny
from treadle.core import Request, SamplingParams, TreadleError, Usage
from treadle.engine.engine import Engine, EngineConfig
from treadle.engine.kv.spill import Spill
from treadle.engine.runner import Runner, RunnerConfig
from treadle.weights.gguf import open_gguf
from treadle.weights.identity import model_identity

PROMPT = [int(i) for i in np.random.default_rng(3).integers(0, tiny.VOCAB, 165)]  # five full blocks
FULL = 160
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    tiny.write(path, tiny.make("qwen2"), "qwen2")
    return path


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Start:
    def make(kv_dtype: str = "bf16", size: int = 2**30, path: Path = model) -> Engine:
        file = open_gguf(path)
        config = RunnerConfig(context=256, max_sequences=4, max_tokens=64, kv_dtype=kv_dtype)
        runner = Runner(file, frozenset(), config)
        spill = Spill(tmp_path / "kv", size, model_identity(file, kv_dtype, runner.isa), runner.blocks)
        return Engine(runner, EngineConfig(), spill=spill)

    return make


def ask(engine: Engine, prompt: list[int], salt: str = "") -> tuple[list[int], Usage]:
    params = SamplingParams(max_tokens=8, temperature=0)
    engine.add(Request(id="a", prompt_ids=prompt, params=params, cache_salt=salt))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
            usage = output.usage
    engine.check()
    assert usage is not None
    return tokens, usage


def files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "kv").rglob("*") if path.is_file())


@pytest.mark.parametrize("kv_dtype", ["bf16", "q8"])
def test_a_prompt_is_warm_after_a_restart(start: Start, kv_dtype: str) -> None:
    first = start(kv_dtype)
    tokens, usage = ask(first, PROMPT)
    assert usage.cached_tokens == 0
    first.close()
    second = start(kv_dtype)
    again, usage = ask(second, PROMPT)
    assert (again, usage.cached_tokens) == (tokens, FULL)
    assert ask(second, PROMPT)[1].cached_tokens == FULL  # from memory
    longer = PROMPT + tokens + PROMPT[:50]
    assert ask(second, longer)[1].cached_tokens == FULL
    second.close()


def test_answers_are_kept_too_and_the_longest_known_part_is_used(start: Start) -> None:
    first = start()
    tokens, _ = ask(first, PROMPT[:155])
    first.close()
    second = start()
    assert ask(second, PROMPT[:155] + tokens + [1, 2])[1].cached_tokens == FULL
    assert ask(second, PROMPT[:100] + [0] * 60)[1].cached_tokens == 96
    second.close()


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "renamed", "removed"])
def test_what_is_not_whole_is_computed_again(start: Start, tmp_path: Path, damage: str) -> None:
    first = start()
    tokens, _ = ask(first, PROMPT)
    first.close()
    names = files(tmp_path)
    assert len(names) == 5
    for path in names:
        data = bytearray(path.read_bytes())
        if damage == "cut":
            path.write_bytes(data[:-1])
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "changed":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        elif damage == "removed":
            path.unlink()
    if damage == "renamed":
        contents = [path.read_bytes() for path in names]
        for path, content in zip(names, contents[1:] + contents[:1], strict=True):
            path.write_bytes(content)
    second = start()
    assert ask(second, PROMPT) == (tokens, Usage(prompt_tokens=165, completion_tokens=8, cached_tokens=0))
    second.close()
    third = start()  # what was damaged has been written anew
    assert ask(third, PROMPT)[1].cached_tokens == FULL
    third.close()


def test_other_salts_types_and_models_share_nothing(start: Start, tmp_path: Path) -> None:
    first = start()
    ask(first, PROMPT, salt="one")
    first.close()
    second = start()
    assert ask(second, PROMPT, salt="two")[1].cached_tokens == 0
    assert ask(second, PROMPT, salt="one")[1].cached_tokens == FULL
    second.close()
    other = start("q8")
    assert ask(other, PROMPT, salt="one")[1].cached_tokens == 0
    other.close()
    changed = tiny.make("qwen2")
    changed.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    tiny.write(tmp_path / "other.gguf", changed, "qwen2")
    third = start(path=tmp_path / "other.gguf")
    assert ask(third, PROMPT, salt="one")[1].cached_tokens == 0
    third.close()


def test_the_folder_is_private_and_bounded(start: Start, tmp_path: Path) -> None:
    first = start()
    ask(first, PROMPT)
    first.close()
    folder = tmp_path / "kv"
    paths = files(tmp_path)
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (folder, paths[0].parent)} == {0o700}
    block = paths[0].stat().st_size
    second = start(size=3 * block)
    assert len(files(tmp_path)) <= 3
    # The beginning of the prompt is what has been kept.
    assert 0 < ask(second, PROMPT)[1].cached_tokens <= 96
    for i in range(4):
        ask(second, [i] * 100)
    second.close()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 3 * block
    third = start(size=3 * block)
    assert ask(third, [3] * 100)[1].cached_tokens > 0
    third.close()
    folder.chmod(0o755)
    with pytest.raises(TreadleError, match="closed to others"):
        start()
    folder.chmod(0o700)
    with pytest.raises(TreadleError, match="one block of this model's KV cache takes"):
        start(size=100)


def test_others_run_while_blocks_are_loaded(start: Start) -> None:
    """Requests of both kinds together give what they give alone."""
    first = start()
    alone, _ = ask(first, PROMPT)
    short, _ = ask(first, PROMPT[:20])
    first.close()
    second = start()
    params = SamplingParams(max_tokens=8, temperature=0)
    for id, prompt in (("short", PROMPT[:20]), ("long", PROMPT), ("twin", PROMPT)):
        second.add(Request(id=id, prompt_ids=prompt, params=params))
    got: dict[str, list[int]] = {"short": [], "long": [], "twin": []}
    while second.has_work:
        for output in second.step():
            got[output.id] += output.token_ids
    second.check()
    second.close()
    assert got == {"short": short, "long": alone, "twin": alone}


def test_a_type_that_does_not_fit_the_heads_is_refused(start: Start) -> None:
    with pytest.raises(TreadleError, match="multiple of 32 dimensions, this model's have 16; use q8 or bf16"):
        start("q4")
