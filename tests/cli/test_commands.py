"""The command line as a user meets it: help, errors, exit codes, and real answers of the default model."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from treadle.cli.main import COMMANDS
from treadle.config import Config


def treadle(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TREADLE_")}
    return subprocess.run(
        [sys.executable, "-m", "treadle.cli", *arguments],
        input=stdin, capture_output=True, text=True, timeout=120, env={**clean, **environment},
    )  # fmt: skip


def test_help_lists_every_command_and_how_settings_combine() -> None:
    result = treadle("--help")
    assert result.returncode == 0
    for name in COMMANDS:
        assert f"\n  {name} " in result.stdout
    assert "TREADLE_KV_MEMORY" in result.stdout


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys, contextlib\nfrom treadle.cli.main import treadle\n"
        "with contextlib.suppress(SystemExit): treadle(['--help'])\n"
        "heavy = {'numpy', 'torch', 'starlette', 'pydantic', 'uvicorn', 'tokenizers', 'rich', 'zmq'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[]"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "bench"])
def test_every_option_has_help(name: str) -> None:
    result = treadle(name, "--help")
    assert result.returncode == 0
    lines = [line for line in result.stdout.split("\n") if line.startswith("  -")]
    assert lines
    assert "Show this message and exit." in result.stdout


def test_serve_offers_every_setting_with_its_help() -> None:
    text = " ".join(treadle("serve", "--help").stdout.split())
    for field in dataclasses.fields(Config):
        if field.name != "model":
            assert "--" + field.name.replace("_", "-") in text
            assert " ".join(field.metadata["help"].split()[:4]) in text


WRONG: list[tuple[list[str], int, str]] = [
    (["serve", "--port", "http"], 1, "--port"),
    (["serve", "--host", "0.0.0.0"], 1, "--api-key"),
    (["serve", "--config", "/nonexistent.toml"], 1, "/nonexistent.toml"),
    (["chat", "/nonexistent.gguf"], 1, "/nonexistent.gguf"),
    (["generate", "--prompt", ""], 1, "--prompt"),
    (["generate"], 2, "--prompt"),
    (["pull", "no-such-model"], 1, "no-such-model"),
    (["serve", "--colour"], 2, "--colour"),
    (["dance"], 2, "dance"),
]


@pytest.mark.parametrize(("arguments", "code", "named"), WRONG)
def test_errors_are_one_line(arguments: list[str], code: int, named: str) -> None:
    result = treadle(*arguments)
    assert result.returncode == code
    assert result.stderr.count("\n") == 1
    assert named in result.stderr
    assert "Traceback" not in result.stderr


def test_taken_port_is_an_error() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = treadle("serve", "--port", port)
    assert result.returncode == 1
    assert port in result.stderr


def test_chat_answers_and_remembers_until_cleared() -> None:
    result = treadle("chat", "--temperature", "0", stdin="What is the capital of France?\n/bye\n")
    assert result.returncode == 0
    assert "Paris" in result.stdout


def test_generate() -> None:
    arguments = ["--prompt", "The capital of France is", "--prompt", "One, two, three,", "--max-tokens", "8"]
    result = treadle("generate", *arguments, "--json")
    records: list[dict[str, Any]] = [json.loads(line) for line in result.stdout.splitlines()]
    assert "Paris" in records[0]["text"]
    assert "four" in records[1]["text"]
    assert [record["usage"]["completion_tokens"] for record in records] == [8, 8]


def test_list_names_the_default() -> None:
    assert "smollm2:135m" in treadle("list").stdout
