"""Bodies as tools send them whose clients are too heavy to install: what they ask for, they get."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.conftest import WEATHER, Thinker

SYSTEM = {"role": "system", "content": "Be helpful."}
QUESTION = {"role": "user", "content": "How is Oslo?"}
FUNCTION = {"name": "weather", "description": "Weather of a city", "parameters": WEATHER}
TOOL = {"type": "function", "function": FUNCTION}
PAST_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}
SCHEMA_OF_ZOD = {
    **WEATHER,
    "$schema": "http://json-schema.org/draft-07/schema#",
    "additionalProperties": False,
}
FIM = [
    "<fim_prefix>",
    "<fim_suffix>",
    "<fim_middle>",
    "<file_sep>",
    "<|endoftext|>",
    "</fim_middle>",
    "\n\n",
    "```",
]

CHAT: dict[str, dict[str, Any]] = {
    "Open WebUI": {"stream": True, "stream_options": {"include_usage": True}, "messages": [SYSTEM, QUESTION]},
    "Open WebUI, title of a chat": {"stream": False, "messages": [QUESTION], "max_completion_tokens": 1000},
    "Open WebUI, parameters of a model": {
        "stream": True, "messages": [QUESTION], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0,
        "frequency_penalty": 0, "presence_penalty": 0, "seed": 0, "stop": ["###"], "logit_bias": {},
        "reasoning_effort": "medium", "max_tokens": 128,
    },
    "Open WebUI, native tools": {"stream": True, "messages": [SYSTEM, QUESTION], "tools": [TOOL]},
    "LlamaIndex OpenAILike": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "How is Oslo?"}]}],
        "stream": False, "temperature": 0.1, "max_tokens": 256, "logprobs": True, "top_logprobs": 0,
    },
    "LlamaIndex, agent": {
        "messages": [
            SYSTEM, QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [PAST_CALL]},
            {"role": "tool", "content": "Rain", "tool_call_id": "call_1"},
        ],
        "stream": True, "temperature": 0.1, "tool_choice": "auto", "parallel_tool_calls": True,
        "tools": [{"type": "function", "function": {**FUNCTION, "strict": False}}],
    },
    "Continue": {
        "messages": [SYSTEM, QUESTION], "max_tokens": 2048, "stream": True, "temperature": 0.5,
        "stop": FIM, "tools": [TOOL], "tool_choice": "auto",
    },
    "Dify, checking a key": {"messages": [{"role": "user", "content": "ping"}], "max_tokens": 5},
    "Dify": {
        "messages": [SYSTEM, QUESTION], "stream": True, "temperature": 0.7, "top_p": 1.0, "max_tokens": 512,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "user": "abc-123", "stop": ["\nObservation"],
        "stream_options": {"include_usage": True},
    },
    "n8n, agent": {
        "messages": [SYSTEM, QUESTION], "stream": True, "temperature": 0.7, "n": 1, "tool_choice": "auto",
        "stream_options": {"include_usage": True}, "parallel_tool_calls": True,
        "tools": [{"type": "function", "function": {**FUNCTION, "parameters": SCHEMA_OF_ZOD}}],
    },
    "Vercel AI SDK": {
        "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "How is Oslo?"}]}],
        "stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "store": False,
        "response_format": {"type": "text"},
    },
    "history of another server": {
        "messages": [
            QUESTION,
            {"role": "assistant", "content": "Wet.", "refusal": None, "annotations": [], "audio": None,
             "function_call": None, "reasoning_content": "Hm.", "tool_calls": None},
            QUESTION,
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CHAT)
def test_chat(thinker: Thinker, name: str) -> None:
    thinker.says("<think>Hm.</think>Wet.")
    body = {"model": "toy", **CHAT[name]}
    answer = thinker.api.post("/v1/chat/completions", json=body)
    assert answer.is_success, answer.text
    if body.get("stream"):
        data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        chunks = [json.loads(line) for line in data[:-1]]
        assert data[-1] == "[DONE]"
        assert bool(chunks[-1].get("usage")) == ("stream_options" in body)
        said = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
        assert "".join(said) == "Wet."
    elif body.get("max_tokens") != 5:
        assert answer.json()["choices"][0]["message"]["content"] == "Wet."


def test_completion_of_an_editor(thinker: Thinker) -> None:
    thinker.says("return 1")
    prompt = "<fim_prefix>def one():\n    <fim_suffix>\n<fim_middle>"
    body = {
        "model": "toy",
        "prompt": prompt,
        "stream": True,
        "max_tokens": 64,
        "temperature": 0.01,
        "stop": FIM,
    }
    answer = thinker.api.post("/v1/completions", json=body)
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in data) == "return 1"
    assert thinker.prompt == prompt


def test_coding_agent_over_responses(thinker: Thinker) -> None:
    thinker.says("<think>Hm.</think>Done.")
    shell = {
        "type": "function",
        "name": "shell",
        "description": "Run",
        "strict": False,
        "parameters": WEATHER,
    }
    body = {
        "model": "toy", "instructions": "You are a coding agent.", "tools": [shell], "tool_choice": "auto",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "SG0u"},
            {"type": "function_call", "name": "shell", "arguments": '{"city": "ls"}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
        ],
        "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
        "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0198c7a2",
        "text": {"verbosity": "medium"},
    }  # fmt: skip
    answer = thinker.api.post("/v1/responses", json=body)
    assert answer.is_success, answer.text
    assert "event: response.completed\n" in answer.text
    assert "You are a coding agent.\n\nRules.<|end|><|user|>Look.<|end|>" in thinker.prompt
    assert '<think>Hm.</think><tool_call>{"name": "shell"' in thinker.prompt


def test_coding_agent_over_messages(thinker: Thinker) -> None:
    thinker.says("<think>Hm.</think>Done.")

    def said(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}

    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "toy", "max_tokens": 32000, "stream": True, "temperature": 1,
        "system": [said("You are a CLI."), {**said("Rules."), **cached}],
        "messages": [
            {"role": "user", "content": [said("<reminder>"), said("Look.")]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "EqQBCg"},
                {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"city": "ls"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_01", "content": "a.py", **cached},
            ]},
        ],
        "tools": [{"name": "Bash", "description": "Run", "input_schema": SCHEMA_OF_ZOD}],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
    }  # fmt: skip
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}
    answer = thinker.api.post("/v1/messages?beta=true", json=body, headers=headers)
    assert answer.is_success, answer.text
    assert answer.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert '"thinking_delta"' in answer.text
    assert "<|system|>You are a CLI.\n\nRules.<|end|><|user|><reminder>\n\nLook.<|end|>" in thinker.prompt
