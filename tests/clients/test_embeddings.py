"""Embeddings through LangChain and the asynchronous openai client, against transformers. What the API answers
in detail is in ``tests/server/test_embeddings.py``."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import numpy as np
import openai
import pydantic
import pytest
import torch
from langchain_openai import OpenAIEmbeddings
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.models import tiny
from tests.server.conftest import KEY, Api, running
from treadle.cli.load import load_models
from treadle.config import Config

TEXTS = ["The cat sleeps on the sofa.", "Zinseszins, 北京 und 😸", "x", "a b " * 60]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.make("qwen3")


@pytest.fixture(scope="module")
def api(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    file = tmp_path_factory.mktemp("embeddings") / "tiny.gguf"
    tiny.write(file, model, "qwen3", metadata={"pooling_type": 3}, tokenizer=True)
    config = Config(model=(f"emb={file}",), context=512, api_key=(KEY,))
    with running(config, lambda: load_models(config)) as api:
        while api.get("/health").json()["status"] == "loading":
            pass
        yield api


def expected(model: PreTrainedModel, text: str, dimensions: int | None = None) -> NDArray[np.float32]:
    ids = torch.tensor([[*tiny.byte_ids(text), tiny.VOCAB - 1]])
    with torch.no_grad():
        last = model.model(ids).last_hidden_state[0, -1].float().numpy()[:dimensions]
    vector: NDArray[np.float32] = last / np.linalg.norm(last)
    return vector


def langchain(api: Api, dimensions: int | None = None) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(
        base_url=api.url + "/v1",
        api_key=pydantic.SecretStr(KEY),
        model="emb",
        dimensions=dimensions,
        check_embedding_ctx_length=False,
        max_retries=0,
    )


@pytest.mark.parametrize("dimensions", [None, 16])
def test_langchain(api: Api, model: PreTrainedModel, dimensions: int | None) -> None:
    embeddings = langchain(api, dimensions)
    found = embeddings.embed_documents(TEXTS)
    for vector, text in zip(found, TEXTS, strict=True):
        np.testing.assert_allclose(vector, expected(model, text, dimensions), atol=4e-3)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[1]), found[1], atol=1e-6)


def test_langchain_is_told_what_is_wrong(api: Api) -> None:
    with pytest.raises(openai.BadRequestError, match="dimensions: the model emb makes 96; got 97") as refused:
        langchain(api, 97).embed_query("x")
    assert (refused.value.param, refused.value.code) == ("dimensions", "invalid_value")
    with pytest.raises(openai.BadRequestError, match="number 1 is empty"):
        langchain(api).embed_documents(["a", ""])
    assert len(langchain(api).embed_query("x")) == 96


def test_many_at_once(api: Api, model: PreTrainedModel) -> None:
    def counted() -> float:
        found = re.search(r'treadle_tokens_total\{kind="prompt"\} (\S+)', api.get("/metrics").text)
        return float(found[1]) if found else 0.0

    async def ask() -> list[openai.types.CreateEmbeddingResponse]:
        async with openai.AsyncOpenAI(base_url=api.url + "/v1", api_key=KEY, max_retries=0) as client:
            calls = (
                client.embeddings.create(model="emb", input=[f"{i} {text}" for text in TEXTS])
                for i in range(12)
            )
            return await asyncio.gather(*calls)

    before = counted()
    answers = asyncio.run(ask())
    for i, answer in enumerate(answers):
        for item, text in zip(answer.data, TEXTS, strict=True):
            np.testing.assert_allclose(item.embedding, expected(model, f"{i} {text}"), atol=2e-3)
    assert counted() - before == sum(answer.usage.prompt_tokens for answer in answers)
