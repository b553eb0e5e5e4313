"""The Python interface on the built-in model, SmolLM2-135M-Instruct."""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
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
    assert result.usage.completion_tokens == len(result.token_ids)


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
    calls: list[Callable[[], object]] = [
        lambda: next(stream),
        lambda: llm.generate("x"),
        lambda: llm.generate([]),
        lambda: llm.chat(QUESTION, stream=True),
        lambda: llm.logits([1]),
        llm.__enter__,
    ]
    for call in calls:
        with pytest.raises(TreadleError, match="closed"):
            call()
    llm.close()


def test_closing_ends_the_streams_of_other_threads() -> None:
    started = threading.Event()

    def read(stream: Iterator[str]) -> None:
        for _ in stream:
            started.set()

    llm = LLM(threads=1, context=1024)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read, llm.chat(QUESTION, params, stream=True))
        assert started.wait(60)
        llm.close()
        with pytest.raises(TreadleError, match="closed"):
            reading.result(60)


def test_threads_share_a_model(llm: LLM) -> None:
    def streamed(question: str) -> str:
        return "".join(llm.chat([{"role": "user", "content": question}], GREEDY, stream=True))

    questions = [f"Count from {i} to ten." for i in range(8)]
    alone = [streamed(question) for question in questions]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(streamed, questions * 3)) == alone * 3


def test_ctrl_c_leaves_the_model_usable(llm: LLM) -> None:
    before = llm.chat(QUESTION, GREEDY).text
    long = SamplingParams(max_tokens=None, ignore_eos=True)
    for i in range(6):
        timer = threading.Timer(0.05 + 0.011 * i, _thread.interrupt_main)
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            llm.generate(PROMPTS, long)
        assert llm.chat(QUESTION, GREEDY).text == before
    assert llm.logits([1, 2, 3]).shape[0] == 3


def test_a_forked_process_is_told_to_load_its_own(llm: LLM) -> None:
    llm.generate("x", GREEDY)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate("x", GREEDY)
        except TreadleError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"create it in the process that uses it" in os.read(reading, 1000)
    os.close(reading)
    os.close(writing)


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


@pytest.mark.parametrize(
    ("name", "value"), [("context", 0), ("context", -5), ("context", 2.5), ("threads", "2")]
)
def test_sizes_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(TreadleError, match=f"{name} is {value!r}; it must be a whole number, at least"):
        LLM(**{name: value})


WRONG_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"stop": ("a", 5)}, r"stop is \('a', 5\); it must be a text, or a tuple of texts"),
    ({"max_tokens": 2.5}, r"max_tokens is 2\.5; it must be a whole number or None"),
    ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
    ({"ignore_eos": "x"}, "ignore_eos is 'x'; it must be True or False"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens is 9, .* leave 3 tokens"),
    ({"min_tokens": 1024, "max_tokens": None}, "min_tokens is 1024, .* leave [0-9]+ tokens"),
    ({"stop_token_ids": ("a",)}, "stop_token_ids is .* whole numbers"),
    ({"stop_token_ids": (50000,)}, "token id 50000"),
    ({"logit_bias": {"a": 1.0}}, "logit_bias is {'a': 1.0}; .* whole numbers"),
    ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"top_k": 2**70}, "top_k is 1180591620717411303424; it must be a whole number"),
    ({"seed": 2**64}, "seed must be"),
    ({"logprobs": True}, "logprobs is True; it must be a whole number or None"),
    ({"reasoning": "maybe"}, "reasoning is 'maybe'; it must be one of 'none', 'open', 'may_open'"),
    ({"grammar": 5}, "grammar is 5; it must be a text or None"),
    ({"grammar": "start: ("}, "grammar does not compile: "),
    ({"grammar": 'start: "a"', "ignore_eos": True}, "ignore_eos cannot be combined with a grammar"),
]


