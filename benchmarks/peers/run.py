"""Ours and a peer side by side: same file, same threads, run alternately (A B A B), one table with ratios.

    python benchmarks/peers/run.py MODEL.gguf --threads 2 --llama-bin /path/to/llama.cpp/bin
    python benchmarks/peers/run.py MODEL.gguf --openvino FOLDER --openvino-python genai/bin/python

llama.cpp needs `llama-bench` and `llama-batched-bench`, from --llama-bin or the PATH. OpenVINO GenAI reads no
GGUF with groups of 128: FOLDER is a model of the same shape (genai_model.py), and the Python one that has it.
Every run is a process of its own; TREADLE_ISA in the environment chooses our kernels. While it runs, CPU time
that neither it nor its children use is counted as foreign: above 3 % the run is marked, and the whole
comparison is refused at the start when the machine is not quiet (unless --noisy).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from treadle import machine
from treadle.bench.machine import cpu_model
from treadle.bench.noise import busy_seconds
from treadle.bench.provenance import provenance
from treadle.bench.report import markdown_table, summarise

MOST_FOREIGN = 0.03  # share of all CPU time used by others, above which a run is marked


@dataclass(frozen=True)
class Case:
    """Prefill: ``tokens`` of prompt. Decode: ``tokens`` of context in each of ``batch`` sequences."""

    kind: str
    tokens: int
    batch: int = 1

    @property
    def title(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.tokens}"
        return f"decode {self.batch} at context {self.tokens}"


@dataclass
class Measured:
    """All runs of one case."""

    case: Case
    ours: list[float] = field(default_factory=list)  # token/s
    peer: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)  # shares, in the order of the runs


class Failure(Exception):
    """A benchmark process failed; the text is its last lines."""


def foreign_share(seconds: float) -> float:
    """Watches the machine for a moment in which we do nothing."""
    before = busy_seconds()
    time.sleep(seconds)
    return (busy_seconds() - before) / seconds / (os.cpu_count() or 1)


def run(command: list[str]) -> tuple[str, float]:
    """Standard output of a process, and the share of CPU time that others used meanwhile."""
    start, busy, own = time.monotonic(), busy_seconds(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failure(f"{' '.join(command)}\n{done.stderr[-800:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - own.ru_utime - own.ru_stime
    span = (time.monotonic() - start) * (os.cpu_count() or 1)
    return done.stdout, max(0.0, busy_seconds() - busy - used) / span


class Ours:
    """`treadle bench offline`."""

    def __init__(self, model: Path, threads: int, steps: int) -> None:
        self._base = [sys.executable, "-m", "treadle.cli", "bench", "offline", str(model), "--json"]
        self._base += ["--threads", str(threads), "--steps", str(steps), "--repeats", "1"]

    def measure(self, case: Case) -> tuple[float, float]:
        """Token/s and the foreign share."""
        if case.kind == "prefill":
            asked = ["--prefill", str(case.tokens), "--batch", ""]
        else:
            asked = ["--prefill", "", "--context", str(case.tokens), "--batch", str(case.batch)]
        output, foreign = run(self._base + asked)
        (result,) = json.loads(output)["results"]
        return float(result["tokens_per_s"]["median"]), foreign


class LlamaCpp:
    """llama.cpp's own benchmarks; several sequences at once need the second one."""

    name = "llama.cpp"

    def __init__(self, folder: Path | None, model: Path, threads: int, steps: int) -> None:
        self._bench = find_program("llama-bench", folder)
        self._batched = find_program("llama-batched-bench", folder)
        self._model, self._threads, self._steps = str(model), str(threads), str(steps)

    def version(self) -> str:
        """What it says of itself, in one line."""
        done = subprocess.run([self._bench, "--version"], capture_output=True, text=True, check=False)
        return next(iter((done.stdout + done.stderr).splitlines()), "unknown").removeprefix("version: ")

    def measure(self, case: Case) -> tuple[float, float]:
        """Token/s and the foreign share."""
        common = ["-m", self._model, "-t", self._threads]
        if case.kind == "decode" and case.batch > 1:
            prompt = max(1, case.tokens)
            size = case.batch * (prompt + int(self._steps))
            command = [self._batched, *common, "-c", str(size), "-npp", str(prompt), "-ntg", self._steps]
            output, foreign = run([*command, "-npl", str(case.batch), "--output-format", "jsonl"])
            (line,) = re.findall(r"^\{.*\}$", output, re.MULTILINE)
            return float(json.loads(line)["speed_tg"]), foreign
        if case.kind == "prefill":
            asked = ["-p", str(case.tokens), "-n", "0"]
        else:
            asked = ["-p", "0", "-n", self._steps, "-d", str(case.tokens)]
        output, foreign = run([self._bench, *common, *asked, "-r", "1", "-o", "json"])
        (result,) = json.loads(output)
        return float(result["avg_ts"]), foreign


