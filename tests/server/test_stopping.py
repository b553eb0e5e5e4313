"""The real server stops while answers are being written that take longer than it waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.server.conftest import Api, clean_environment, free_port, wait_ready

LONG = {"prompt": "One, two,", "max_tokens": 1900, "ignore_eos": True, "n": 12}


def test_answers_end_with_an_error(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "treadle.cli", "serve", "--port", str(port), "--context", "2048"]
    command += ["--shutdown-timeout", "0.5", "--max-queue", "8", "m=smollm2:135m"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=clean_environment(), start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, process, log)
        with Api(url, "m", key=None) as api, ThreadPoolExecutor(1) as pool:
            refused = api.post("/v1/completions", json={**LONG, "model": "m", "n": 128})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
            body = {**LONG, "model": "m", "stream": True}
            with api.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                whole = pool.submit(api.post, "/v1/completions", json={**LONG, "model": "m", "n": 1})
                for line in lines:
                    if '"index":11' in line:
                        break
                os.killpg(process.pid, signal.SIGTERM)  # as service managers do
                data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
            assert json.loads(data[-1])["error"]["code"] == "stopping"
            answer = whole.result(20)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
        assert process.wait(20) == 0
    finally:
        process.kill()
    assert "Traceback" not in log.read_text()
