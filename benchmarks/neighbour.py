"""Decode speed while another process keeps one core busy, against the speed without it, in turns.

    python -m benchmarks.neighbour MODEL.gguf [--llama-bin FOLDER] [--rounds N]

One sequence, one thread per core. The neighbour is a process that only computes, on the last of our CPUs.
The first seconds of every phase are left out. With --llama-bin, llama.cpp's `llama-bench` is asked the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.peers.run import Case, LlamaCpp
from treadle.bench.report import markdown_table
from treadle.engine.kv.pool import BLOCK
from treadle.engine.load import LoadConfig, load_runner
from treadle.engine.runner import Runner

_SETTLES = 5.0  # seconds until a phase counts: a core that was crowded is tried again after four at most
_CONTEXT = 256  # tokens in the sequence


@contextlib.contextmanager
def neighbour(cpu: int) -> Iterator[None]:
    """A process that keeps ``cpu`` busy."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(busy.pid, {cpu})
        yield
    finally:
        busy.kill()
        busy.wait()


def ours(runner: Runner, steps: int) -> float:
    """Token/s of ``steps`` steps of decode, once it has settled."""
    blocks = _CONTEXT // BLOCK + 1
    runner.tables[0, :blocks] = np.arange(blocks, dtype=np.int32)
    token, one, past, slot = (np.array([value], np.int32) for value in (1, 1, _CONTEXT, 0))
    begun = time.perf_counter()
    taken: list[float] = []
    while len(taken) < steps:
        start = time.perf_counter()
        runner.run(token, one, past, slot, slot)
        if start - begun > _SETTLES:
            taken.append(time.perf_counter() - start)
    return steps / sum(taken)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args()
    runner = load_runner(LoadConfig(path=str(options.model)))
    programs: dict[str, Callable[[], float]] = {"Treadle": lambda: ours(runner, options.steps)}
    if options.llama_bin:
        peer = LlamaCpp(options.llama_bin, options.model, runner.threads, options.steps)
        programs["llama.cpp"] = lambda: peer.measure(Case("decode", 0))[0]
    cpu = max(os.sched_getaffinity(0))
    rows = []
    for name, run in programs.items():
        alone, beside = [], []
        for _ in range(options.rounds):
            alone.append(run())
            with neighbour(cpu):
                beside.append(run())
        kept = sorted(b / a for a, b in zip(alone, beside, strict=True))
        rows.append(
            (
                name,
                f"{median(alone):.1f}",
                f"{median(beside):.1f}",
                f"{median(kept):.0%}",
                f"{kept[0]:.0%} to {kept[-1]:.0%}",
            )
        )
    print(markdown_table(("one sequence", "alone, token/s", "beside a busy process", "kept", "rounds"), rows))


if __name__ == "__main__":
    main()