class OpenVino:
    """OpenVINO GenAI, by genai_bench.py in a Python that has it."""

    name = "OpenVINO GenAI"

    def __init__(self, python: str, folder: Path, threads: int, steps: int) -> None:
        self._base = [python, str(Path(__file__).with_name("genai_bench.py")), str(folder)]
        self._base += ["--threads", str(threads), "--steps", str(steps)]
        self._version = "unknown"

    def version(self) -> str:
        """What it said of itself in the last run."""
        return self._version

    def measure(self, case: Case) -> tuple[float, float]:
        """Token/s and the foreign share."""
        output, foreign = run([*self._base, case.kind, str(case.tokens), "--batch", str(case.batch)])
        result = json.loads(output.splitlines()[-1])
        self._version = str(result["version"])
        return float(result["tokens_per_s"]), foreign


def find_program(name: str, folder: Path | None) -> str:
    """Path of a program in ``folder``, or in the PATH where none is given. Raises SystemExit when missing."""
    found = shutil.which(name, path=str(folder) if folder else None)
    if found is None:
        raise SystemExit(
            f"{name} is not in {folder or 'the PATH'}; build llama.cpp and pass --llama-bin FOLDER"
        )
    return found


def compare(ours: Ours, peer: LlamaCpp | OpenVino, cases: list[Case], rounds: int) -> list[Measured]:
    """Each case ``rounds`` times: ours, theirs, ours, theirs."""
    measured = [Measured(case) for case in cases]
    for entry in measured:
        for number in range(rounds):
            for engine, rates in ((ours, entry.ours), (peer, entry.peer)):
                rate, foreign = engine.measure(entry.case)
                rates.append(rate)
                entry.foreign.append(foreign)
            print(f"{entry.case.title}: round {number + 1}, {entry.ours[-1]:.1f} : {entry.peer[-1]:.1f}",
                  file=sys.stderr)  # fmt: skip
    return measured


def table(measured: list[Measured], peer: str) -> str:
    """Medians in token/s, their ratio, and the worst foreign share."""
    rows = []
    for entry in measured:
        ours, theirs = summarise(entry.ours), summarise(entry.peer)
        worst = max(entry.foreign)
        mark = " (noisy)" if worst > MOST_FOREIGN else ""
        rows.append(
            (
                entry.case.title,
                f"{ours.median:.1f} ±{100 * ours.spread:.0f} %",
                f"{theirs.median:.1f} ±{100 * theirs.spread:.0f} %",
                f"{ours.median / theirs.median:.2f}",
                f"{100 * worst:.0f} %{mark}",
            )
        )
    return markdown_table(("case", "Treadle token/s", f"{peer} token/s", "ratio", "foreign CPU"), rows)


def numbers(text: str) -> list[int]:
    """``1,8,20`` or nothing."""
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=len(machine.threads()))
    parser.add_argument("--llama-bin", type=Path, help="folder with llama-bench and llama-batched-bench")
    parser.add_argument("--openvino", type=Path, help="compare with OpenVINO GenAI; folder of its model")
    parser.add_argument("--openvino-python", default=sys.executable, help="a Python that has openvino-genai")
    parser.add_argument(
        "--prefill", type=numbers, default=[128, 512, 2048], help="prompt lengths [128,512,2048]"
    )
    parser.add_argument(
        "--context", type=numbers, default=[0, 2048], help="contexts of batch-1 decode [0,2048]"
    )
    parser.add_argument(
        "--batch", type=numbers, default=[4, 8, 20, 32], help="sequences at once, at context 1"
    )
    parser.add_argument("--steps", type=int, default=32, help="decode steps per run [32]")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each engine per case [3]")
    parser.add_argument("--noisy", action="store_true", help="run although the machine is not quiet")
    parser.add_argument("--peer-version", help="of the peer, where it does not know [asked of it]")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    options = parser.parse_args()

    others = foreign_share(2.0)
    if others > MOST_FOREIGN and not options.noisy:
        raise SystemExit(f"others use {100 * others:.0f} % of this machine's CPUs; wait, or pass --noisy")
    cases = [Case("prefill", n) for n in options.prefill]
    cases += [Case("decode", context) for context in options.context]
    cases += [Case("decode", 1, batch) for batch in options.batch]
    ours = Ours(options.model, options.threads, options.steps)
    peer: LlamaCpp | OpenVino
    if options.openvino:
        peer = OpenVino(options.openvino_python, options.openvino, options.threads, options.steps)
    else:
        peer = LlamaCpp(options.llama_bin, options.model, options.threads, options.steps)
    try:
        measured = compare(ours, peer, cases, options.rounds)
    except Failure as failure:
        raise SystemExit(str(failure)) from None
    title = f"{options.model.name}, {options.threads} threads, {cpu_model()}; "
    title += f"foreign CPU at the start {100 * others:.0f} %"
    text = f"{title}\n\n{table(measured, peer.name)}\n"
    print(text)
    if options.out:
        Path(f"{options.out}.md").write_text(text, encoding="utf-8")
        record = {
            "title": title,
            "model": options.model.name,
            "threads": options.threads,
            "isa": os.environ.get("TREADLE_ISA"),
            "run": msgspec.to_builtins(provenance({peer.name: options.peer_version or peer.version()})),
            "cases": [asdict(entry) for entry in measured],
        }
        Path(f"{options.out}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
