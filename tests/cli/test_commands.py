"""The command line as a user meets it: help, errors, exit codes, and real answers of the default model."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.hub.server import serving
from treadle.cli.main import COMMANDS
from treadle.cli.serve import FIRST_QUESTION, first_steps
from treadle.config import Config
from treadle.server.routes import OPERATIONS


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("TREADLE_")}


def treadle(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "treadle.cli", *arguments],
        input=stdin, capture_output=True, text=True, timeout=120, env={**clean_environment(), **environment},
    )  # fmt: skip


def test_help_lists_every_command_and_how_settings_combine() -> None:
    result = treadle("--help")
    assert result.returncode == 0
    for name in COMMANDS:
        assert f"\n  {name} " in result.stdout
    assert "TREADLE_KV_MEMORY" in result.stdout


@pytest.mark.parametrize("arguments", [[], ["bench"], ["eval"]])
def test_no_command_shows_the_help(arguments: list[str]) -> None:
    result = treadle(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == treadle(*arguments, "--help").stdout


def test_help_of_serve_lists_every_route() -> None:
    words = set(treadle("serve", "--help").stdout.split())
    assert {op.path for op in OPERATIONS if "{" not in op.path} <= words


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys, contextlib\nfrom treadle.cli.main import treadle\n"
        "with contextlib.suppress(SystemExit): treadle(['--help'])\n"
        "heavy = {'numpy', 'torch', 'starlette', 'pydantic', 'uvicorn', 'tokenizers', 'rich', 'zmq'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[]"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("bench", "eval")])
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
    (["serve", "--host", "0.0.0.0", "--data-dir", "/proc/none"], 1, "--api-key"),
    (["serve", "--config", "/nonexistent.toml"], 1, "/nonexistent.toml"),
    (["chat", "/nonexistent.gguf"], 1, "treadle: the file '/nonexistent.gguf' does not exist\n"),
    (["serve", "/nonexistent.gguf"], 1, "treadle: the file '/nonexistent.gguf' does not exist\n"),
    (["serve", "--kv-memory", "1M", "--port", "0"], 1, "1.0 MiB of KV cache hold 32 tokens"),
    (["generate", "--prompt", ""], 1, "--prompt"),
    (["generate"], 1, "--prompt"),
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
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = treadle("serve", "--port", port)
    assert result.returncode == 1
    assert port in result.stderr


@pytest.mark.parametrize(
    "arguments", [["generate", "--prompt", "x"], ["bench", "machine"], ["serve", "--port", "0"]]
)
def test_unknown_isa_is_explained(arguments: list[str]) -> None:
    result = treadle(*arguments, TREADLE_ISA="foo")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "TREADLE_ISA=foo does not run on this CPU; it can be one of ref, avx2" in result.stderr


def test_serve_answers_openai_clients_under_both_names() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with subprocess.Popen(
        [sys.executable, "-m", "treadle.cli", "serve", "--port", str(port), "--context", "1024"],
        stdout=subprocess.PIPE, text=True, env=clean_environment(),
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            ready = next(line for line in server.stdout if line.startswith(("Ready", "Stop")))
            assert ready.startswith("Ready: smollm2-135m-instruct on ")
            with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
                assert [model.id for model in client.models.list()] == ["smollm2-135m-instruct"]
                for name in ("smollm2-135m-instruct", "smollm2:135m"):
                    answer = client.chat.completions.create(
                        model=name, messages=[{"role": "user", "content": FIRST_QUESTION}], temperature=0
                    )
                    assert "Paris" in (answer.choices[0].message.content or "")
        finally:
            server.send_signal(signal.SIGTERM)


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


def test_generate_continues_what_comes_through_a_pipe() -> None:
    arguments = ("generate", "--max-tokens", "8")
    piped = treadle(*arguments, stdin="The capital of France is\n").stdout
    assert "Paris" in piped
    assert piped == treadle(*arguments, "--prompt", "The capital of France is").stdout


def test_generate_in_a_terminal_wants_a_prompt() -> None:
    terminal, user = os.openpty()
    command = [sys.executable, "-m", "treadle.cli", "generate"]
    result = subprocess.run(command, stdin=user, capture_output=True, text=True, timeout=60, check=False)
    os.close(terminal)
    os.close(user)
    assert result.returncode == 2
    assert "--prompt" in result.stderr


def test_pull_says_that_the_model_is_here() -> None:
    treadle("pull", "smollm2:135m")
    result = treadle("pull", "smollm2:135m")
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"smollm2:135m was on this machine already: .*\.gguf\n", result.stdout)


def test_pull_of_what_is_not_here(tmp_path: Path) -> None:
    with serving() as server:
        server.files["/model.gguf"] = b"GGUF1234"
        result = treadle("pull", f"{server.url}/model.gguf", TREADLE_HOME=str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"http://\S+ is ready: .*\.gguf\n", result.stdout)


@pytest.mark.parametrize(
    ("argv", "found", "shown"),
    [
        (".venv/bin/treadle", None, ".venv/bin/treadle chat 'my model.gguf'  (loads its own copy"),
        ("/x/treadle/cli/__main__.py", None, f"{sys.executable} -m treadle.cli chat 'my model.gguf'"),
        (".venv/bin/treadle", "/usr/bin/treadle", " treadle chat 'my model.gguf'"),
    ],
)
def test_next_step_works_in_the_callers_shell(
    argv: str, found: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [argv])
    monkeypatch.setattr(shutil, "which", lambda _name: found)
    assert shown in first_steps("http://127.0.0.1:8000", "my-model", False, "my model.gguf")


def test_list_names_the_default() -> None:
    assert "smollm2:135m" in treadle("list").stdout


def test_generate_reads_bytes_that_are_no_text() -> None:
    command = [sys.executable, "-m", "treadle.cli", "generate", "--max-tokens", "2", "--temperature", "0"]
    result = subprocess.run(command, input=b"caf\xe9", capture_output=True, check=True, timeout=120)
    assert result.stdout
    assert result.stderr == b""


def test_generate_without_stdin_says_what_to_give() -> None:
    result = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -m treadle.cli generate --prompt - <&-"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr == "treadle: stdin is closed; give a text with --prompt\n"
