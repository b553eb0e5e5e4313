"""The least that the native module asks of a CPU, checked before its import: it would die of SIGILL."""

from __future__ import annotations

from pathlib import Path

from treadle.core import TreadleError

# x86-64-v3 (psABI) in the words of /proc/cpuinfo
_V2 = {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}


def require_isa(root: Path = Path("/")) -> None:
    """Raises TreadleError if this CPU lacks a part of x86-64-v3, naming the CPU and what it lacks."""
    model, flags = "this CPU", ""
    with (root / "proc/cpuinfo").open() as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() == "flags":
                flags = value
                break
    missing = sorted(_V3 - set(flags.split()))
    if not flags:
        raise TreadleError("Treadle needs an x86-64 CPU with AVX2 (x86-64-v3); this is another architecture")
    if missing:
        raise TreadleError(
            f"Treadle needs a CPU with AVX2 (x86-64-v3: Intel since Haswell, AMD since Zen), but {model} "
            f"lacks {', '.join(missing)}. In a virtual machine, let the host's CPU through (QEMU: -cpu host)"
        )
