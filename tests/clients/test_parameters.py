"""Every parameter of both completion calls over real HTTP: what it does to the answer of a real model, or
that it is refused by name. A parameter without a line here makes a test fail."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Api
from treadle.server.schema import UNSUPPORTED, ChatBody, CompletionBody

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TIME = {"type": "function", "function": {"name": "time"}}
END = 2  # <|im_end|>


class Call:
    """One of the calls of one model. ``call(field=…)`` gives the answer's body."""

    def __init__(self, api: Api, path: str, **base: Any) -> None:
        self.api = api
        self.path = path
        self.base = {"model": api.model, "temperature": 0, "max_tokens": 8, **base}

    def __call__(self, **fields: Any) -> Any:
        answer = self.api.post(self.path, json={**self.base, **fields})
        assert answer.is_success, answer.text
        return answer.json()

    def text(self, **fields: Any) -> str:
        """What the first choice says."""
        choice = self(**fields)["choices"][0]
        found: str = choice["text"] if "text" in choice else choice["message"]["content"]
        return found

    def count(self, **fields: Any) -> int:
        """Tokens of the answer."""
        found: int = self(**fields)["usage"]["completion_tokens"]
        return found

    def finish(self, **fields: Any) -> str:
        """Why the answer ended."""
        found: str = self(**fields)["choices"][0]["finish_reason"]
        return found

    def changes(self, **fields: Any) -> bool:
        """Whether ``fields`` make another answer than the rest of what they say, drawn with one seed."""
        hot = {"temperature": 1, "seed": 5, "max_tokens": 30}
        return self.text(**hot) != self.text(**hot, **fields)

    def token(self, text: str) -> int:
        """The id of the first token of ``text``."""
        ids = self.api.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        found: int = ids[0]
        return found


def ends(ask: Call, **fields: Any) -> Any:
    """An answer whose model wants to end the text at once."""
    return ask(logit_bias={str(END): 100}, **fields)


def streamed(ask: Call, **fields: Any) -> list[Any]:
    answer = ask.api.post(ask.path, json={**ask.base, "stream": True, **fields})
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]


def cached(ask: Call, salt: str) -> int:
    long = "One two three four five six seven eight nine ten. " * 12
    prompt = {"prompt": long} if "prompt" in ask.base else {"messages": [{"role": "user", "content": long}]}
    found: int = ask(**prompt, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def unchanged(**fields: Any) -> Callable[[Call], bool]:
    return lambda ask: ask.text() == ask.text(**fields)


def follows(pattern: str, **fields: Any) -> Callable[[Call], bool]:
    # Spaces are free in JSON: at this temperature one answer in seven has more than 40 tokens of them.
    return lambda ask: bool(re.fullmatch(pattern, ask.text(temperature=1.5, max_tokens=400, **fields)))


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]} | {
    "additionalProperties": False
}
BOOLEAN = r'\{\s*"a"\s*:\s*(true|false)\s*\}'

