"""The vocabulary and template of DeepSeek-R1 behind the routes, with an engine that says what it is told.
Cases A08, B01, B02, C01, C03, C05 and D01."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Told, telling
from tests.text.conftest import read
from treadle.text.tokenizer import Tokenizer

ASK = [{"role": "user", "content": "9.11 and 9.8, which is greater?"}]
THOUGHT, ANSWER = "Let me see: 9.80 > 9.11.", "9.8 is **greater**."
CHARACTERS = "龘靐齉爩 歪 发 😸👨‍👩‍👧‍👦 🇸🇬 T́"
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


class R1(Told):
    """A served model with the tokens of R1 and one of its templates."""

    def whole(self, **fields: Any) -> Any:
        """The answer in one piece."""
        answer = self.api.post("/v1/chat/completions", json={"model": "toy", "messages": ASK, **fields})
        assert answer.is_success, answer.text
        return answer.json()

    def chunks(self, **fields: Any) -> list[Any]:
        """The only choice of every chunk of the same answer."""
        body = {"model": "toy", "messages": ASK, "stream": True, **fields}
        lines = self.api.post("/v1/chat/completions", json=body).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]


@pytest.fixture(scope="module", params=["old", "new"])
def r1(request: pytest.FixtureRequest) -> Iterator[R1]:
    """``new``: the template of February 2025, which opens the think block itself."""
    metadata = read("deepseek-r1-distill-qwen-7b")
    if request.param == "new":
        old = metadata["tokenizer.chat_template"]
        assert old.endswith("'}}{% endif %}")
        metadata["tokenizer.chat_template"] = old.removesuffix("'}}{% endif %}") + "<think>\\n'}}{% endif %}"
    with telling(R1, Tokenizer.from_gguf(metadata)) as r1:
        yield r1


def test_reasoning_is_apart_from_the_answer(r1: R1) -> None:
    count = r1.says(f"{THOUGHT}\n</think>\n\n{ANSWER}")
    whole = r1.whole()
    assert r1.prompt.endswith("which is greater?<｜Assistant｜><think>\n")
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"].strip() == THOUGHT
    assert message["content"] == ANSWER
    assert 0 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] < count
    deltas = [chunk["delta"] for chunk in r1.chunks()]
    kinds = [name for delta in deltas for name in delta if name in ("reasoning_content", "content")]
    assert kinds[1:] == sorted(
        kinds[1:], reverse=True
    )  # after the chunk with the role: reasoning, then content
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]
    raw = r1.whole(reasoning_format="none")["choices"][0]["message"]
    assert raw["content"] == f"{THOUGHT}\n</think>\n\n{ANSWER}"


def test_a_block_that_is_opened_again_is_text(r1: R1) -> None:
    r1.says("a</think>b<think>c</think>d")
    message = r1.whole()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a", "b<think>c</think>d")
    deltas = [chunk["delta"] for chunk in r1.chunks()]
    assert "".join(delta.get("content", "") for delta in deltas) == "b<think>c</think>d"


def test_one_limit_for_reasoning_and_answer(r1: R1) -> None:
    r1.says(f"{THOUGHT}\n</think>\n\n{ANSWER}")
    for limit in (7, 20):
        whole = r1.whole(max_completion_tokens=limit, max_tokens=500)
        assert whole["usage"]["completion_tokens"] == limit
        assert whole["choices"][0]["finish_reason"] == "length"


def test_it_thinks_unless_told_not_to(r1: R1) -> None:
    r1.says("x")
    for number in range(20):
        ask = {"messages": [{"role": "user", "content": f"What is {number} + 1?"}]}
        r1.whole(**ask)
        assert r1.prompt.endswith("<｜Assistant｜><think>\n")
        off = ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"})
        assert "reasoning_content" not in r1.whole(**ask, **off[number % 2])["choices"][0]["message"]
        assert r1.prompt.endswith("</think>\n\n")


def test_characters_stay_whole_wherever_the_answer_ends(r1: R1) -> None:
    count = r1.says(f"</think>\n\n{CHARACTERS}")
    assert count > len(CHARACTERS)  # some characters are several tokens
    for limit in range(1, count + 1):
        choice = r1.whole(max_tokens=limit)["choices"][0]
        chunks = r1.chunks(max_tokens=limit)
        pieces = [chunk["delta"].get("content", "") for chunk in chunks]
        assert "".join(pieces) == choice["message"]["content"]
        assert "\ufffd" not in "".join(pieces[:-2])
        assert chunks[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert choice["message"]["content"] == CHARACTERS


def arguments(source: random.Random) -> Any:
    texts = ['"', "\\", "}", "{", "]", "北京", "\n", "<｜tool▁call▁end｜>", "```", "a", ""]

    def value(depth: int) -> Any:
        match source.randrange(4 if depth else 2):
            case 0:
                return "".join(source.choices(texts, k=4))
            case 1:
                return source.choice([None, True, -1.5e3, 7])
            case 2:
                return [value(depth - 1) for _ in range(3)]
            case _:
                return {text + str(at): value(depth - 1) for at, text in enumerate(source.sample(texts, 3))}

    return {"where": {"city": "北京", "more": value(2)}, "tags": ['"', "\\", "}", value(1)]}


def test_pieces_of_arguments_join_to_the_whole(r1: R1) -> None:
    for seed in range(25):  # with each template
        given = [arguments(random.Random(seed)), arguments(random.Random(-1 - seed))]
        calls = "\n".join(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n"
            f"```json\n{json.dumps(one, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
            for one in given
        )
        r1.says(f"I look.\n</think>\n\n<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>")
        options = {"tools": [TOOL], "stop": ["never written", "}}}}}"]}
        choice = r1.whole(**options)["choices"][0]
        whole = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        assert [json.loads(text) for text in whole] == given
        pieces: dict[int, str] = {}
        chunks = r1.chunks(**options)
        for call in (call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())):
            assert ("id" in call) is (call["index"] not in pieces)
            pieces[call["index"]] = pieces.get(call["index"], "") + call["function"]["arguments"]
        assert pieces == dict(enumerate(whole))
        assert chunks[-1]["finish_reason"] == choice["finish_reason"] == "tool_calls"
