"""Every number of ``/metrics`` against what a client of the real server has seen itself."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import Api, clean_environment, free_port, wait_ready

KV_BLOCKS = 34  # of 32 tokens, in 24 MiB: one context of 1024 tokens and a little


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """``treadle serve`` on the built-in model, with hardly any KV memory, for these tests alone."""
    port, log = free_port(), tmp_path_factory.mktemp("metrics") / "log"
    command = [sys.executable, "-m", "treadle.cli", "serve", "m=smollm2:135m", "--port", str(port)]
    command += ["--context", "1024", "--kv-memory", "24M"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=clean_environment())
    try:
        wait_ready(f"http://127.0.0.1:{port}", process, log)
        with Api(f"http://127.0.0.1:{port}", "m", key=None) as client:
            yield client
    finally:
        process.terminate()
        process.wait(40)


class Numbers(dict[str, float]):
    """Series by name, summed over their labels but ``kind``; as in ``treadle_tokens_total.prompt``."""

    def since(self, before: Numbers) -> Numbers:
        return Numbers({name: value - before.get(name, 0) for name, value in self.items()})

    def engine(self, name: str) -> float:
        return self[f"treadle_engine_{name}"]


def read(api: Api) -> Numbers:
    numbers = Numbers()
    for family in text_string_to_metric_families(api.get("/metrics").text):
        for sample in family.samples:
            name = ".".join([sample.name, *(v for k, v in sample.labels.items() if k in ("kind", "status"))])
            numbers[name] = numbers.get(name, 0) + sample.value
    return numbers


def at_rest(api: Api) -> Numbers:
    """The numbers once the engine has sent its last ones."""
    end = time.monotonic() + 20
    while (now := read(api)).engine("running") or now.engine("kv_blocks_held"):
        assert time.monotonic() < end
        time.sleep(0.05)
    return now


def complete(api: Api, prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = api.post("/v1/completions", json={**body, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_requests_tokens_and_times(api: Api) -> None:
    before = at_rest(api)
    start = time.perf_counter()
    text = "The weaver looks at the cloth and counts the threads, one after the other. " * 8
    usages = [complete(api, text, tokens)["usage"] for tokens in (1, 5, 30)]
    wall = time.perf_counter() - start
    assert api.post("/v1/completions", json={"model": "m", "prompt": ""}).status_code == 400
    found = at_rest(api).since(before)
    assert found["treadle_http_requests_total.400"] == 1
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached > 0, "the second and the third find the prompt of the first"
    assert found["treadle_tokens_total.prompt"] == found.engine("prompt_tokens_total") == prompt
    assert found["treadle_tokens_total.cached"] == found.engine("cached_tokens_total") == cached
    assert found["treadle_tokens_total.completion"] == found.engine("output_tokens_total") == 36
    assert found.engine("requests_total") == 3
    assert found["treadle_ttft_seconds_count"] == found["treadle_e2e_seconds_count"] == 3
    assert 0 < found["treadle_itl_seconds_count"] <= 36 - 3  # outputs may carry several tokens
    between = found["treadle_ttft_seconds_sum"] + found["treadle_itl_seconds_sum"]
    assert between <= found["treadle_e2e_seconds_sum"] <= wall
    assert found["treadle_e2e_seconds_sum"] == pytest.approx(wall, rel=0.5)
    assert found.engine("step_seconds_total") <= wall


def test_choices_have_times_of_their_own(api: Api) -> None:
    before = at_rest(api)
    body = {"model": "m", "prompt": "A list of words:", "max_tokens": 20, "n": 4, "ignore_eos": True}
    assert api.post("/v1/completions", json={**body, "temperature": 1}).status_code == 200
    found = at_rest(api).since(before)
    assert found["treadle_ttft_seconds_count"] == 4
    # Four choices share each step; were their outputs one sequence, these would add up to the time of one.
    assert found["treadle_itl_seconds_sum"] > 2 * found["treadle_e2e_seconds_sum"]


def test_steps_and_guesses_add_up(api: Api) -> None:
    before = at_rest(api)
    usage = complete(api, "one two three four " * 12 + "one two", 100)["usage"]
    found = at_rest(api).since(before)
    assert found.engine("accepted_tokens_total") > 20, "this text repeats itself"
    assert found.engine("drafted_tokens_total") >= found.engine("accepted_tokens_total")
    # One step reads the prompt and gives a token, each of the others gives one and those that were guessed.
    assert found.engine("steps_total") + found.engine("accepted_tokens_total") == 100
    computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    decodes = found.engine("steps_total") - 1
    assert found.engine("step_tokens_total") == computed + decodes + found.engine("drafted_tokens_total")


def test_reading(api: Api) -> None:
    before = at_rest(api)
    complete(api, "Hello", 40)
    now = at_rest(api)
    found = now.since(before)
    per_step = found.engine("read_bytes_total") / found.engine("steps_total")
    assert 90e6 < per_step < 115e6, "each step reads the 98 MB of weights and a little KV"
    rate = now.engine("read_bytes_per_second")
    assert rate > 0 and now.engine("read_limit_bytes_per_second") > 1e8
    assert now.engine("read_share") == pytest.approx(rate / now.engine("read_limit_bytes_per_second"))


def test_kv_in_use(api: Api) -> None:
    assert at_rest(api).engine("kv_blocks") == KV_BLOCKS
    body = {"model": "m", "prompt": "word " * 500, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with api.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
        time.sleep(0.6)  # numbers of the engine may be a quarter of a second old
        now = read(api)
    assert now.engine("running") == now["treadle_requests_running"] == 1
    assert 500 / 32 <= now.engine("kv_blocks_held") <= (501 + 400) / 32 + 1
    left = at_rest(api)
    assert left.engine("kv_blocks_held") == 0 and left.engine("kv_blocks_cached") >= 500 // 32


def test_preemptions_change_no_answer(api: Api) -> None:
    prompts = [f"Story number {i}: once upon a time" for i in range(8)]
    before = at_rest(api)
    alone = complete(api, prompts[3], 150)["choices"][0]["text"]
    assert at_rest(api).since(before).engine("preemptions_total") == 0
    with ThreadPoolExecutor(len(prompts)) as pool:  # 8 times 160 tokens are more than there are blocks for
        answers = list(pool.map(lambda prompt: complete(api, prompt, 150), prompts))
    found = at_rest(api).since(before)
    assert found.engine("preemptions_total") > 0
    assert answers[3]["choices"][0]["text"] == alone
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {150}
    assert json.dumps(answers).count('"length"') == len(prompts)
