"""Every kernel and operation at odd shapes, built with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from treadle import _native

ROOT = Path(__file__).parents[2]
FLAGS = [
    "-std=c++20", "-O1", "-g1", "-march=x86-64-v3",
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
]  # fmt: skip
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd"]
BF16 = [*AVX512, "-mavx512vnni", "-mavx512bf16"]
LEVELS = {
    "avx512": AVX512,
    "vnni": [*AVX512, "-mavx512vnni"],
    "bf16": BF16,
    "amx": [*BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
}
# The linear kernels take minutes to compile with sanitizers: those in tests/native are of fewer rows, and of
# the levels avx2 and bf16 only. AddressSanitizer must know where memory ends, so it comes from the heap.
REPLACED = {
    "memory.cpp",
    "linear_avx2.cpp",
    "linear_avx512.cpp",
    "linear_vnni.cpp",
    "linear_bf16.cpp",
    "linear_amx_emulated.cpp",
    "bindings.cpp",
}


def test_nothing_is_read_or_written_out_of_bounds(tmp_path: Path) -> None:
    own = sorted(set((ROOT / "tests/native").glob("*.cpp")) - {ROOT / "tests/native/amx.cpp"})
    sources = [
        path
        for folder in ("base", "threads", "quant", "kernels", "program")
        for path in sorted((ROOT / "csrc" / folder).rglob("*.cpp"))
        if path.name not in REPLACED
    ]

    def build(source: Path) -> Path:
        target = tmp_path / f"{source.parent.name}_{source.stem}.o"
        level = LEVELS.get(source.stem.rpartition("_")[2], [])
        paths = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/native'}"]
        command = ["g++", *FLAGS, *level, *paths, "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return target

    largest_first = sorted(own + sources, key=lambda path: path.parent.name != "native")
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(build, largest_first))
    program = tmp_path / "sanitized"
    subprocess.run(["g++", *FLAGS, *map(str, objects), "-pthread", "-o", str(program)], check=True)
    levels: list[str] = [isa for isa in ("ref", "avx2", "bf16") if isa in _native.isas()]
    if "bf16" in levels:
        levels.append("amx")  # its instructions are carried out by tests/native/tile_trap.cpp if need be
    done = subprocess.run([program, *levels], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == levels
