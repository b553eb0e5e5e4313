"""Conversations of many turns with a reasoning model: what was computed is used again, over restarts too."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import KEY, Api, clean_environment, free_port, wait_ready
from treadle.bench.shapes import Shape
from treadle.bench.synth import write_synthetic

TURNS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("r1") / "r1.gguf"
    shape = Shape("tiny", "deepseek-r1-qwen", 2, 256, 512, 4, 2, 1024, 4096, 1e6, 1e-6, head_dim=64)
    write_synthetic(shape, "Q8_0", path)
    return path


@contextlib.contextmanager
def serving(model: Path, *options: str) -> Iterator[Api]:
    port = free_port()
    command = [sys.executable, "-m", "treadle.cli", "serve", str(model), "--port", str(port), *options]
    log = model.parent / "log"
    with log.open("wb") as out, Api(f"http://127.0.0.1:{port}", "r1") as api:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=clean_environment(TREADLE_API_KEY=KEY)
        )
        try:
            wait_ready(api.url, process, log)
            yield api
        finally:
            process.terminate()
            process.wait(20)


def usage(api: Api, messages: list[dict[str, str]]) -> tuple[int, int]:
    """Prompt tokens, and how many of them were cached."""
    body = {"model": api.model, "messages": messages, "max_tokens": 4, "temperature": 0}
    response = api.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["usage"]
    return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]


def conversation(turns: int, form: str) -> list[dict[str, str]]:
    """History with the reasoning left out, inside the content, or beside it."""
    messages = []
    for i in range(turns):
        question = f"Question {i}: what do you think of the {i}th chapter, and of the people in it? " * 2
        answer = {"role": "assistant", "content": f"In chapter {i} they meet, talk, and part. " * 2}
        if form == "inside":
            answer["content"] = f"<think>\nThe user asks about {i}.\n</think>\n\n{answer['content']}"
        elif form == "beside":
            answer["reasoning_content"] = f"The user asks about {i}."
        messages += [{"role": "user", "content": question}, answer]
    return messages[:-1]


def test_the_tenth_turn_is_mostly_cached_and_so_after_a_restart(model: Path, tmp_path: Path) -> None:
    options = ("--kv-spill", str(tmp_path / "kv"), "--kv-spill-size", "200M", "--context", "2048")
    with serving(model, *options) as api:
        for turn in range(1, TURNS + 1):
            prompt, cached = usage(api, conversation(turn, "left out"))
        assert cached / prompt > 0.8
        forms = [usage(api, conversation(TURNS, form)) for form in ("left out", "inside", "beside")]
        assert {tokens for tokens, _ in forms} == {prompt}
        assert all(prompt - cached <= 33 for _, cached in forms)  # all full blocks before the last token
    with serving(model, *options) as api:
        again, cached = usage(api, conversation(TURNS, "inside"))
        assert again == prompt
        assert prompt - cached <= 33
        assert usage(api, [{"role": "user", "content": "Something else entirely, please."}])[1] == 0


def test_the_kv_type_is_a_setting(model: Path) -> None:
    with serving(model, "--kv-dtype", "q8", "--context", "1024") as api:
        prompt, _ = usage(api, conversation(2, "left out"))
        assert usage(api, conversation(2, "left out")) == (prompt, (prompt - 1) // 32 * 32)
