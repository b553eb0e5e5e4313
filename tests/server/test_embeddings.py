"""Embeddings through the openai client, against the hidden states of transformers."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.models import tiny
from tests.server.conftest import KEY, Api, running
from treadle.cli.load import load_models
from treadle.config import Config
from treadle.core import TreadleError
from treadle.engine.load import LoadConfig, load_engine, outline
from treadle.llm import LLM

CONTEXT = 256
TEXT = "Where do cats sleep?"
EOS = tiny.VOCAB - 1


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.make("qwen3")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Path:
    path = tmp_path_factory.mktemp("embedding") / "tiny.gguf"
    tiny.write(path, model, "qwen3", metadata={"pooling_type": 3}, tokenizer=True)
    return path


@pytest.fixture(scope="module")
def api(file: Path, tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Iterator[Api]:
    generates = tmp_path_factory.mktemp("generates") / "tiny.gguf"
    tiny.write(generates, model, "qwen3", tokenizer=True)
    config = Config(model=(f"emb={file}", f"gen={generates}"), context=CONTEXT, api_key=(KEY,), max_queue=4)
    with running(config, lambda: load_models(config)) as api:
        while api.get("/health").json()["status"] == "loading":
            pass
        assert api.get("/ready").json()["error"] is None
        yield api


@pytest.fixture(scope="module")
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=api.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


def expected(model: PreTrainedModel, ids: list[int], dimensions: int | None = None) -> NDArray[np.float32]:
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1].float().numpy()
    vector: NDArray[np.float32] = hidden[:dimensions] / np.linalg.norm(hidden[:dimensions])
    return vector


def ids_of(text: str) -> list[int]:
    return [*tiny.byte_ids(text), EOS]


def post(api: Api, **body: Any) -> httpx.Response:
    return api.post("/v1/embeddings", json={"model": "emb", **body})


def test_equals_the_last_hidden_state(client: openai.OpenAI, model: PreTrainedModel) -> None:
    texts = [TEXT, "x", "die Katze schläft 猫", "long " * 40]
    answer = client.embeddings.create(model="emb", input=texts)
    assert [item.index for item in answer.data] == [0, 1, 2, 3]
    for item, text in zip(answer.data, texts, strict=True):
        np.testing.assert_allclose(item.embedding, expected(model, ids_of(text)), atol=2e-3)
        assert np.linalg.norm(item.embedding) == pytest.approx(1.0, abs=1e-5)
    count = sum(len(ids_of(text)) for text in texts)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    assert answer.model == "emb"


def test_every_form_of_input_gives_the_same(client: openai.OpenAI) -> None:
    ids = ids_of(TEXT)
    forms: list[Any] = [TEXT, [TEXT], ids, [ids], [TEXT, "other"], [ids, [1, 2, 3]]]
    found = [client.embeddings.create(model="emb", input=form).data[0].embedding for form in forms]
    assert all(np.array_equal(vector, found[0]) for vector in found[1:])


def test_numbers_and_base64_are_the_same(client: openai.OpenAI, api: Api) -> None:
    numbers = client.embeddings.create(model="emb", input=TEXT, encoding_format="float").data[0].embedding
    coded = post(api, input=TEXT, encoding_format="base64").json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == pytest.approx(numbers, abs=1e-7)
    assert client.embeddings.create(model="emb", input=TEXT).data[0].embedding == pytest.approx(numbers)


@pytest.mark.parametrize("dimensions", [1, 32, 96])
def test_dimensions(client: openai.OpenAI, model: PreTrainedModel, dimensions: int) -> None:
    answer = client.embeddings.create(model="emb", input=TEXT, dimensions=dimensions)
    vector = answer.data[0].embedding
    assert len(vector) == dimensions and np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_allclose(vector, expected(model, ids_of(TEXT), dimensions), atol=4e-3)


def test_more_inputs_than_the_engine_takes_at_once(api: Api, model: PreTrainedModel) -> None:
    inputs = [[1 + i % 200, 2 + i // 200, 7] for i in range(500)]
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(post(api, input=inputs))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in answers:
        data = answer.json()["data"]
        assert [item["index"] for item in data] == list(range(500))
        for i in (0, 99, 499):
            np.testing.assert_allclose(data[i]["embedding"], expected(model, inputs[i]), atol=2e-3)
        assert answer.json()["usage"] == {"prompt_tokens": 1500, "total_tokens": 1500}


def test_the_whole_context_may_be_used(api: Api, model: PreTrainedModel) -> None:
    ids = [int(i) for i in np.random.default_rng(3).integers(0, 256, CONTEXT)]
    vector = post(api, input=ids).json()["data"][0]["embedding"]
    np.testing.assert_allclose(vector, expected(model, ids), atol=2e-3)
    again = post(api, input=ids)
    assert np.array_equal(again.json()["data"][0]["embedding"], vector)  # read from the prefix cache
    answer = post(api, input=[*ids, 1])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "257 tokens" in answer.json()["error"]["message"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", ""]}, "input"),
    ({"input": ["a", [1]]}, "input"),
    ({"input": [1, "a"]}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": [tiny.VOCAB]}, "input"),
    ({"input": [-1]}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 97}, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "stream": True}, "stream"),
    ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_wrong_bodies_name_the_field(api: Api, body: dict[str, Any], param: str) -> None:
    answer = post(api, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert post(api, input="a").is_success


def test_models_are_asked_for_what_they_do(api: Api, client: openai.OpenAI) -> None:
    cards = {card["id"]: card for card in api.get("/v1/models").json()["data"]}
    assert {name: card["task"] for name, card in cards.items()} == {"emb": "embed", "gen": "generate"}
    with pytest.raises(openai.BadRequestError, match="gen generates text") as refused:
        client.embeddings.create(model="gen", input="a")
    assert (refused.value.param, refused.value.code) == ("model", "unsupported_model")
    with pytest.raises(openai.BadRequestError, match=r"emb makes embeddings.*/v1/embeddings"):
        client.completions.create(model="emb", prompt="a")
    with pytest.raises(openai.BadRequestError, match="emb makes embeddings"):
        client.chat.completions.create(model="emb", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")
    assert client.completions.create(model="gen", prompt="a", max_tokens=2).choices[0].finish_reason
    assert api.post("/tokenize", json={"model": "emb", "prompt": "ab"}).json()["count"] == 2


def test_a_client_that_leaves_frees_the_engine(api: Api) -> None:
    inputs = [[1 + i % 200] * 200 for i in range(2000)]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            api.url + "/v1/embeddings",
            json={"model": "emb", "input": inputs, "cache_salt": "gone"},
            headers=api.headers,
            timeout=httpx.Timeout(20, read=0.7),
        )
    for _ in range(100):
        if 'treadle_engine_running{model="emb"} 0.0' in api.get("/metrics").text:
            break
    text = api.get("/metrics").text
    assert 'treadle_engine_running{model="emb"} 0.0' in text
    assert 'treadle_engine_kv_blocks_held{model="emb"} 0.0' in text
    assert post(api, input="a").is_success


def test_streams_of_another_model_go_on(api: Api) -> None:
    """Case J08."""
    inputs = [[1 + i % 200] * 200 for i in range(2000)]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, api, input=inputs, cache_salt="long")
        body = {"model": "gen", "prompt": "a", "max_tokens": 16, "ignore_eos": True, "stream": True}
        with Api(api.url, "gen") as other:
            for _ in range(3):
                assert other.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        assert not asked.done()
        assert len(asked.result(60).json()["data"]) == 2000


def test_the_output_matrix_is_not_loaded(file: Path, tmp_path: Path, model: PreTrainedModel) -> None:
    generates = tmp_path / "generates.gguf"
    tiny.write(generates, model, "qwen3", tokenizer=True)

    def weights(path: Path) -> int:
        return load_engine(LoadConfig(path=str(path), context=64), lambda _: None).info.weight_bytes

    assert weights(file) < weights(generates) - tiny.VOCAB * model.config.hidden_size


@pytest.mark.parametrize(
    ("pooling", "name"), [(1, "mean"), (2, "first token"), (4, "reranker"), (9, "unknown")]
)
def test_other_pooling_is_refused(tmp_path: Path, model: PreTrainedModel, pooling: int, name: str) -> None:
    path = tmp_path / "tiny.gguf"
    tiny.write(path, model, "qwen3", metadata={"pooling_type": pooling}, tokenizer=True)
    with pytest.raises(TreadleError, match=f"pooling_type is {pooling} .*{name}"):
        outline(LoadConfig(path=str(path)))


def test_the_python_interface_refuses_it(file: Path) -> None:
    with pytest.raises(TreadleError, match="makes embeddings"):
        LLM(file, context=64)
