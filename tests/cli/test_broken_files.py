"""Every broken model file ends in one clear line and an ordinary exit code, whatever command meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_commands import treadle
from tests.weights.containers import BROKEN

# The kinds of real_world_cases section 7; tests/weights/test_gguf.py has them all, without a process each.
NAMES = [
    "magic", "version", "zero_dim", "ndims9", "ndims_huge", "dim_overflow", "offset_eof", "offset_wrap",
    "align0", "nkv_huge", "nt_huge", "strlen", "empty_key", "bad_type", "no_arch", "empty_arch", "tok_u8",
    "dup_tensor", "trunc", "zero",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_one_line_and_exit_code_1(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name} 模型.gguf"
    data, words = BROKEN[name]
    path.write_bytes(data)
    result = treadle("generate", str(path), "--prompt", "x")
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    lines = result.stderr.strip().split("\n")
    assert len(lines) == 1
    assert name in lines[0]
    for word in words:
        assert word in lines[0]


def test_serve_refuses_a_broken_file_too(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(BROKEN["offset_wrap"][0])
    result = treadle("serve", str(path), "--port", "0")
    assert result.returncode == 1
    assert "broken.gguf" in result.stderr
    assert "Traceback" not in result.stderr