# What a field of both calls does. Every line is true of both.
BOTH: dict[str, Callable[[Call], bool]] = {
    "model": lambda ask: ask()["model"] == ask.api.model,
    "stream": lambda ask: (
        "".join(
            c["choices"][0].get("text") or c["choices"][0].get("delta", {}).get("content") or ""
            for c in streamed(ask)
        )
        == ask.text()
    ),
    "stream_options": lambda ask: (
        streamed(ask, stream_options={"include_usage": True})[-1]["usage"]["completion_tokens"] == ask.count()
    ),
    "n": lambda ask: [c["index"] for c in ask(n=3)["choices"]] == [0, 1, 2],
    "stop": lambda ask: "Paris" in ask.text() and "Paris" not in ask.text(stop=["Paris"]),
    "include_stop_str_in_output": lambda ask: ask.text(
        stop="Paris", include_stop_str_in_output=True
    ).endswith("Paris"),
    "seed": lambda ask: (
        ask.text(temperature=1.5, seed=1)
        == ask.text(temperature=1.5, seed=1)
        != ask.text(temperature=1.5, seed=2)
    ),
    "temperature": lambda ask: ask.text() == ask.text() != ask.text(temperature=2, seed=1),
    "top_p": lambda ask: ask.text(temperature=2, top_p=1e-6) == ask.text(),
    "top_k": lambda ask: ask.text(temperature=2, top_k=1) == ask.text(),
    "min_p": lambda ask: ask.text(temperature=2, min_p=1) == ask.text(),
    "presence_penalty": lambda ask: ask.changes(presence_penalty=2),
    "frequency_penalty": lambda ask: ask.changes(frequency_penalty=2),
    "repetition_penalty": lambda ask: ask.changes(repetition_penalty=5),
    "logit_bias": lambda ask: ask.text(logit_bias={str(ask.token(" blue")): 100}) == " blue" * 8,
    "max_tokens": lambda ask: (ask.count(max_tokens=3), ask.finish(max_tokens=3)) == (3, "length"),
    "min_tokens": lambda ask: (
        ends(ask)["usage"]["completion_tokens"] < 3 <= ends(ask, min_tokens=4)["usage"]["completion_tokens"]
    ),
    "ignore_eos": lambda ask: (
        [ends(ask, ignore_eos=on)["choices"][0]["finish_reason"] for on in (False, True)]
        == ["stop", "length"]
    ),
    "stop_token_ids": lambda ask: "Paris" not in ask.text(stop_token_ids=[ask.token(" Paris")]),
    "skip_special_tokens": lambda ask: (
        [
            "<|im_end|>" in json.dumps(ends(ask, ignore_eos=True, skip_special_tokens=skip))
            for skip in (True, False)
        ]
        == [False, True]
    ),
    "response_format": follows(
        BOOLEAN, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    ),
    "structured_outputs": follows("[xyz]{5}", structured_outputs={"regex": "[xyz]{5}"}),
    "guided_json": follows(BOOLEAN, guided_json=SCHEMA),
    "guided_regex": follows("[xyz]{5}", guided_regex="[xyz]{5}"),
    "guided_choice": follows("one|another", guided_choice=["one", "another"]),
    "guided_grammar": follows("ab+", guided_grammar='start: "a" "b"+'),
    "cache_salt": lambda ask: [cached(ask, s) > 0 for s in ("one", "one", "two")] == [False, True, False],
    # orders the queue (tests/engine/test_scheduling.py), and changes no answer
    "priority": unchanged(priority=7),
    "user": unchanged(user="u"),
    "metadata": unchanged(metadata={"a": "b"}),
    "safety_identifier": unchanged(safety_identifier="s"),
    "prompt_cache_key": unchanged(prompt_cache_key="k"),
}

