"""Three models for real clients.

- ``smol``: the default one in a real `treadle serve`.
- ``r1``: random weights with tokens and think block of DeepSeek-R1, in a real `treadle serve`, too. Its
  answers have sense only where a grammar makes it.
- ``thinker``: reasons and calls tools as Qwen3 does, says what a test wants, and shows what it was told.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.server.conftest import (
    KEY,
    Api,
    Told,
    clean_environment,
    free_port,
    scripted,
    server,
    telling,
    wait_ready,
)
from tests.server.scripted import byte_tokenizer
from treadle.bench.shapes import Shape
from treadle.bench.synth import write_synthetic

__all__ = ["scripted", "server"]

_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "Call with <tool_call>{}</tool_call>.<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if not loop.last or add_generation_prompt %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_MARKS = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<tool_call>", "</tool_call>"]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def call(name: str, **arguments: Any) -> str:
    """A call as the model ``thinker`` writes it."""
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


class Thinker(Told):
    """A served model that says what it is told to say."""

    name = "toy"

    @property
    def url(self) -> str:
        """Of the server."""
        return self.api.url


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("thinker"), _TEMPLATE, _MARKS)
    with telling(Thinker, tokenizer) as thinker:
        yield thinker


@pytest.fixture
def thinker(started: Thinker) -> Thinker:
    """As at the start, but for what the server has stored."""
    started.engine.requests.clear()
    started.engine.fail_after = None
    started.says("Hello")
    return started


@pytest.fixture(scope="session")
def r1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("r1")
    shape = Shape("tiny", "deepseek-r1-qwen", 2, 256, 512, 4, 2, 1024, 4096, 1e6, 1e-6, head_dim=64)
    write_synthetic(shape, "Q8_0", folder / "r1.gguf")
    port = free_port()
    command = [sys.executable, "-m", "treadle.cli", "serve", str(folder / "r1.gguf"), "--port", str(port)]
    with (folder / "log").open("wb") as log, Api(f"http://127.0.0.1:{port}", "r1") as api:
        environment = clean_environment(TREADLE_API_KEY=KEY)
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            wait_ready(api.url, process, folder / "log")
            yield api
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture
def smol(server: Api) -> Api:
    return server


@pytest.fixture
def openai_smol(smol: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=smol.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def openai_thinker(thinker: Thinker) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=thinker.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_smol(smol: Api) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=smol.url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_thinker(thinker: Thinker) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=thinker.url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def openai_r1(r1: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=r1.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_r1(r1: Api) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=r1.url, api_key=KEY, max_retries=0) as client:
        yield client
