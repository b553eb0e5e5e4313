"""Several models in one server: on demand, in place of others, in bounded time. Their engine processes are
real; what they need of memory is told."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.engine_model import LoadConfig
from tests.server.conftest import Api, StartModels
from tests.server.scripted import ByteAnswer, ByteText
from treadle import machine
from treadle.core import TreadleError
from treadle.engine.client import EngineClient
from treadle.server.models import ModelEngine, Plan, Residents
from treadle.server.service import Served

GB = 2**30


class AnyBytes(ByteAnswer):
    def push(self, token_ids: Sequence[int]) -> str:
        self.offsets += [0] * len(token_ids)
        return "x" * len(token_ids)


class AnyText(ByteText):
    """Every token is an x."""

    vocab_size = 1000

    def answer(self, *, stop: tuple[str, ...], **_: bool) -> ByteAnswer:
        return AnyBytes(stop)


class Garage:
    """Makes models that need some memory of ``total`` bytes."""

    def __init__(self, total: int, idle_unload: float = 0.0, patience: float = 30.0) -> None:
        self.total = total
        self.residents = Residents(idle_unload, lambda: self.total - sum(e.plan.least for e in self.inside()))
        self.engines: dict[str, ModelEngine] = {}
        self.patience = patience

    def inside(self) -> list[ModelEngine]:
        return [engine for engine in self.engines.values() if engine.resident]

    def model(self, name: str, need: int, **config: Any) -> Served:
        def start(room: int) -> EngineClient:
            assert room >= need
            return EngineClient("tests.engine.engine_model:load", LoadConfig(**config))

        plan = Plan(start=start, least=need, places=20, patience=self.patience)
        engine = self.engines[name] = ModelEngine(name, plan, self.residents)
        return Served(name=name, text=AnyText(), engine=engine, context=512)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setattr(machine, "resident_memory", lambda _pid: 4 * GB)


Serve = Callable[..., Api]


@pytest.fixture
def serve(scripted_models: StartModels) -> Iterator[Serve]:
    """``serve(garage, a=dict(need=…), …)`` starts the application and waits until start-up is over."""

    def start(
        garage: Garage, wait: bool = True, /, keep_alive: float = 10.0, **models: dict[str, Any]
    ) -> Api:
        async def load() -> list[Served]:
            served = [garage.model(name, **config) for name, config in models.items()]
            garage.residents.start()
            return served

        api = scripted_models(load, keep_alive=keep_alive)
        if wait:
            until(lambda: api.get("/health").json()["status"] != "loading")
        return api

    yield start


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def states(api: Api) -> dict[str, str]:
    return {model["id"]: model["state"] for model in api.get("/v1/models").json()["data"]}


def body(model: str, tokens: int = 3, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, **fields}


def ask(api: Api, model: str, tokens: int = 3) -> httpx.Response:
    return api.post("/v1/chat/completions", json=body(model, tokens))


def stream(api: Api, model: str, tokens: int = 3) -> list[str]:
    with api.stream("POST", "/v1/chat/completions", json=body(model, tokens, stream=True)) as answer:
        assert answer.status_code == 200
        return [line for line in answer.iter_lines() if line]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


FOUR = {"need": 4 * GB}


def test_on_demand_in_place_of_the_least_recently_used(serve: Serve) -> None:
    api = serve(Garage(10 * GB), a=FOUR, b=FOUR, c=FOUR)
    assert states(api) == {"a": "ready", "b": "ready", "c": "unloaded"}
    ready = api.get("/ready").json()
    assert ready["status"] == "ready" and len(ready["models"]) == 3
    assert ask(api, "nobody").status_code == 404
    assert api.get("/v1/models/nobody").status_code == 404
    assert states(api) == {"a": "ready", "b": "ready", "c": "unloaded"}
    assert ask(api, "b").json()["choices"][0]["message"]["content"] == "xxx"
    assert ask(api, "a").is_success
    assert ask(api, "c").json()["choices"][0]["message"]["content"] == "xxx"
    assert states(api) == {"a": "ready", "b": "unloaded", "c": "ready"}
    assert ask(api, "b").json()["model"] == "b"
    assert states(api) == {"a": "unloaded", "b": "ready", "c": "ready"}
    until(lambda: 'treadle_engine_requests_total{model="b"} 2.0' in api.get("/metrics").text)
    assert 'treadle_engine_loaded{model="a"} 0.0' in api.get("/metrics").text


def test_tokenizing_loads_nothing(serve: Serve) -> None:
    api = serve(Garage(5 * GB), a=FOUR, b=FOUR)
    assert api.post("/tokenize", json={"model": "b", "prompt": "hi"}).json()["count"] == 2
    answer = api.post("/tokenize", json={"prompt": "hi"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"
    assert states(api) == {"a": "ready", "b": "unloaded"}


def test_streams_that_wait_get_comments(serve: Serve) -> None:
    api = serve(Garage(5 * GB), keep_alive=0.1, a=FOUR, b={**FOUR, "seconds": 0.6})
    lines = stream(api, "b")
    assert lines[0].startswith("data: ") and lines[-1] == "data: [DONE]"
    assert ":" in lines[: next(i for i, line in enumerate(lines) if '"content":"x' in line)]


def test_many_requests_share_one_load(serve: Serve) -> None:
    api = serve(Garage(5 * GB), a=FOUR, b={**FOUR, "seconds": 0.5})
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(api, "b"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 8
    until(lambda: 'treadle_engine_requests_total{model="b"} 8.0' in api.get("/metrics").text)


def test_waiting_is_bounded(serve: Serve) -> None:
    api = serve(Garage(5 * GB, patience=0.5), a=FOUR, b={**FOUR, "seconds": 30.0})
    answer = ask(api, "b")
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["code"] == "model_loading" and "0.5 s" in answer.json()["error"]["message"]
    error = json.loads(stream(api, "b")[-1].removeprefix("data: "))["error"]
    assert error["code"] == "model_loading"
    many = [body("b", n=15), body("b", n=15)]
    answers: list[httpx.Response] = []

    def send(one: dict[str, Any]) -> None:
        answers.append(api.post("/v1/chat/completions", json=one))

    threads = [threading.Thread(target=send, args=(one,)) for one in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status_code for answer in answers) == [429, 503]


def test_a_model_that_never_fits_is_refused_in_numbers(serve: Serve) -> None:
    api = serve(Garage(10 * GB), a=FOUR, b={"need": 12 * GB})
    assert api.get("/health").json() == {"status": "failed"}
    error = api.get("/ready").json()["error"]
    assert "b needs at least 12.00 GiB" in error and "10.00 GiB are available" in error


def test_nothing_is_unloaded_for_what_would_not_fit(serve: Serve) -> None:
    garage = Garage(5 * GB)
    api = serve(garage, a=FOUR, b=FOUR)
    garage.total = 3 * GB  # somebody else has taken the rest
    answer = ask(api, "b")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_memory"
    assert "4.00 GiB" in answer.json()["error"]["message"] and int(answer.headers["retry-after"]) > 0
    assert states(api) == {"a": "ready", "b": "unloaded"}
    assert "4.00 GiB" in api.get("/ready").json()["models"][1]["error"]
    assert ask(api, "a").is_success
    garage.total = 5 * GB
    assert ask(api, "b").is_success
    assert api.get("/ready").json()["models"][1]["error"] is None


def test_answers_of_a_model_that_leaves_are_finished(serve: Serve) -> None:
    api = serve(Garage(5 * GB), a={**FOUR, "step_seconds": 0.02}, b=FOUR)
    lines: list[str] = []
    running = threading.Thread(target=lambda: lines.extend(stream(api, "a", 60)))
    running.start()
    until(lambda: 'treadle_engine_running{model="a"} 1.0' in api.get("/metrics").text)
    assert ask(api, "b").is_success
    running.join()
    assert lines[-1] == "data: [DONE]" and sum('"content":"x' in line for line in lines) > 1
    assert states(api) == {"a": "unloaded", "b": "ready"}


def test_models_that_are_asked_for_in_turn_all_answer(serve: Serve) -> None:
    api = serve(Garage(5 * GB), a=FOUR, b=FOUR)
    answers: list[int] = []

    def work(model: str) -> None:
        answers.extend(ask(api, model).status_code for _ in range(3))

    threads = [threading.Thread(target=work, args=(model,)) for model in "abab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 12


def test_nothing_is_unloaded_for_clients_that_have_left(serve: Serve) -> None:
    api = serve(Garage(5 * GB), a={**FOUR, "step_seconds": 0.05}, b=FOUR)
    running = threading.Thread(target=lambda: stream(api, "a", 40))
    running.start()
    until(lambda: 'treadle_engine_running{model="a"} 1.0' in api.get("/metrics").text)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(api.url + "/v1/chat/completions", json=body("b"), headers=api.headers, timeout=0.3)
    running.join()
    time.sleep(0.2)
    assert states(api) == {"a": "ready", "b": "unloaded"}
    assert ask(api, "a").is_success


def test_loading_that_fails_is_tried_again(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "model"
    api = serve(Garage(5 * GB), a=FOUR, b={**FOUR, "file": str(file)})
    answer = ask(api, "b")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_failed"
    models = api.get("/ready").json()["models"]
    assert models[1]["state"] == "unloaded" and str(file) in models[1]["error"]
    file.touch()
    assert ask(api, "b").is_success


def test_idle_models_give_their_memory_back(serve: Serve) -> None:
    garage = Garage(10 * GB, idle_unload=0.5)
    api = serve(garage, a={**FOUR, "step_seconds": 0.05}, b=FOUR)
    pids = [engine._client.pid for engine in garage.inside() if engine._client is not None]
    assert len(pids) == 2 and all(alive(pid) for pid in pids if pid)
    assert ask(api, "a", 30).is_success  # takes longer than that
    assert states(api)["a"] == "ready"
    until(lambda: set(states(api).values()) == {"unloaded"})
    until(lambda: not any(alive(pid) for pid in pids if pid))
    assert api.get("/health").json() == {"status": "ready"}
    assert ask(api, "b").json()["choices"][0]["message"]["content"] == "xxx"
    until(lambda: 'treadle_engine_requests_total{model="b"} 1.0' in api.get("/metrics").text)


def test_models_answer_as_soon_as_they_are_there(serve: Serve) -> None:
    api = serve(Garage(10 * GB), False, a=FOUR, b={**FOUR, "seconds": 1.5})
    until(lambda: ask(api, "a").is_success)
    assert api.get("/health").json() == {"status": "loading"}
    answer = ask(api, "b")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_loading"
    until(lambda: api.get("/health").is_success)
    assert ask(api, "b").is_success


def test_one_model_that_restarts_leaves_the_others_ready(serve: Serve) -> None:
    garage = Garage(10 * GB)
    api = serve(garage, a=FOUR, b={**FOUR, "seconds": 0.3})
    client = garage.engines["b"]._client
    assert client is not None and client.pid is not None
    os.kill(client.pid, 9)
    until(lambda: states(api)["b"] != "ready")
    assert states(api) == {"a": "ready", "b": "restarting"}
    assert api.get("/health").json() == {"status": "ready"}
    assert ask(api, "b").status_code == 503 and ask(api, "a").is_success
    until(lambda: ask(api, "b").is_success)


def test_stopping_ends_what_waits() -> None:
    async def test() -> None:
        garage = Garage(5 * GB)
        served = [garage.model("a", 4 * GB), garage.model("b", 4 * GB, seconds=30.0)]
        garage.residents.start()
        await garage.engines["a"].ready()
        from tests.engine.engine_model import request

        stream = garage.engines["b"].submit_all([request("r", [1, 2])])[0]
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.2)
        for one in served:
            await one.engine.close()
        with pytest.raises(Exception, match="stopping"):
            await waiting
        assert not garage.inside() or all(e.state == "stopped" for e in garage.inside())

    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (("x=smollm2:135m", "y=smollm2:135m"), [("x", ("smollm2:135m",)), ("y", ())]),
        ((), [("smollm2-135m-instruct", ("smollm2:135m",))]),
    ],
)
def test_names(models: tuple[str, ...], names: list[tuple[str, tuple[str, ...]]]) -> None:
    from treadle.cli.load import find_all

    assert [(name, aliases) for name, _, aliases in find_all(models)] == names


def test_equal_names_are_refused(tmp_path: Path) -> None:
    from treadle.cli.load import find_all, split_name

    (tmp_path / "q").mkdir()
    files = [tmp_path / "m-Q4_0.gguf", tmp_path / "q" / "m-Q8_0.gguf"]
    for file in files:
        file.touch()
    with pytest.raises(TreadleError, match=r"two models have the name m: .*OTHER="):
        find_all(tuple(map(str, files)))
    odd = tmp_path / "a=b.gguf"
    odd.touch()
    assert split_name(str(odd)) == (None, str(odd))
    assert split_name(f"n={odd}") == ("n", str(odd))
    hub = "hf:o/r/f.gguf#sha256=" + "0" * 64
    assert split_name(hub) == (None, hub) and split_name("n=" + hub) == ("n", hub)
