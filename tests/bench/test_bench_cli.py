"""``treadle bench`` as a user types it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import gguf
import pytest
from click.testing import CliRunner

from treadle.bench.shapes import Shape
from treadle.bench.synth import write_synthetic
from treadle.cli.bench import command
from treadle.core import TreadleError


@pytest.fixture
def server_url(running: Any) -> Iterator[str]:
    """The fake server in a thread of its own: the command has its own event loop."""
    ready, stop, urls = threading.Event(), asyncio.Event(), []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with running() as server:
            urls.append(server.url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(5)
    yield urls[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(5)
    loop.close()


def _run(*args: str) -> Any:
    result = CliRunner().invoke(command, list(args), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_synth_writes_the_file_and_says_its_size(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert _run("synth", "SmolLM2-135M", "q4_0", str(path)).stdout == f"{path}: 0.09 GB\n"
    assert len(gguf.GGUFReader(path).tensors) == 272


def test_synth_help_lists_shapes_and_quantisations() -> None:
    text = _run("synth", "--help").stdout
    assert "r1-distill-qwen-32b" in text and "Q4_K_M" in text


def test_synth_of_an_unknown_shape() -> None:
    with pytest.raises(TreadleError, match="known ones are"):
        _run("synth", "gpt-5", "Q4_0", "/tmp/never.gguf")


def test_offline_loads_a_model_and_prints_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.bench.machine.READ_BYTES", 1 << 20)
    path = tmp_path / "m.gguf"
    write_synthetic(
        Shape("tiny", "qwen2", 2, 256, 512, 4, 2, 512, 1024, 1e6, 1e-6, head_dim=64), "Q4_K_M", path
    )
    cases = ("--prefill", "40", "--context", "0,33", "--batch", "1,3", "--steps", "2", "--threads", "1")
    report = json.loads(_run("offline", str(path), "--json", *cases).stdout)
    assert [(r["case"], r["tokens"], r["batch"]) for r in report["results"]] == [
        ("prefill", 40, 1),
        ("decode", 0, 1),
        ("decode", 0, 3),
        ("decode", 33, 1),
    ]
    assert report["threads"] == 1
    assert all(r["tokens_per_s"]["median"] > 0 and r["share"] > 0 for r in report["results"])


def test_serve_as_table_and_json(server_url: str) -> None:
    common = ("serve", "--users", "1,2", "--conversations", "2", "--prompt", "20-30", "--answer", "4")
    table = _run(*common, "--url", server_url).stdout
    assert "1 users" in table and "2 users" in table and "TTFT" in table
    assert "3 warm-up requests" in table
    reports = json.loads(_run(*common, "--url", server_url, "--json").stdout)["runs"]
    assert [(r["users"], r["requests"], r["errors"], r["completion_tokens"]) for r in reports] == [
        (1, 2, 0, 8),
        (2, 4, 0, 16),
    ]
    assert reports[0]["ttft"]["p50"] > 0


class _Page(HTMLParser):
    """Counts tags, and collects what would be fetched or run."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.fetched += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")
        ]


def test_serve_report_is_one_page_that_fetches_nothing(server_url: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    load = ("--users", "1,3", "--rate", "20", "--seconds", "1", "--conversations", "1", "--turns", "2")
    _run("serve", "--url", server_url, *load, "--prompt", "20-30", "--answer", "4", "--html", str(path))
    text = path.read_text()
    page = _Page()
    page.feed(text)
    assert page.tags["svg"] == 15  # seven for users, seven for rates, one for turns
    assert page.tags["script"] == 0 and not page.fetched and "url(" not in text
    assert page.tags["tr"] == 4
    for part in ("1 users", "3 users", "20 /s", "warm-up", "answers of 4", "Time to first token by turn"):
        assert part in text
    assert len(text) < 200_000


def test_serve_compare(server_url: str) -> None:
    # The same server under two names is still two columns.
    other = server_url.replace("127.0.0.1", "localhost")
    args = ("--users", "1", "--conversations", "1", "--answer", "3", "--repeats", "2")
    text = _run("serve", "--compare", server_url, other, *args).stdout
    assert f"{server_url} against {other}" in text


@pytest.mark.parametrize("wrong", ["1,x", "0", "-1"])
def test_lists_of_numbers_are_checked(wrong: str) -> None:
    result = CliRunner().invoke(command, ["serve", f"--users={wrong}"])
    assert result.exit_code == 2
    assert repr(wrong) in result.output