CHAT: dict[str, Callable[[Call], bool]] = {
    "messages": lambda ask: "Paris" not in ask.text(messages=[{"role": "user", "content": "Say hello."}]),
    "max_completion_tokens": lambda ask: ask.count(max_completion_tokens=3) == 3,
    "logprobs": lambda ask: (
        len(ask(logprobs=True)["choices"][0]["logprobs"]["content"]) == ask.count()
        and ask()["choices"][0]["logprobs"] is None
    ),
    "top_logprobs": lambda ask: (
        [
            len(token["top_logprobs"])
            for token in ask(logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
        ]
        == [3] * ask.count()
    ),
    "add_generation_prompt": lambda ask: (
        ask(add_generation_prompt=False)["usage"]["prompt_tokens"] < ask()["usage"]["prompt_tokens"]
    ),
    "continue_final_message": lambda ask: ask.text(
        messages=[*CAPITAL, {"role": "assistant", "content": "The capital of France is"}],
        continue_final_message=True,
        add_generation_prompt=False,
    ).startswith(" Paris"),
    "tools": lambda ask: ask(tools=[WEATHER])["usage"]["prompt_tokens"] > ask()["usage"]["prompt_tokens"],
    "tool_choice": lambda ask: (
        [
            (found["message"].get("tool_calls") or [{}])[0].get("function", {}).get("name")
            for choice in ("none", {"type": "function", "function": {"name": "time"}})
            for found in ask(tools=[WEATHER, TIME], tool_choice=choice, max_tokens=60)["choices"]
        ]
        == [None, "time"]
    ),
    "parallel_tool_calls": lambda ask: (
        [
            len(found["message"]["tool_calls"])
            for found in ask(
                tools=[TIME],
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=1,
                n=4,
                max_tokens=60,
            )["choices"]
        ]
        == [1] * 4
    ),
}


def thought(ask: Call, **fields: Any) -> int:
    found: int = ask(**fields)["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return found


# Of a model that reasons (real tokens and template of DeepSeek-R1, random weights: it never ends by itself).
REASONING: dict[str, Callable[[Call], bool]] = {
    "reasoning_format": lambda ask: (
        ["reasoning_content" in ask(reasoning_format=f)["choices"][0]["message"] for f in ("auto", "none")]
        == [True, False]
    ),
    "reasoning": lambda ask: (
        thought(ask, max_tokens=60, reasoning={"max_tokens": 9}) < 20 < thought(ask, max_tokens=60)
    ),
    "reasoning_effort": lambda ask: (
        [bool(thought(ask, reasoning_effort=effort)) for effort in ("none", "high")] == [False, True]
    ),
    "thinking_token_budget": lambda ask: thought(ask, max_tokens=60, thinking_token_budget=9) < 20,
    "thinking_budget_tokens": lambda ask: (
        thought(ask, max_tokens=60, thinking_budget_tokens=9)
        < 20
        < thought(ask, max_tokens=60, thinking_budget_tokens=-1)
    ),
    "chat_template_kwargs": lambda ask: (
        [bool(thought(ask, chat_template_kwargs={"enable_thinking": on})) for on in (False, True)]
        == [False, True]
    ),
}

COMPLETIONS: dict[str, Callable[[Call], bool]] = {
    "prompt": lambda ask: [c["index"] for c in ask(prompt=["a", "b", "c"])["choices"]] == [0, 1, 2],
    "logprobs": lambda ask: (
        [len(top) for top in ask(logprobs=2)["choices"][0]["logprobs"]["top_logprobs"]] == [2] * ask.count()
    ),
    "echo": lambda ask: ask.text(echo=True) == ask.base["prompt"] + ask.text(),
    "best_of": lambda ask: len(ask(n=2, best_of=2, seed=1, temperature=1)["choices"]) == 2,
}


@pytest.fixture
def chat(smol: Api) -> Call:
    return Call(smol, "/v1/chat/completions", messages=CAPITAL)


@pytest.fixture
def completions(smol: Api) -> Call:
    return Call(smol, "/v1/completions", prompt="Paris is the capital of France. The capital of France is")


@pytest.mark.parametrize("field", [*BOTH, *CHAT])
def test_of_chat_completions(chat: Call, field: str) -> None:
    assert {**BOTH, **CHAT}[field](chat)


@pytest.mark.parametrize("field", [*BOTH, *COMPLETIONS])
def test_of_completions(completions: Call, field: str) -> None:
    assert {**BOTH, **COMPLETIONS}[field](completions)


@pytest.mark.parametrize("field", REASONING)
def test_of_reasoning(r1: Api, field: str) -> None:
    assert REASONING[field](Call(r1, "/v1/chat/completions", messages=CAPITAL, seed=1))


@pytest.mark.parametrize(("path", "body"), [("chat/completions", ChatBody), ("completions", CompletionBody)])
def test_the_others_are_refused_by_name(chat: Call, completions: Call, path: str, body: Any) -> None:
    ask = chat if body is ChatBody else completions
    refused = UNSUPPORTED.keys() - body.model_fields.keys()
    for name in refused:
        answer = ask.api.post(ask.path, json={**ask.base, name: "something"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
        assert error["message"].startswith(name)
    nothing = {
        name: value[0] for name, value in UNSUPPORTED.items() if value and name not in body.model_fields
    }
    assert ask.text(**nothing) == ask.text()
    assert ask.text(**dict.fromkeys(UNSUPPORTED)) == ask.text()


def test_no_parameter_was_forgotten() -> None:
    assert set(ChatBody.model_fields) == {*BOTH, *CHAT, *REASONING}
    assert set(CompletionBody.model_fields) == {*BOTH, *COMPLETIONS}
    told = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    chapters = told.partition("## Chat completions")[2].partition("## Embeddings")[0]
    for name in {*ChatBody.model_fields, *CompletionBody.model_fields, *UNSUPPORTED} - {"model"}:
        assert f"`{name}`" in chapters or f"`{name}." in chapters, name
