"""Speed of the linear kernels, alone, at the shapes of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from treadle import _native
from treadle.bench.costs import Limits, LinearShape, limits_of, model_costs
from treadle.bench.machine import last_level_cache, measure_machine
from treadle.bench.report import Summary, markdown_table, summarise

_FLOAT_TYPES = ("F32", "F16", "BF16")


class KernelResult(msgspec.Struct, frozen=True, kw_only=True):
    """One matrix at one number of activation rows."""

    type: str
    rows: int  # outputs
    cols: int  # inputs
    matrices: int  # of this shape in the model
    tokens: int  # activation rows, M
    seconds: Summary  # per call
    gop_per_s: float
    gb_per_s: float  # weight bytes of the file over time
    share: float  # of the limit: arithmetic, and memory too where the matrix is larger than the cache


class KernelReport(msgspec.Struct, frozen=True):
    """Everything ``treadle bench kernel`` measures."""

    model: str
    threads: int
    limits: Limits
    results: list[KernelResult]


def measure_kernels(
    path: Path, threads: int | None, tokens: Sequence[int], seconds: float = 0.1, repeats: int = 5
) -> KernelReport:
    """Every distinct linear shape of the file at each number of tokens; about ``seconds`` per repeat."""
    machine = measure_machine(threads)
    limits = limits_of(machine)
    count = min(threads or len(machine.cpus), len(machine.cpus))
    pool = _native.Pool(count, machine.cpus[:count])
    file = _native.Gguf(str(path))
    cache = last_level_cache()
    results = []
    for shape in model_costs(path)[1]:
        tensor = file.tensor(shape.names[0])
        matrix = _native.pack(pool, tensor.type, tensor.data, shape.rows, shape.cols)
        streamed = tensor.nbytes if tensor.nbytes > cache else 0
        for m in tokens:
            times = [_native.bench_linear(pool, matrix, m, seconds) for _ in range(repeats)]
            results.append(_result(shape, m, times, tensor.nbytes, kernel_limit(shape, m, streamed, limits)))
    return KernelReport(str(path), count, limits, results)


def kernel_limit(shape: LinearShape, tokens: int, streamed: int, limits: Limits) -> float:
    """Seconds that ``tokens`` rows take at least when ``streamed`` bytes come from memory."""
    peak = limits.float_ops_per_s if shape.type in _FLOAT_TYPES else limits.int8_ops_per_s
    return max(2 * tokens * shape.rows * shape.cols / peak, streamed / limits.bytes_per_s)


def _result(shape: LinearShape, tokens: int, times: list[float], nbytes: int, limit: float) -> KernelResult:
    summary = summarise(times)
    return KernelResult(
        type=shape.type,
        rows=shape.rows,
        cols=shape.cols,
        matrices=len(shape.names),
        tokens=tokens,
        seconds=summary,
        gop_per_s=2 * tokens * shape.rows * shape.cols / summary.median / 1e9,
        gb_per_s=nbytes / summary.median / 1e9,
        share=limit / summary.median,
    )


def kernel_table(report: KernelReport) -> str:
    """A Markdown table, one line per shape and number of tokens."""
    rows = [
        (
            f"{r.type} {r.rows} x {r.cols}",
            r.matrices,
            r.tokens,
            f"{1e6 * r.seconds.median:.0f}",
            f"±{100 * r.seconds.spread:.0f} %",
            f"{r.gop_per_s:.0f}",
            f"{r.gb_per_s:.1f}",
            f"{100 * r.share:.0f} %",
        )
        for r in report.results
    ]
    return markdown_table(("matrix", "in model", "M", "µs", "spread", "GOP/s", "GB/s", "share"), rows)
