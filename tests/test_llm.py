"""The Python interface on the built-in model, SmolLM2-135M-Instruct."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from treadle import LLM, SamplingParams, hub
from treadle.core import TreadleError
from treadle.text.tokenizer import Tokenizer
from treadle.weights.gguf import open_gguf

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = ["The capital of France is", "One, two, three,", "Once upon a time"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(context=1024) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompt_ids() -> list[list[int]]:
    tokenizer = Tokenizer.from_gguf(open_gguf(Path(hub.resolve())).metadata)
    return [tokenizer.encode(prompt, add_bos=True) for prompt in PROMPTS]


def test_answers_a_question(llm: LLM) -> None:
    answer = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=64))
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert answer.usage.completion_tokens == len(answer.token_ids)
    assert 0 < answer.timing.prefill_s <= answer.timing.ttft
    assert answer.timing.decode_s > 0


def test_streams_the_same_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=64)
    pieces = list(llm.chat(QUESTION, params, stream=True))
    assert len(pieces) > 3
    assert "".join(pieces) == llm.chat(QUESTION, params).text


def test_answers_streamed_at_once_do_not_mix(llm: LLM) -> None:
    other = [{"role": "user", "content": "Count to five."}]
    alone = [llm.chat(messages, GREEDY).text for messages in (QUESTION, other)]
    first, second = (llm.chat(messages, GREEDY, stream=True) for messages in (QUESTION, other))
    start = next(first)
    assert llm.generate(PROMPTS, GREEDY)[0].finish_reason == "length"
    assert ["".join(second), start + "".join(first)] == alone[::-1]


def test_a_stream_that_is_dropped_leaves_room_for_others(llm: LLM) -> None:
    stream = llm.chat(QUESTION, SamplingParams(temperature=0), stream=True)
    next(stream)
    del stream
    assert llm.logits([1, 2, 3]).shape[0] == 3


def test_texts_and_ids_give_the_same_as_one_batch(llm: LLM, prompt_ids: list[list[int]]) -> None:
    results = llm.generate(PROMPTS, GREEDY)
    assert "Paris" in results[0].text
    assert "four" in results[1].text
    for result, ids in zip(results, prompt_ids, strict=True):
        assert result.finish_reason == "length"
        assert len(result.token_ids) == result.usage.completion_tokens == 12
        assert result.usage.prompt_tokens == len(ids)
    assert [r.token_ids for r in llm.generate(prompt_ids, GREEDY)] == [r.token_ids for r in results]
    assert [llm.generate(prompt, GREEDY)[0].text for prompt in PROMPTS] == [r.text for r in results]


def test_any_number_of_prompts(llm: LLM) -> None:
    results = llm.generate([[i] for i in range(100, 500)], SamplingParams(temperature=0, max_tokens=1))
    assert all(len(result.token_ids) == 1 or result.finish_reason == "stop" for result in results)
    assert len(results) == 400


def test_stop_text_ends_an_answer_before_it(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[1], GREEDY)[0].text
    assert "five" in whole
    result = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=12, stop=("five",)))[0]
    assert result.text == whole[: whole.index("five")]
    assert result.finish_reason == "stop"


def test_ignore_eos_fills_max_tokens(llm: LLM) -> None:
    result = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
    assert (result.finish_reason, result.usage.completion_tokens) == ("length", 80)


def test_logits_agree_with_what_is_generated(llm: LLM, prompt_ids: list[list[int]]) -> None:
    ids = prompt_ids[0]
    first = llm.generate([ids], GREEDY)[0].token_ids
    logits = llm.logits([*ids, *first])
    assert logits.dtype == np.float32
    assert logits.shape == (len(ids) + len(first), 49152)
    assert logits[len(ids) - 1 : -1].argmax(1).tolist() == first


def test_logprobs_are_those_of_the_logits(llm: LLM, prompt_ids: list[list[int]]) -> None:
    result = llm.generate([prompt_ids[0]], SamplingParams(temperature=0, max_tokens=1, logprobs=5))[0]
    assert result.logprobs is not None
    last = llm.logits(prompt_ids[0])[-1].astype(np.float64)
    expected = last - last.max() - np.log(np.exp(last - last.max()).sum())
    assert [id for id, _ in result.logprobs[0].top] == np.argsort(-expected)[:5].tolist()
    np.testing.assert_allclose([p for _, p in result.logprobs[0].top], np.sort(expected)[::-1][:5], atol=1e-4)


def test_what_cannot_run_is_refused_and_the_rest_goes_on(llm: LLM) -> None:
    with pytest.raises(TreadleError, match="1100 tokens, but the context holds 1024"):
        llm.generate([[1, 2, 3], [1] * 1100], GREEDY)
    with pytest.raises(TreadleError, match="token id 49152"):
        llm.logits([49152])
    assert llm.logits([1]).shape == (1, 49152)


def test_closed_at_the_end_of_the_block() -> None:
    with LLM(threads=1, context=64) as llm:
        stream = llm.chat(QUESTION, stream=True)
        next(stream)
    for call in (lambda: next(stream), lambda: llm.generate("x"), lambda: llm.logits([1])):
        with pytest.raises(TreadleError, match="closed"):
            call()
    llm.close()


@pytest.mark.parametrize(
    ("model", "threads", "words"),
    [
        ("no-such-model", None, r"'no-such-model'.*smollm2:135m"),
        ("/nonexistent.gguf", None, "/nonexistent.gguf"),
        (None, 5000, "5000 threads"),
    ],
)
def test_errors_say_what_is_possible(model: str | None, threads: int | None, words: str) -> None:
    with pytest.raises(TreadleError, match=words):
        LLM(model, threads=threads)
