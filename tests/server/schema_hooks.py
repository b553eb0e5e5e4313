"""What schemathesis sends, made quick and made useful; loaded by schemathesis itself.

A number of tokens that is asked for and possible becomes a small one, and names become those of the served
models. Half of the bodies that the document allows lose what fields forbid each other, so that they get to
the models; a third of them asks for a stream. Nothing else is touched, least of all values of a wrong type.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import schemathesis
from schemathesis import GenerationMode

GENERATES, EMBEDS = os.environ.get("SCHEMA_MODELS", "a b").split()
FEW = 3  # tokens
_LIMITS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
_HELLO = [{"role": "user", "content": "hi"}]
_FREE: dict[str, Any] = dict.fromkeys(
    (
        "stream_options", "min_tokens", "logit_bias", "response_format", "structured_outputs", "guided_json",
        "guided_regex", "guided_choice", "guided_grammar",
    )
)  # fmt: skip
_TOOLS: dict[str, Any] = dict.fromkeys(("tools", "tool_choice"))
_CHAT = {
    **_TOOLS,
    **dict.fromkeys(("parallel_tool_calls", "chat_template_kwargs", "continue_final_message")),
    "messages": _HELLO,
}
_PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**_FREE, **_CHAT, "top_logprobs": None},
    "/v1/completions": {**_FREE, "prompt": "hi", "best_of": None, "logprobs": None},
    "/v1/messages": {**_TOOLS, "messages": _HELLO, "thinking": None, "output_config": None},
    "/v1/messages/count_tokens": {**_TOOLS, "messages": _HELLO, "thinking": None, "output_config": None},
    "/v1/responses": {
        **_TOOLS, "input": "hi", "previous_response_id": None, "top_logprobs": None, "stream_options": None,
    },
    "/v1/embeddings": {"input": "hi", "dimensions": None},
    "/tokenize": {**_CHAT, "parallel_tool_calls": None, "prompt": None},
}  # fmt: skip


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """See above."""
    allowed = _allowed(case)
    if case.method == "GET" and case.path == "/v1/models/{name}" and allowed:
        case.path_parameters["name"] = GENERATES
    body = case.body
    if case.method != "POST" or not isinstance(body, dict):
        return
    dice = _dice(body)
    if type(body.get("model")) is str and dice % 8:
        body["model"] = EMBEDS if case.path == "/v1/embeddings" else GENERATES
    plain = _PLAIN.get(case.path, {})
    if allowed and dice % 2:
        body.update({name: value for name, value in plain.items() if name in body or value is not None})
    limit = _LIMITS.get(case.path)
    if limit is not None and (limit in body or case.path != "/v1/messages"):
        asked = body.get(limit)
        if asked is None or (type(asked) is int and FEW < asked < 2**31):
            body[limit] = FEW
        if allowed and dice // 16 % 3 == 0:
            body["stream"] = True  # hardly ever drawn with all else in order
    for several in ("n", "best_of"):
        if type(body.get(several)) is int and 2 < body[several] <= 128:
            body[several] = 2


@schemathesis.check
def streams_end_well(context: Any, response: Any, case: Any) -> None:
    """An answer in pieces has no error of the server in it, and the end that its API promises."""
    if not response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        return
    text = response.content.decode()
    ends = {"/v1/messages": "event: message_stop", "/v1/responses": "event: response."}
    end = ends.get(case.path, "data: [DONE]")
    last = text.rstrip("\n").rpartition("\n\n")[2]
    assert last.startswith(end), f"the stream ends with {last[:500]!r}"
    assert not any(line.startswith(("event: error", 'data: {"error"')) for line in text.splitlines()), text


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """A short run sends one in ``SCHEMA_PART`` of the bodies that can be of many forms."""
    return case.path not in _PLAIN or _dice(case.body) // 8 % int(os.environ["SCHEMA_PART"]) == 0


def _allowed(case: Any) -> bool:
    return case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE


def _dice(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, default=repr).encode())
