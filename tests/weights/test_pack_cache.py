"""Packed weights on disk: the same answers as without, and no harm from files that cannot be used."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.models import tiny
from tests.models.test_logits import IDS, run
from treadle import LLM, _native
from treadle.core import SamplingParams, TreadleError
from treadle.engine.runner import Runner, RunnerConfig
from treadle.weights import pack_cache
from treadle.weights.gguf import open_gguf

Logits = np.ndarray


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    tiny.write(path, tiny.make("qwen2"), "qwen2", "Q8_0", tokenizer=True)
    return path


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other") / "other.gguf"
    tiny.write(path, tiny.make("qwen2"), "qwen2", "Q4_0", tokenizer=True)
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> Logits:
    return logits(model, None)


def logits(model: Path, folder: Path | None, size: int = 2**30) -> Logits:
    """Of a runner that is loaded and let go."""
    cache = None if folder is None else str(folder)
    config = RunnerConfig(context=512, kv_memory=2**24, pack_cache=cache, pack_cache_size=size)
    return run(Runner(open_gguf(model), frozenset(), config), IDS[:40])


def cached(folder: Path) -> Path:
    """The one file in the folder."""
    (path,) = folder.iterdir()
    assert path.suffix == ".pack"
    return path


@pytest.fixture
def no_packing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, nothing can be packed."""

    def forbid() -> None:
        def pack(*_: object, **__: object) -> None:
            raise AssertionError("packed again")

        monkeypatch.setattr(_native, "pack", pack)

    return forbid


@pytest.mark.parametrize("huge", [True, False])
def test_the_second_start_takes_what_the_first_one_packed(
    huge: bool,
    model: Path,
    expected: Logits,
    tmp_path: Path,
    no_packing: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pack_cache, "huge_bytes", lambda content: len(content) * huge)
    folder = tmp_path / "new" / "folder"
    np.testing.assert_array_equal(logits(model, folder), expected)
    before = cached(folder).stat()
    no_packing()
    np.testing.assert_array_equal(logits(model, folder), expected)
    assert cached(folder).stat().st_ino == before.st_ino
    copy = tmp_path / "copy.gguf"  # of the same model
    shutil.copy(model, copy)
    np.testing.assert_array_equal(logits(copy, folder), expected)


def test_every_layout_is_kept_as_it_is(tmp_path: Path, no_packing: Callable[[], None]) -> None:
    answers = {}
    for kind in ("F32", "F16", "BF16", "Q4_0", "Q8_0"):
        path = tmp_path / f"{kind}.gguf"
        tiny.write(path, tiny.make("llama"), "llama", kind)
        answers[path] = logits(path, tmp_path / "cache")
    no_packing()
    for path, answer in answers.items():
        np.testing.assert_array_equal(logits(path, tmp_path / "cache"), answer)


def cut(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_short(path: Path, other: Path) -> None:
    os.truncate(path, 30)


def empty(path: Path, other: Path) -> None:
    os.truncate(path, 0)


def longer(path: Path, other: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def flip(offset: int) -> Callable[[Path, Path], None]:
    def damage(path: Path, other: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)

    return damage


def foreign(path: Path, other: Path) -> None:
    shutil.copy(other, path)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (cut, "bytes instead of"),
        (cut_short, "no such file"),
        (empty, "no such file"),
        (longer, "bytes instead of"),
        (flip(0), "no such file"),
        (flip(8), "another version"),
        (flip(12), "another version"),
        (flip(40), "index is damaged"),
        (flip(100), "index is damaged"),
        (flip(2 << 20), "matrices are damaged"),
        (flip(-4096), "matrices are damaged"),
        (foreign, "another model"),
    ],
)
def test_a_file_that_cannot_be_used_is_written_anew(
    damage: Callable[[Path, Path], None],
    why: str,
    model: Path,
    other_model: Path,
    expected: Logits,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    no_packing: Callable[[], None],
) -> None:
    logits(model, tmp_path / "cache")
    logits(other_model, tmp_path / "other")
    path = cached(tmp_path / "cache")
    damage(path, cached(tmp_path / "other"))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(logits(model, tmp_path / "cache"), expected)
    (record,) = caplog.records
    assert str(path) in record.getMessage() and why in record.getMessage()
    caplog.clear()
    no_packing()
    np.testing.assert_array_equal(logits(model, tmp_path / "cache"), expected)
    assert not caplog.records


