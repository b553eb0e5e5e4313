"""Two kinds of servers. ``server``: the real program on the default model. ``scripted``: the application in a
thread of the test, with a scripted engine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
import uvicorn

from tests.server.scripted import ByteText, ScriptedEngine
from treadle.config import Config
from treadle.server.app import create_app
from treadle.server.service import Load, Served
from treadle.server.text import ModelText
from treadle.text.tokenizer import Tokenizer

KEY = "sk-test"


class Api(httpx.Client):
    """An HTTP client of one server, with its key."""

    def __init__(self, url: str, model: str, key: str | None = KEY) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        super().__init__(base_url=url, headers=headers, timeout=60)
        self.model = model
        self.url = url


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def clean_environment(**extra: str) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if not k.startswith("TREADLE_")}, **extra}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """``treadle serve`` on the built-in model with a context of 2048 tokens."""
    url = f"http://127.0.0.1:{free_port()}"
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [
        sys.executable,
        "-m",
        "treadle.cli",
        "serve",
        "--port",
        url.rpartition(":")[2],
        "--context",
        "2048",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=clean_environment(TREADLE_API_KEY=KEY)
        )
    try:
        wait_ready(url, process, log)
        with httpx.Client(headers={"x-api-key": KEY}) as probe:
            name = probe.get(url + "/v1/models").json()["data"][0]["id"]
        with Api(url, name) as api:
            yield api
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(1200):
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url + "/health").is_success:
                return
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError("the server did not become ready: " + log.read_text())


@pytest.fixture(scope="session")
def client(server: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


Start = Callable[..., Api]


@pytest.fixture
def scripted() -> Iterator[Start]:
    """``scripted(engine, text=…, load=…, **settings)`` starts the application and returns its client."""
    with contextlib.ExitStack() as stack:

        def start(
            engine: ScriptedEngine | None = None,
            *,
            text: ByteText | None = None,
            load: Callable[[], Awaitable[Served]] | None = None,
            **settings: Any,
        ) -> Api:
            served = Served(
                name="toy",
                text=text or ByteText(),
                engine=engine or ScriptedEngine(),
                context=256,
                aliases=("t:1",),
            )

            async def models() -> list[Served]:
                return [await load() if load else served]

            config = dataclasses.replace(Config(api_key=(KEY,)), **settings)
            return stack.enter_context(running(config, models))

        yield start


StartModels = Callable[..., Api]


@pytest.fixture
def scripted_models() -> Iterator[StartModels]:
    """``scripted_models(load, **settings)`` starts the application with all models that ``load`` returns."""
    with contextlib.ExitStack() as stack:

        def start(load: Load, **settings: Any) -> Api:
            return stack.enter_context(running(dataclasses.replace(Config(api_key=(KEY,)), **settings), load))

        yield start


@contextlib.contextmanager
def running(config: Config, load: Load) -> Iterator[Api]:
    app = create_app(config, load, "1.2.3")
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, http="httptools", log_config=None, timeout_graceful_shutdown=3)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with Api(
            f"http://127.0.0.1:{listener.getsockname()[1]}", "toy", next(iter(config.api_key), None)
        ) as api:
            for _ in range(100):
                if server.started:
                    break
                time.sleep(0.02)
            yield api
    finally:
        server.should_exit = True
        thread.join()


class Told:
    """A served model, ``toy``, that says what it is told to say."""

    def __init__(self, api: Api, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
        self.api = api
        self.engine = engine
        self.tokenizer = tokenizer

    def says(self, text: str) -> int:
        """What it answers from now on; in how many tokens."""
        self.engine.token_ids = self.tokenizer.encode(text, specials=True)
        return len(self.engine.token_ids)

    @property
    def prompt(self) -> str:
        """The last prompt, control tokens included."""
        return self.tokenizer.decode(self.engine.requests[-1].prompt_ids, skip_specials=False)


AnyTold = TypeVar("AnyTold", bound=Told)


@contextlib.contextmanager
def telling(kind: type[AnyTold], tokenizer: Tokenizer) -> Iterator[AnyTold]:
    """The application with such a model."""
    engine = ScriptedEngine()

    async def load() -> list[Served]:
        return [Served(name="toy", text=ModelText(tokenizer), engine=engine, context=4096)]

    with running(Config(api_key=(KEY,)), load) as api:
        while api.get("/health").status_code == 503:
            pass
        yield kind(api, engine, tokenizer)
