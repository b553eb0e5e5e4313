"""The server as a process: it listens before the model is there, and stops without cutting answers."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.server.conftest import clean_environment, free_port

PROGRAM = """
import asyncio, signal, sys
from tests.server.scripted import ByteText, ScriptedEngine
from treadle.cli.serve import ask, first_steps
from treadle.config import Config
from treadle.server.run import run
from treadle.server.service import Served

async def load():
    await asyncio.sleep(float(sys.argv[2]))
    engine = ScriptedEngine("x" * int(sys.argv[4]), delay=0.05)
    return [Served(name="toy", text=ByteText(), engine=engine, context=256)]

async def on_loaded(service, local, url):
    await asyncio.to_thread(ask, local, "toy", "k")
    print(first_steps(url, "toy", True), flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a script inherit "ignore"
run(Config(host=sys.argv[3], port=int(sys.argv[1]), api_key=("k",)), load, "1", on_loaded)
"""


class Process:
    def __init__(self, stack: ExitStack, loading: float, host: str = "127.0.0.1", tokens: int = 20) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(port), str(loading), host, str(tokens)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(PYTHONPATH="."),
        )
        stack.callback(self.process.kill)
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError("did not listen: " + self.process.communicate()[1])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_listens_while_loading(stack: ExitStack) -> None:
    server = Process(stack, loading=60)
    answer = httpx.get(server.url + "/health", timeout=20)
    assert answer.status_code == 503
    assert answer.json() == {"status": "loading"}
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    assert server.process.stderr is not None and server.process.stderr.read() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_lets_running_answers_finish(stack: ExitStack, number: signal.Signals) -> None:
    server = Process(stack, loading=0)
    assert server.process.stdout is not None
    first = server.process.stdout.readline()
    assert first.strip() == "x" * 20
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    headers = {"x-api-key": "k"}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(number)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    out = server.process.stdout.read()
    assert "curl " + server.url in out
    assert server.process.wait(10) == 0
    assert server.process.stderr is not None and server.process.stderr.read() == ""


def test_second_interrupt_does_not_wait(stack: ExitStack) -> None:
    server = Process(stack, loading=0, tokens=200)
    assert server.process.stdout is not None
    server.process.stdout.readline()
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    headers = {"x-api-key": "k"}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, headers=headers) as answer:
        next(answer.iter_lines())
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(httpx.TransportError):  # the first one is heard: no new connections
            for _ in range(100):
                httpx.get(server.url + "/health")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) != 0


def test_hints_on_all_interfaces_name_this_host(stack: ExitStack) -> None:
    server = Process(stack, loading=0, host="0.0.0.0")
    assert server.process.stdout is not None
    assert server.process.stdout.readline().strip() == "x" * 20
    server.process.send_signal(signal.SIGTERM)
    out = server.process.stdout.read()
    assert f"http://{socket.gethostname()}:{server.url.rpartition(':')[2]}/v1" in out
    assert "0.0.0.0" not in out
    assert "Bearer YOUR_KEY" in out and "TREADLE_API_KEY" not in out