def test_a_mapped_file_may_be_replaced_and_removed(
    model: Path, expected: Logits, tmp_path: Path, other_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_cache, "huge_bytes", len)
    folder = tmp_path / "cache"
    logits(model, folder)
    config = RunnerConfig(context=512, kv_memory=2**24, pack_cache=str(folder))
    runner = Runner(open_gguf(model), frozenset(), config)
    size = cached(folder).stat().st_size
    logits(other_model, folder, size)  # there is room for one
    np.testing.assert_array_equal(run(runner, IDS[:40]), expected)


def test_the_least_recently_used_goes_when_the_folder_is_full(
    model: Path, other_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, third = tmp_path / "cache", tmp_path / "third.gguf"
    tiny.write(third, tiny.make("qwen3"), "qwen3", "Q4_0")
    logits(model, folder)
    first = cached(folder)
    logits(other_model, folder)
    (second,) = set(folder.iterdir()) - {first}
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    logits(model, folder)  # counts as used
    logits(third, folder, sum(path.stat().st_size for path in folder.iterdir()) + 2**19)
    assert first.exists() and not second.exists() and len(list(folder.iterdir())) == 2
    caplog.clear()
    logits(other_model, tmp_path / "small", 2**20)
    (record,) = caplog.records
    assert "--pack-cache-size is 1048576" in record.getMessage()
    assert not list((tmp_path / "small").iterdir())


def test_a_folder_that_cannot_be_written_is_one_warning(
    model: Path, expected: Logits, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "cache", Path("/proc/none")):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            np.testing.assert_array_equal(logits(model, folder), expected)
        assert len([r for r in caplog.records if "packed again at every start" in r.getMessage()]) == 1


def test_a_read_only_folder_is_used_in_silence(
    model: Path,
    expected: Logits,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    no_packing: Callable[[], None],
) -> None:
    logits(model, tmp_path / "cache")

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    no_packing()
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(logits(model, tmp_path / "cache"), expected)
    assert not caplog.records


def test_remains_of_a_process_that_died_are_removed(model: Path, tmp_path: Path) -> None:
    (tmp_path / ".0123456789abcdef.77.part").write_bytes(b"half a file")
    logits(model, tmp_path)
    cached(tmp_path)


def test_huge_pages_of_a_mapping_are_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 << 20))
    with (tmp_path / "file").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    content = np.frombuffer(mapping, np.uint8)
    assert content.sum() == 0
    assert pack_cache.huge_bytes(content) == 0
    assert pack_cache.huge_bytes(content[4096:]) == 0  # no mapping begins there


PROCESS = """
import sys
import numpy as np
from treadle.engine.runner import Runner, RunnerConfig
from treadle.weights import pack_cache
from treadle.weights.gguf import open_gguf
config = RunnerConfig(context=512, kv_memory=2**24, pack_cache=sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
runner = Runner(open_gguf(sys.argv[1]), frozenset(), config)
one = lambda number: np.array([number], np.int32)
runner.run(one(7), one(1), one(0), one(0), one(0))
print(runner.logits.tobytes().hex())
"""


def test_processes_that_start_at_once_share_a_file(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESS, str(model), str(tmp_path / "cache")]
    start = partial(
        subprocess.Popen[str],
        command,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    processes = [start() for _ in range(3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate() for process in processes]
    assert [errors for _, errors in answers] == ["", "", ""]
    assert len({out for out, _ in answers}) == 1
    cached(tmp_path / "cache")


def test_the_python_interface_and_commands_take_the_folder(model: Path, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    texts = []
    for _ in range(2):
        with LLM(model, pack_cache=tmp_path / "cache") as llm:
            texts.append(llm.generate("Hello", params)[0].token_ids)
    assert texts[0] == texts[1]
    before = cached(tmp_path / "cache").stat()
    command = [sys.executable, "-m", "treadle.cli", "generate", str(model), "--prompt", "Hello"]
    command += ["--max-tokens", "4", "--pack-cache", str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    after = cached(tmp_path / "cache").stat()
    assert after.st_ino == before.st_ino and after.st_mtime_ns >= before.st_mtime_ns
    with pytest.raises(TreadleError, match="pack_cache is 7"):
        LLM(model, pack_cache=7)  # type: ignore[arg-type]
