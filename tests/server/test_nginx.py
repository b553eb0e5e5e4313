"""Behind a real nginx. Cases B08 (the proxy buffers the stream) and B09 (no bytes for a long time)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import KEY, Api, Start, free_port
from tests.server.scripted import ScriptedEngine
from treadle.core import Output

BODY: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "stream": True}
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") or "nginx"
READ_TIMEOUT = 1.0  # seconds of silence after which nginx gives up; its own default is 60

Proxy = Callable[[str, str], str]


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[Proxy]:
    """``nginx(upstream, location)``: URL of a proxy that has ``location`` as the only block of its server."""
    started = []

    def start(upstream: str, location: str) -> str:
        port = free_port()
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        folders = " ".join(f"{kind}_temp_path {tmp_path / kind};" for kind in kinds)
        config = tmp_path / "nginx.conf"
        config.write_text(
            f"daemon off; pid {tmp_path / 'pid'}; error_log {tmp_path / 'error'}; events {{}}\n"
            f"http {{ access_log off; {folders} gzip on; gzip_types *;\n"
            f"  proxy_read_timeout {READ_TIMEOUT:g}s;\n"
            f"  server {{ listen 127.0.0.1:{port}; {location.replace('UPSTREAM', upstream)} }}\n}}\n"
        )
        started.append(subprocess.Popen([NGINX, "-c", str(config)], stderr=subprocess.PIPE))
        url = f"http://127.0.0.1:{port}"
        for _ in range(100):
            try:
                httpx.get(url)
                return url
            except httpx.TransportError:
                assert started[-1].poll() is None, started[-1].communicate()[1]
                time.sleep(0.05)
        raise AssertionError("nginx did not start")

    yield start
    for process in started:
        process.terminate()
        process.wait(10)


class Patient(ScriptedEngine):
    """Goes on after its first token only when the reader has seen it."""

    def __init__(self) -> None:
        super().__init__("Hello")
        self.seen = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop

    async def submit(self, request: Any) -> AsyncIterator[Output]:
        self.loop = asyncio.get_running_loop()
        async for output in super().submit(request):
            yield output
            await self.seen.wait()


STOCK = "location / { proxy_pass UPSTREAM; }"
LATER = "location / { proxy_pass UPSTREAM; proxy_http_version 1.1; }"


@pytest.mark.parametrize("location", [STOCK, LATER], ids=["stock", "http-1.1"])
def test_every_token_passes_the_proxy_before_the_next(scripted: Start, nginx: Proxy, location: str) -> None:
    engine = Patient()
    url = nginx(scripted(engine).url, location)
    with openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0, timeout=10) as client:
        text = ""
        for chunk in client.chat.completions.create(**BODY):
            text += chunk.choices[0].delta.content or ""
            if text:
                engine.loop.call_soon_threadsafe(engine.seen.set)
    assert text == "Hello"


def test_comments_keep_a_silent_stream_open(scripted: Start, nginx: Proxy) -> None:
    def through(keep_alive: float) -> httpx.Response:
        api = scripted(ScriptedEngine(first=2.5 * READ_TIMEOUT), keep_alive=keep_alive)
        url = nginx(api.url, STOCK)
        return httpx.post(url + "/v1/chat/completions", json=BODY, headers={"x-api-key": KEY}, timeout=20)

    text = through(READ_TIMEOUT / 4).text
    assert text.endswith("data: [DONE]\n\n")
    assert ":\n\n" in text
    with pytest.raises(httpx.RemoteProtocolError):
        through(0)  # the proxy really cuts silent streams


@pytest.mark.parametrize("rest", ["", "/"], ids=["prefix kept", "prefix removed"])
def test_served_under_a_path(scripted: Start, nginx: Proxy, rest: str) -> None:
    api: Api = scripted(root_path="/llm")
    url = nginx(api.url, f"location /llm/ {{ proxy_pass UPSTREAM{rest}; }}")
    with openai.OpenAI(base_url=url + "/llm/v1", api_key=KEY, max_retries=0, timeout=10) as client:
        assert client.models.list().data[0].id == "toy"
        done = client.chat.completions.create(model="toy", messages=BODY["messages"])
        assert done.choices[0].message.content == "Hello"
    wrong = httpx.get(url + "/llm/v1/models", headers={"x-api-key": "sk-wrong"})
    assert wrong.status_code == 401
    assert json.loads(wrong.text)["error"]["message"]
