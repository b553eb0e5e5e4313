"""Tool calls in both modes, with the real text side and the openai client. Cases D01, D03 and D04."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.conftest import KEY, Api, Start
from tests.server.scripted import ScriptedEngine, byte_tokenizer
from treadle.server.service import Served
from treadle.server.text import ModelText
from treadle.text.tokenizer import Tokenizer

HERMES = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "Answer with <tool_call>{}</tool_call>.<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DEEPSEEK = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "<|assistant|><think>\n{# </think><｜tool▁call▁begin｜> #}"
)
MARKS = ["<|user|>", "<|assistant|>", "<|end|>", "<|system|>", "<|tool|>", "<tool_call>", "</tool_call>"]
DEEPSEEK_MARKS = [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
]
FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds places",
        "parameters": {"type": "object", "properties": {"where": {"type": "object"}}},
    },
}
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
ARGUMENTS = {
    "where": {"city": "北京", "tags": ['a "b"', "c\\", "}", "{", "</tool_call>"]},
    "n": [1, {"x": None}],
}


def call(arguments: Any, name: str = "find") -> str:
    written = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>{{"name": "{name}", "arguments": {written}}}</tool_call>'


def serve(
    scripted: Start, directory: Path, answer: str, template: str = HERMES, marks: list[str] = MARKS
) -> tuple[Api, ScriptedEngine, Tokenizer]:
    tokenizer = byte_tokenizer(directory, template, marks)
    engine = ScriptedEngine()
    engine.token_ids = tokenizer.encode(answer, specials=True)

    async def load() -> Served:
        return Served(name="toy", text=ModelText(tokenizer), engine=engine, context=2048)

    api = scripted(load=load)
    while api.get("/health").status_code == 503:
        pass
    return api, engine, tokenizer


def both(api: Api, **options: Any) -> Any:
    """The only choice of the whole answer, after checking that the stream says the same."""
    options = {"messages": HELLO, "tools": [FIND], **options}
    with openai.OpenAI(base_url=api.url + "/v1", api_key=KEY, max_retries=0) as client:
        whole = client.chat.completions.create(model="toy", **options).choices[0]
        content, reason = "", None
        calls: list[list[str]] = []
        for chunk in client.chat.completions.create(model="toy", stream=True, **options):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for piece in delta.tool_calls or []:
                if piece.index == len(calls):
                    assert piece.id and piece.type == "function"
                    calls.append([piece.function.name, ""])
                calls[piece.index][1] += piece.function.arguments
            assert reason is None
            reason = chunk.choices[0].finish_reason
    assert content == (whole.message.content or "")
    assert calls == [[c.function.name, c.function.arguments] for c in whole.message.tool_calls or []]
    assert reason == whole.finish_reason
    return whole


def test_arguments_come_through_unchanged(scripted: Start, tmp_path: Path) -> None:
    api, _, _ = serve(scripted, tmp_path, "I look.\n" + call(ARGUMENTS))
    choice = both(api)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look.\n"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == ARGUMENTS
    stopped = both(api, stop=["never written", "}}}}"])
    assert stopped.message.tool_calls[0].function == choice.message.tool_calls[0].function
    assert stopped.finish_reason == "tool_calls"


@pytest.mark.parametrize("seed", range(10))
def test_any_arguments_in_pieces_of_any_size(scripted: Start, tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    texts = ['"', "\\", "}", "{", "]", "北京", "\n", "<tool_call>", "a", ""]

    def value(depth: int) -> Any:
        kind = source.randrange(4 if depth else 2)
        if kind == 0:
            return "".join(source.choices(texts, k=3))
        if kind == 1:
            return source.choice([None, True, -1.5e3, 7])
        if kind == 2:
            return [value(depth - 1) for _ in range(3)]
        return {text + str(i): value(depth - 1) for i, text in enumerate(source.sample(texts, 3))}

    arguments = [{"a": value(3)} for _ in range(2)]
    api, _, _ = serve(scripted, tmp_path, call(arguments[0]) + "\n" + call(arguments[1], "other.one"))
    choice = both(api)
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
    assert calls == [("find", arguments[0]), ("other.one", arguments[1])]
    assert choice.message.content is None
    assert len({c.id for c in choice.message.tool_calls}) == 2


def test_only_one_call_when_parallel_calls_are_off(scripted: Start, tmp_path: Path) -> None:
    api, engine, _ = serve(scripted, tmp_path, call({"a": 1}) + call({"a": 2}) + " and so on")
    choice = both(api, parallel_tool_calls=False)
    assert [c.function.arguments for c in choice.message.tool_calls] == ['{"a": 1}']
    assert choice.finish_reason == "tool_calls"
    assert len(engine.cancelled) == 2


def test_calls_of_a_model_that_reasons(scripted: Start, tmp_path: Path) -> None:
    answer = (
        "hm <｜tool▁call▁begin｜></think>\n\n"
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n"
        '```json\n{"a": "北京"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    api, _, _ = serve(scripted, tmp_path, answer, DEEPSEEK, MARKS + DEEPSEEK_MARKS)
    message = both(api).message
    assert message.tool_calls[0].function.arguments == '{"a": "北京"}'
    assert message.reasoning_content == "hm <｜tool▁call▁begin｜>"
    raw = {"model": "toy", "messages": HELLO, "tools": [FIND], "reasoning_format": "none"}
    refused = api.post("/v1/chat/completions", json=raw)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning_format")


def test_tools_reach_the_prompt_unless_the_choice_is_none(scripted: Start, tmp_path: Path) -> None:
    api, engine, tokenizer = serve(scripted, tmp_path, call({}))
    both(api, tool_choice="auto")
    assert '"description": "Finds places"' in tokenizer.decode(engine.requests[-1].prompt_ids)
    shown = {"messages": HELLO, "tools": [FIND]}
    assert api.post("/tokenize", json=shown).json()["tokens"] == engine.requests[-1].prompt_ids
    choice = both(api, tool_choice="none")
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert "Finds places" not in tokenizer.decode(engine.requests[-1].prompt_ids)


def test_an_answer_without_calls_or_cut_off_in_one(scripted: Start, tmp_path: Path) -> None:
    api, engine, tokenizer = serve(scripted, tmp_path, "a < b, and {that} is it <tool")
    choice = both(api, logprobs=True)
    assert (choice.message.content, choice.finish_reason) == ("a < b, and {that} is it <tool", "stop")
    assert choice.message.tool_calls is None
    engine.token_ids = tokenizer.encode(call({"where": "here"}), specials=True)
    cut = both(api, max_tokens=len(engine.token_ids) - 6)
    assert cut.finish_reason == "length"
    assert cut.message.tool_calls[0].function.arguments.startswith('{"where": "')
    entries = both(api, logprobs=True).logprobs.content
    assert len(entries) == len(engine.token_ids)


def test_results_of_tools_in_the_history(scripted: Start, tmp_path: Path) -> None:
    api, engine, tokenizer = serve(scripted, tmp_path, "done")
    past = both(api).message
    assert past.content == "done"
    calls = [{"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}]
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "found <|end|>"},
    ]
    both(api, messages=history)
    prompt = tokenizer.decode(engine.requests[-1].prompt_ids, skip_specials=False)
    assert '<tool_call>{"name": "find", "arguments": {"a": 1}}</tool_call>' in prompt
    assert "<|tool|>found <|end|><|end|>" in prompt
    broken = [{**calls[0], "function": {"name": "find", "arguments": "{"}}]
    history[1] = {"role": "assistant", "content": None, "tool_calls": broken}
    refused = api.post("/v1/chat/completions", json={"model": "toy", "messages": history})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("tools", {"tools": []}),
        ("tools", {"tools": [FIND, FIND]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "two words"}}]}),
        ("tool_choice", {"tool_choice": "auto"}),
        ("tool_choice", {"tools": [FIND], "tool_choice": "sometimes"}),
        ("parallel_tool_calls", {"parallel_tool_calls": True}),
    ],
)
def test_wrong_tools_are_named(scripted: Start, tmp_path: Path, field: str, body: dict[str, Any]) -> None:
    api, engine, _ = serve(scripted, tmp_path, "x")
    refused = api.post("/v1/chat/completions", json={"model": "toy", "messages": HELLO, **body})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert not engine.requests


def test_each_choice_has_calls_of_its_own(scripted: Start, tmp_path: Path) -> None:
    api, _, _ = serve(scripted, tmp_path, call({"a": 1}))
    body = {"model": "toy", "messages": HELLO, "tools": [FIND], "n": 2}
    choices = api.post("/v1/chat/completions", json=body).json()["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [1, 1]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 2
