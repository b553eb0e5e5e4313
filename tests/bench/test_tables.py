"""Tables of the documents come from results, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.serving.bars import Bar

RUN = {
    "date": "2027-01-02T03:04Z",
    "cpu": "A CPU",
    "cores": 2,
    "memory_gib": 23.5,
    "system": "Linux 6.1.0, Python 3.11.7",
    "versions": {"treadle": "1.0", "llama.cpp": "b7"},
    "command": "python benchmarks/peers/run.py m.gguf",
}


def peers(decode: float, date: str = "2027-01-02T03:04Z") -> dict[str, Any]:
    def case(kind: str, tokens: int, batch: int, ours: float, peer: float) -> dict[str, Any]:
        return {
            "case": {"kind": kind, "tokens": tokens, "batch": batch},
            "ours": [ours, ours, 9 * ours],
            "peer": [peer],
            "foreign": [0.001, 0.05],
        }

    cases = [case("decode", 1, 20, decode, 25.0), case("decode", 0, 1, 20.0, 20.0)]
    cases.append(case("prefill", 512, 1, 300.0, 100.0))
    return {"model": "m-q4.gguf", "threads": 2, "run": RUN | {"date": date}, "cases": cases}


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "error": value / 100}


ACCURACY = {
    "model": {"source": "m.gguf", "isa": "vnni", "kv_dtype": "q8", "activations": "auto"},
    "reference": {"source": "big.gguf", "isa": "vnni", "kv_dtype": "bf16", "activations": "float32"},
    "text": "t.txt",
    "context": 2048,
    "stride": 1024,
    "result": {
        "tokens": 9000,
        "kl": estimate(0.00123),
        "percentiles": {"99": 0.0456},
        "top1": estimate(0.987),
        "perplexity": estimate(12.5),
        "reference_perplexity": estimate(12.4),
        "ratio": estimate(1.0081),
    },
    "run": RUN,
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with all kinds of results, and tables not yet written."""
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["tables.py"])
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    bars = [Bar("users: Treadle, total token/s", 123.4).record(), Bar("times", 3.5, least=3).record()]
    contents = {
        "a-peers": peers(50.0),
        "b-peers": peers(75.0, "2027-01-01T03:04Z"),
        "c-peers": peers(40.0) | {"isa": "avx2"},
        "d-peers": peers(30.0) | {"run": RUN | {"versions": {"treadle": "1.0", "OpenVINO GenAI": "2026.4"}}},
        "serving": {"model": "m-q4.gguf", "threads": 2, "run": RUN, "bars": bars},
        "kl": ACCURACY,
    }
    for name, content in contents.items():
        (results / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    for name, views in (("README.md", ["peers, summary"]), ("docs/performance.md", ["peers", "serving"])):
        blocks = [f"<!-- results: {view} -->\nold\n<!-- end of results -->\n" for view in views]
        (tmp_path / name).write_text("before\n" + "between\n".join(blocks) + "after\n", encoding="utf-8")
    with (tmp_path / "docs" / "performance.md").open("a", encoding="utf-8") as file:
        file.write("<!-- results: accuracy -->\n<!-- end of results -->\n")
    return tmp_path


def rows(text: str) -> list[list[str]]:
    """Cells of all table lines."""
    found = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in found]


def check(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", ["tables.py", "--check"])
        tables.main()


def test_tables_say_what_the_results_say(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"README\.md, docs/performance\.md differ"):
        check(monkeypatch)
    tables.main()
    readme = (project / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("before\n<!-- results:")
    assert readme.endswith("<!-- end of results -->\nafter\n")
    assert rows(readme) == [
        ["token/s", "prefill 512", "decode", "decode 20 at once"],
        ["m-q4", "300.0 (3.00 ×)", "20.0 (1.00 ×)", "50.0 (2.00 ×)"],  # of the newer run
        ["m-q4, OpenVINO GenAI", "300.0 (3.00 ×)", "20.0 (1.00 ×)", "30.0 (1.20 ×)"],
        ["m-q4, avx2 kernels", "300.0 (3.00 ×)", "20.0 (1.00 ×)", "40.0 (1.60 ×)"],
    ]
    full = (project / "docs" / "performance.md").read_text(encoding="utf-8")
    cells = rows(full)
    assert ["decode 20 at context 1", "75.0 ±200 %", "25.0 ±0 %", "3.00", "5 % (noisy)"] in cells
    assert ["times", "3.5", "at least 3", "holds", ""] in cells
    line = ["m: m.gguf instead of big.gguf, activations auto instead of float32, KV q8 instead of bf16"]
    line += ["2048", "9000", "0.0012 ± 1e-05", "0.046", "98.7 %", "12.500", "+0.81 ± 1.01 %"]
    assert line in cells
    assert "2027-01-02, A CPU, 2 cores, 23.5 GiB" in full
    assert "llama.cpp b7:\n\n```bash\npython benchmarks/peers/run.py m.gguf\n```" in full
    check(monkeypatch)


def test_a_number_that_nobody_measured_fails_the_check(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables.main()
    readme = project / "README.md"
    readme.write_text(readme.read_text(encoding="utf-8").replace("300.0", "400.0"), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"README\.md differ"):
        check(monkeypatch)
    tables.main()
    (project / "benchmarks" / "results" / "a-peers.json").write_text(json.dumps(peers(60.0)))
    with pytest.raises(SystemExit, match="differ"):
        check(monkeypatch)
    tables.main()
    check(monkeypatch)


def test_what_cannot_be_used_is_named(project: Path) -> None:
    readme, broken = project / "README.md", project / "benchmarks" / "results" / "broken.json"
    for content in ("{", "[]", '{"cases": []}', '{"nothing": 1}'):
        broken.write_text(content, encoding="utf-8")
        with pytest.raises(SystemExit, match=r"broken\.json is no result"):
            tables.main()
    broken.unlink()
    text = readme.read_text(encoding="utf-8")
    readme.write_text(text.replace("peers, summary", "speed"), encoding="utf-8")
    with pytest.raises(SystemExit, match="no results 'speed'"):
        tables.main()
    readme.write_text(text.replace("<!-- end of results -->", ""), encoding="utf-8")
    with pytest.raises(SystemExit, match="1 tables begin and 0 end"):
        tables.main()
    readme.write_text(text, encoding="utf-8")
    (project / "docs" / "performance.md").write_text("no tables\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"kl\.json: no document has a table of accuracy"):
        tables.main()
