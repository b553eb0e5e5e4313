"""A short run of schemathesis: see ``tests/server/schema_run.py``, which also runs for longer."""

from __future__ import annotations

from pathlib import Path

from tests.server.schema_run import run
from treadle.server.routes import OPERATIONS


def test_the_server_does_what_its_document_says(tmp_path: Path) -> None:
    found = run(tmp_path, "--generation-deterministic", "--max-examples", "3", short=True)
    assert not found.report["failures"] and not found.report["errors"], found.output
    assert not found.trouble
    assert found.report["operations"]["tested"] == len(OPERATIONS) - 1  # not the document itself
    assert found.cases > 500
    well = {path for path, status in found.statuses if status == "200"}
    assert well >= {op.path for op in OPERATIONS if op.stream or (op.body is None and "{" not in op.path)}