@pytest.mark.parametrize(("given", "words"), WRONG_PARAMS)
def test_sampling_that_is_wrong_is_explained(llm: LLM, given: dict[str, Any], words: str) -> None:
    params = SamplingParams(**given)
    for call in (lambda: llm.generate("Hi", params), lambda: llm.chat(QUESTION, params)):
        with pytest.raises(TreadleError, match=words):
            call()


@pytest.mark.parametrize("field", msgspec.structs.fields(SamplingParams), ids=lambda field: field.name)
def test_no_field_takes_just_anything(llm: LLM, field: msgspec.structs.FieldInfo) -> None:
    with pytest.raises(TreadleError, match=f"{field.name} is <object.*; it must be "):
        llm.generate("Hi", msgspec.structs.replace(GREEDY, **{field.name: object()}))


def test_params_of_another_kind(llm: LLM) -> None:
    other: Any = {"max_tokens": 5}
    with pytest.raises(TreadleError, match=r"params is {'max_tokens': 5}; it must be a SamplingParams"):
        llm.generate("Hi", other)


def test_stop_may_be_one_text(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[1], GREEDY)[0].text
    params = msgspec.structs.replace(GREEDY, stop="five")
    assert llm.generate(PROMPTS[1], params)[0].text == whole[: whole.index("five")]


def test_numbers_of_numpy_are_taken(llm: LLM, prompt_ids: list[list[int]]) -> None:
    first = llm.generate([prompt_ids[0]], GREEDY)[0]
    numpy: dict[str, Any] = {
        "temperature": np.float32(0),
        "max_tokens": np.int64(12),
        "logit_bias": {np.int64(1): np.float32(0)},
        "stop_token_ids": np.array([2]),
        "ignore_eos": np.bool_(False),
    }
    prompts: Any = np.array([prompt_ids[0]])
    assert llm.generate(prompts, SamplingParams(**numpy))[0].token_ids == first.token_ids


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([1, 2, 3], r"prompts\[0\] is the token id 1, .* wrap a single one: generate\(\[\[1, 2, 3\]\]\)"),
        ([[1], ["a"]], r"prompts\[1\]\[0\] is 'a'; a token id must be a whole number"),
        ([[1, 2.0]], r"prompts\[0\]\[1\] is 2.0; a token id must be a whole number"),
        ([[True]], r"prompts\[0\]\[0\] is True"),
        (["Hi", None], r"prompts\[1\] is None; it must be a list of token ids"),
        (5, "prompts is 5; it must be a text, a list of texts"),
        ({"prompt": "Hi"}, "prompts is {'prompt': 'Hi'}; it must be a text"),
        (b"Hi", "prompts is b'Hi'; it must be a text"),
    ],
)
def test_prompts_that_are_wrong_are_explained(llm: LLM, prompts: Any, words: str) -> None:
    with pytest.raises(TreadleError, match=words):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", "messages is 'hi'; it must be a list of messages such as {'role': 'user'"),
        (QUESTION[0], "messages is {.*; it must be a list of messages"),
        (None, "messages is None; it must be a list"),
        ([*QUESTION, "hi"], r"messages\[1\] is 'hi'; messages must be"),
        ([{"content": "hi"}], r"messages\[0\]\.role"),
        ([], "messages: must not be empty"),
    ],
)
def test_messages_that_are_wrong_are_explained(llm: LLM, messages: Any, words: str) -> None:
    for stream in (False, True):
        with pytest.raises(TreadleError, match=words):
            llm.chat(messages, GREEDY, stream=stream)


def test_logits_fill_the_context_and_no_more(llm: LLM) -> None:
    assert llm.logits([1] * 1024).shape == (1024, 49152)
    with pytest.raises(TreadleError, match="has 1025 tokens, but the context holds 1024; give"):
        llm.logits([1] * 1025)
    with pytest.raises(TreadleError, match=r"token_ids\[1\] is 'a'"):
        llm.logits([1, "a"])  # type: ignore[list-item]
