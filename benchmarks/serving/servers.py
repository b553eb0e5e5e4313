"""Server processes under measurement, and what CPU time they and everybody else use."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from treadle.bench.noise import busy_seconds, tree_seconds

_LOADING = 300.0  # seconds that a server may take to become ready


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    pid: int

    def cpu(self) -> tuple[float, float]:
        """CPU seconds of the server process so far, and of its child processes (Treadle's engine)."""
        tree = tree_seconds(self.pid)
        own = tree.pop(self.pid)
        return own, sum(tree.values())


@contextlib.contextmanager
def serve(command: list[str], port: int, log: Path) -> Iterator[Running]:
    """Start a server, wait until ``/health`` says 200, stop it with SIGTERM. Raises SystemExit if it ends."""
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + _LOADING
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{' '.join(command)}\ndid not become ready:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield Running(url, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Programs:
    """How both servers are started: same file, same threads."""

    model: Path
    threads: int
    llama_server: Path | None
    logs: Path

    @contextlib.contextmanager
    def ours(self, *options: str) -> Iterator[Running]:
        """``treadle serve`` with these options."""
        port = free_port()
        command = [sys.executable, "-m", "treadle.cli", "serve", str(self.model), "--port", str(port)]
        command += ["--threads", str(self.threads), *options]
        with serve(command, port, self.logs / f"treadle-{port}.log") as running:
            yield running

    @contextlib.contextmanager
    def peer(self, slots: int, context: int, unified: bool) -> Iterator[Running | None]:
        """llama.cpp's ``llama-server`` with continuous batching; None where it was not given. ``context``:
        tokens of all slots together, which they share if ``unified``, else each has its part.
        """
        if self.llama_server is None:
            yield None
            return
        port = free_port()
        command = [str(self.llama_server), "-m", str(self.model), "--port", str(port), "--host", "127.0.0.1"]
        command += ["-t", str(self.threads), "-tb", str(self.threads), "-np", str(slots), "-c", str(context)]
        command += ["-cb", "-fa", "auto", "--no-webui", "--jinja", "--cache-ram", "0"]
        command += ["--kv-unified"] if unified else ["--no-kv-unified"]
        with serve(command, port, self.logs / f"llama-{port}.log") as running:
            yield running


class Meter:
    """CPU time of others since it was made, as a share of all CPUs; everything started here counts as own."""

    def __init__(self) -> None:
        self._start, self._busy = time.monotonic(), busy_seconds()
        self._own = sum(tree_seconds(os.getpid()).values())

    def foreign(self) -> float:
        """0 to 1. No process of ours may have started or ended meanwhile."""
        own = sum(tree_seconds(os.getpid()).values()) - self._own
        span = (time.monotonic() - self._start) * (os.cpu_count() or 1)
        return max(0.0, busy_seconds() - self._busy - own) / span


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """For logs and spilled KV."""
    return tempfile.TemporaryDirectory(prefix="treadle-serving-")
