"""The native GGUF reader built with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.weights import containers as c

ROOT = Path(__file__).parents[2]
SOURCES = ["gguf.cpp", "model.cpp", "fuzz_gguf.cpp", "fuzz_main.cpp"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("sanitized") / "fuzz_main"
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    sources = [str(ROOT / "csrc" / "gguf" / name) for name in SOURCES]
    subprocess.run(["g++", *flags, f"-I{ROOT / 'csrc'}", *sources, "-o", str(target)], check=True)
    return target


def test_broken_cut_and_mutated_files(program: Path, tmp_path: Path) -> None:
    paths = c.write_all(tmp_path)
    keys = [
        c.OK,
        c.array(b"tokenizer.ggml.tokens", c.STRING, 40, b"".join(c.text(b"x" * i) for i in range(40))),
    ]
    paths.append(tmp_path / "larger.gguf")
    paths[-1].write_bytes(c.container(keys, [c.T, c.tensor(b"u", [32, 2], 2, 32)], data=bytes(32 + 36)))
    environment = {**os.environ, "ASAN_OPTIONS": "max_allocation_size_mb=200"}
    done = subprocess.run([program, *paths], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(paths)
    only_python = {
        "no_arch",
        "empty_arch",
        "number_arch",
        "tok_u8",
        "tok_numbers",
        "tok_lengths",
        "good",
        "larger",
    }
    assert {
        path.stem for path, line in zip(paths, lines, strict=True) if line == f"{path}: ok"
    } == only_python
