"""A real server to be maltreated: little KV memory, few places in the queue."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.server.conftest import clean_environment, free_port, wait_ready
from tests.server.faults.scenarios import QUEUE, Faulty

KEYS = ("sk-one", "sk-two")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    """``treadle serve`` on the built-in model. Its log must not have a traceback in the end."""
    port, log = free_port(), tmp_path_factory.mktemp("faults") / "log"
    command = [sys.executable, "-m", "treadle.cli", "serve", "m=smollm2:135m", "--port", str(port)]
    command += ["--context", "2048", "--kv-memory", "256M", "--max-queue", str(QUEUE)]
    with log.open("wb") as out:
        environment = clean_environment(TREADLE_API_KEY=",".join(KEYS))
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        wait_ready(f"http://127.0.0.1:{port}", process, log)
        yield Faulty(f"http://127.0.0.1:{port}", process.pid, "m", KEYS)
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
    assert "Traceback" not in log.read_text(), log.read_text()
