"""``treadle.server.run.run`` as a process, on a scripted engine and a key store of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from click.testing import CliRunner

from tests.server.conftest import clean_environment, free_port
from treadle.cli.key import command

PROGRAM = """
import json, sys
from tests.server.scripted import ByteText, ScriptedEngine
from treadle.config import Config
from treadle.server.log import configure
from treadle.server.run import run
from treadle.server.service import Served

settings = json.loads(sys.argv[1])
config = Config.load(settings)

async def load():
    engine = ScriptedEngine("x" * 20, delay=0.01, first=float(sys.argv[2]))
    return [Served(name="toy", text=ByteText(), engine=engine, context=256, aliases=("t:1",))]

async def on_loaded(service, local, url):
    print(local, flush=True)

configure(config.log_level, config.log_format)
run(config, load, "1", on_loaded)
"""
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


class Server:
    """A running server and its log."""

    def __init__(self, process: subprocess.Popen[str], log: Path, url: str) -> None:
        self.process = process
        self.url = url
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def lines(self) -> list[dict[str, Any]]:
        """The log of ``--log-format json``."""
        return [json.loads(line) for line in self.log.splitlines()]

    def ask(self, key: str | None, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {**CHAT, **more}
        return httpx.post(self.url + "/v1/chat/completions", headers=headers, json=body, timeout=30)

    def get(self, path: str, key: str | None, **headers: str) -> httpx.Response:
        if key:
            headers["Authorization"] = f"Bearer {key}"
        return httpx.get(self.url + path, headers=headers, timeout=30)


@contextlib.contextmanager
def serving(folder: Path, *, first: float = 0.0, **settings: Any) -> Iterator[Server]:
    """Start a server whose key store is in ``folder``; it has stopped when the context ends."""
    port = free_port()
    log = folder.with_name(f"{folder.name}-{port}.log")
    settings = {"data_dir": str(folder), "port": port, **settings}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(settings), str(first)],
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
            env=clean_environment(PYTHONPATH="."),
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, log.read_text()
        yield Server(process, log, url)
    finally:
        process.terminate()
        process.communicate(timeout=20)


def treadle_key(folder: Path, *arguments: str) -> str:
    """What the command ``treadle key`` writes to standard output, without the spaces around it. Raises its
    TreadleError."""
    result = CliRunner().invoke(
        command, [*arguments, "--data-dir", str(folder)], catch_exceptions=False, standalone_mode=False
    )
    return result.stdout.strip()


def eventually(check: Callable[[], bool]) -> None:
    """Wait for what the server sees in its next round, for at most ten seconds."""
    for _ in range(200):
        if check():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen")
