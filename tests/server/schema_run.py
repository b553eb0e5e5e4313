"""schemathesis against a real server: calls that its OpenAPI document allows, and calls that it does not.

    python -m tests.server.schema_run --minutes 10

``tests/server/test_schema.py`` is a short run of the same. Findings are server errors, statuses and bodies
that the document does not tell, wrong data that is accepted, methods and keys that are not refused, streams
that end in an error, and engines that die.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.models import tiny
from tests.server.conftest import KEY, clean_environment, free_port, wait_ready

CONTEXT = 512  # tokens
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Run:
    """What schemathesis found."""

    output: str
    report: dict[str, Any]
    trouble: list[str]  # in the server's log and metrics
    statuses: dict[tuple[str, str], int]  # finished requests by route and status

    @property
    def cases(self) -> int:
        """Number of requests that were checked."""
        count: int = self.report["test_cases"]["generated"]
        return count


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, Path]]:
    """``treadle serve`` on the built-in model and a tiny one for embeddings: its URL and its log."""
    embeds = folder / "tiny.gguf"
    tiny.write(embeds, tiny.make("qwen3"), "qwen3", metadata={"pooling_type": 3}, tokenizer=True)
    log, port = folder / "log", free_port()
    command = [sys.executable, "-m", "treadle.cli", "serve", "smollm2:135m", f"emb={embeds}"]
    command += ["--port", str(port), "--context", str(CONTEXT), "--data-dir", str(folder / "data")]
    with log.open("wb") as out:
        environment = clean_environment(TREADLE_API_KEY=KEY, TREADLE_LOG_FORMAT="json")
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, process, log)
        yield url, log
    finally:
        process.terminate()
        process.wait(40)


def run(folder: Path, *options: str, short: bool = False) -> Run:
    """schemathesis with further options of ``schemathesis run`` on a server of its own, in an empty folder.
    short: with a part of the bodies only."""
    with serving(folder) as (url, log), httpx.Client(base_url=url, headers={"x-api-key": KEY}) as client:
        served = [card["id"] for card in client.get("/v1/models").json()["data"]]
        command = [
            *(sys.executable, "-m", "schemathesis.cli"),
            *("--config-file", str(Path(__file__).with_name("schemathesis.toml"))),
            *("run", url + "/openapi.json", "--header", f"Authorization: Bearer {KEY}"),
            *("--report", "json", "--report-json-path", str(folder / "report.json"), "--no-color"),
            *options,
        ]
        environment = clean_environment(SCHEMA_MODELS=" ".join(served), PYTHONPATH=str(_ROOT))
        environment["SCHEMA_PART"] = "8" if short else "1"
        done = subprocess.run(  # there, because it leaves a cache where it runs
            command, capture_output=True, text=True, env=environment, check=False, cwd=folder
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
        metrics = client.get("/metrics").text
        trouble = _trouble(client.get("/ready"), metrics)
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    trouble += [str(line) for line in lines if line["level"] in ("error", "critical") or "exception" in line]
    report = json.loads((folder / "report.json").read_text())
    counted = re.findall(r'treadle_http_requests_total{route="(.*?)",status="(\d+)"} (\S+)', metrics)
    statuses = {(route, status): round(float(count)) for route, status, count in counted}
    return Run(done.stdout + done.stderr, report, trouble, statuses)


def _trouble(ready: httpx.Response, metrics: str) -> list[str]:
    """What is wrong with the server afterwards."""
    found = [] if ready.is_success else [f"/ready: {ready.text}"]
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(("treadle_engine_restarts_total", "treadle_requests_running")) and float(value):
            found.append(line)
    return found


def main() -> None:
    """Run for some minutes and print what was found; exit code 1 if there was anything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the generated data (default: 1)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        time = ("--max-time", str(round(arguments.minutes * 60)))
        found = run(Path(folder), *time, "--seed", str(arguments.seed))
    print(found.output)
    for (route, status), count in sorted(found.statuses.items()):
        print(f"{count:7}  {status}  {route}")
    for line in found.trouble:
        print("trouble:", line)
    sys.exit(1 if found.trouble or found.report["exit_code"] else 0)


if __name__ == "__main__":
    main()
