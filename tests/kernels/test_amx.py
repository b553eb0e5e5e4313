"""AMX: its kernels as compiled, and how the level is chosen. What they compute is in test_linear.py too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from treadle import _native

ROOT = Path(__file__).parents[2]
FLAGS = [
    "-std=c++20", "-g1", "-march=x86-64-v3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd", "-mavx512vnni", "-mavx512bf16",
    "-mamx-tile", "-mamx-int8", "-mamx-bf16", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
]  # fmt: skip
KERNELS = "kernels/linear/linear_amx.cpp"
OTHERS = [
    "base/amx.cpp", "base/memory.cpp", "kernels/linear/linear_ref.cpp", "kernels/rows/rows_ref.cpp",
    "program/op.cpp", "quant/decode.cpp", "quant/pack.cpp", "threads/crowding.cpp",
    "threads/pool.cpp",
]  # fmt: skip


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("level", ["amx"] if "bf16" in _native.isas() else [])
def test_compiled_kernels_equal_the_reference_on_a_cpu_without_amx(tmp_path: Path, level: str) -> None:
    kernels = tmp_path / "kernels.o"
    include = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/native'}"]
    # the flags of the product, so that the instructions are those of the product
    subprocess.run(["g++", "-O3", *FLAGS, *include, "-c", ROOT / "csrc" / KERNELS, "-o", kernels], check=True)
    sources = [ROOT / "csrc" / name for name in OTHERS]
    sources += [ROOT / "tests/native" / f"{name}.cpp" for name in (level, "tile_trap")]
    program = tmp_path / "amx"
    subprocess.run(
        ["g++", "-O1", *FLAGS[:6], *include, *sources, kernels, "-pthread", "-o", program], check=True
    )
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.stdout == "all right\n", done.stdout + done.stderr


def test_amx_runs_where_it_is_and_is_explained_where_it_is_not() -> None:
    result = run_python("from treadle import _native; print(_native.isa())", TREADLE_ISA="amx")
    if "amx" in _native.isas():
        assert result.stdout == "amx\n"
    else:
        message = result.stderr.splitlines()[-1]
        assert message.startswith("RuntimeError: TREADLE_ISA=amx does not run on this CPU (")
        assert "); it can be one of ref, avx2, avx512" in message


def test_a_lower_level_does_not_ask_for_permission() -> None:
    # ARCH_GET_XCOMP_PERM: bit 18 is the permission for tile data
    code = (
        "import ctypes; from treadle import _native; _native.isa(); features = ctypes.c_uint64();"
        "ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(features)); print(features.value >> 18 & 1)"
    )
    assert run_python(code, TREADLE_ISA="avx2").stdout == "0\n"
    expected = "1\n" if "amx" in _native.isas() else "0\n"
    assert run_python(code, TREADLE_ISA="").stdout == expected


def test_emulated_level_is_for_asking_only() -> None:
    assert "amx-emulated" not in _native.isas()
    result = run_python("from treadle import _native; print(_native.isa())", TREADLE_ISA="amx-emulated")
    assert result.stdout == "amx-emulated\n"
